"""Measurements of what clients see of a server, also while its machines fail."""
