"""Which release of Motley this is, as the package's own data tell."""

from __future__ import annotations

from importlib.metadata import version

from motley.protocol.installing import PACKAGE


def release() -> str:
    """The version that is installed, like ``0.1.0``."""
    return version(PACKAGE)
