"""Where the C library is that stands in for NCCL (`library.c`); `setup.py` compiles it when Motley is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from .codes import NcclError, Result

NAME = "nccl.dll" if sys.platform == "win32" else "libnccl.so.2"
"""NCCL's own file name: programs look for the library under it."""
PATH = Path(__file__).with_name(NAME)


def library() -> Path:
    """The path of the compiled library.

    Raises:
        NcclError: it is missing, as the installation of Motley did not build it.
    """
    if not PATH.exists():
        why = f"{PATH} is missing; it is built by installation"
        raise NcclError(
            Result.SYSTEM_ERROR, f"{why}: run `pip install .` (or `pip install -e .`) in Motley's folder again"
        )
    return PATH
