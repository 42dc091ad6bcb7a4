"""Which tokens of which requests each step computes."""
