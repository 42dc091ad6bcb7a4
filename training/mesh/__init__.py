"""Workers of a training that is a job of the mesh: processes that daemons start, and that talk over the data plane.

What is trained on goes from the owner's worker to the others, in memory, and adapters come back; the orchestrator
hears of progress alone.
"""
