"""What can go wrong with a GPU; the messages say what to do."""

from __future__ import annotations


class CudaError(Exception):
    """The GPU, its driver or a package for it is missing or has failed."""
