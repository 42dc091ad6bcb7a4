"""Measurements of what narrow formats cost in accuracy."""
