"""A rank: it loads its share, executes steps with the others and, as rank 0, decides what they are."""
