"""A session as a state machine, without I/O, and what it consists of."""
