"""Attention as families have it: heads, latent heads, indexers, windows, borrowed keys."""
