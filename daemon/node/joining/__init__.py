"""Joining a mesh, and talking with its orchestrator."""
