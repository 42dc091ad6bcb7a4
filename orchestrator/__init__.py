"""The orchestrator: who is in the mesh, what is served by whom, and the HTTP API."""
