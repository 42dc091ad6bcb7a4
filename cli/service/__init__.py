"""This machine's part in a mesh as a service that the system runs."""
