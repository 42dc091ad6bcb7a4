"""How this Motley was installed, as the package's own data tell, and how it gets an extra: what messages advise."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from urllib.parse import urlsplit

PACKAGE = "motley-mesh"
"""What Motley is called where packages are installed from; in Python, and as a command, it is `motley`."""


def source() -> tuple[str, bool]:
    """The folder that it was installed from, and whether it runs from there; "": from none, but by name."""
    from importlib.metadata import distributions  # both take a moment, and few processes need them
    from urllib.request import url2pathname

    for found in distributions(name=PACKAGE):  # what a build has left in the working directory says nothing
        told = json.loads(found.read_text("direct_url.json") or "{}")
        if "dir_info" in told:
            return url2pathname(urlsplit(told["url"]).path), told["dir_info"].get("editable", False)
    return "", False


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation."""
    return command(extra, sys.prefix, *source())


def command(extra: str, prefix: str, folder: str, editable: bool) -> str:
    """The command that adds an extra to an installation.

    Args:
        prefix: of the environment that it is in.
        folder, editable: as `source` tells them.
    """
    install = "pipx install --force" if "pipx" in Path(prefix).parts else "pip install"
    return f"{install}{' -e' if editable else ''} '{folder or PACKAGE}[{extra}]'"
