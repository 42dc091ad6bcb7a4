"""Commands about this machine: what it is, and what part it takes in a mesh."""
