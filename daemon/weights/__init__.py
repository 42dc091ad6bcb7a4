"""Exactly the bytes of a rank's share: read from checkpoints, quantised, kept in a cache."""
