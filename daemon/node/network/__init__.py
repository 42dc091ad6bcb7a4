"""Where a node is reached, and how quickly it reaches others."""
