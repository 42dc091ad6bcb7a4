"""Requests under way: their life, their places, what is kept of their answers, how they went."""
