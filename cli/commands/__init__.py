"""The commands of `motley`, a file each, in a room for what they are about."""
