"""Which nodes take part, and in which stages."""
