"""Finding a mesh, joining it, and asking it."""
