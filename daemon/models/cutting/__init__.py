"""How a model is cut: into which units, who has which, what they cost, and how matrices are held."""
