"""Trainings as jobs of the mesh: what each one is and does, kept over restarts, and carried out by nodes' daemons.

The orchestrator never sees data, settings or adapters: these go between the job's workers, over the data plane.
"""
