"""What can go wrong with a GPU; the messages say what to do about it."""

from __future__ import annotations


class CudaError(Exception):
    """The GPU, its driver or a package for it is missing or has failed."""


class OutOfDeviceMemory(CudaError):
    """An allocation does not fit; nothing else has changed."""


class DeviceLost(CudaError):
    """Nothing of this process on the GPU can be used any more, nor needs to be freed."""
