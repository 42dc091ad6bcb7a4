"""The folder in which this user's Motley keeps what it needs another time, the mesh's identity above all."""

from __future__ import annotations

import os
from pathlib import Path

from motley.daemon.node.joining.membership import FOLDER


def home() -> Path:
    """``$MOTLEY_HOME``, or the one that the system has for the data of users' programs."""
    if told := os.environ.get("MOTLEY_HOME"):
        return Path(told)
    import platformdirs

    return Path(platformdirs.user_data_dir("motley", appauthor=False))


def meshes() -> Path:
    """Where is kept to which meshes this machine belongs."""
    return home() / FOLDER


def unreadable() -> str:
    """Why it cannot be read to which meshes this machine belongs; "": it can, or nothing is kept yet."""
    try:
        for file in meshes().iterdir():
            file.open("rb").close()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    return ""
