"""What this machine is, how fast, and what it has of a model."""
