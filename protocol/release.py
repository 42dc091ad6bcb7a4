"""Which release of Motley this is, as the package's own data tell."""

from __future__ import annotations

from importlib.metadata import version

PACKAGE = "motley-mesh"
"""What it is called where packages are installed from; in Python, and as a command, it is `motley`."""


def release() -> str:
    """The version that is installed, like ``0.1.0``."""
    return version(PACKAGE)
