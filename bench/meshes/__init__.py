"""Ranks of this machine to measure with, as processes or threads, and an emulated network between them."""
