"""Models that many ask for: their published sizes, and short names for them."""
