"""Who is in the mesh, and how they reach each other: tables without I/O."""
