"""How a whole mesh serves: under load, and while machines are killed."""
