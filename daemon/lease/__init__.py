"""A machine's owner, or another job there, takes a device back for a while: a lease, its file and its course."""
