"""Commands that train adapters, here or on machines of the mesh."""
