"""Pure functions that decide who does what. No I/O, no clock."""
