"""The mesh's own routes: nodes, sessions, plans, experts."""
