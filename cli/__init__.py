"""The `motley` command: its commands, and what they share."""
