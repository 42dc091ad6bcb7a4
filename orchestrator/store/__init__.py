"""What outlives a restart and is no session: who may join, who may call, who belongs to the mesh, what was used.

Everything is read into memory when the orchestrator starts and asked there; a change is written before it counts.
"""
