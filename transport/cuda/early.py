"""How a kernel is launched that begins before the one before it is done (`Driver.launch`), as cuda.h lays it out."""

from __future__ import annotations

import ctypes


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h: one way in which a kernel is launched otherwise than usual."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("more", ctypes.c_char * 60),
    )


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("blocks", "blocks_y", "blocks_z", "threads", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("attributes_count", ctypes.c_uint),
    )


EARLY = LaunchAttribute(id=6, value=1)
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: as `Driver.launch` says."""
