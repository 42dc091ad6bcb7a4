"""What a residual is where it is not one row of a token alone: streams, and rows that enter beside it."""
