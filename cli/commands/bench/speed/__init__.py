"""Measurements of how long tokens, sums and adapters take."""
