"""Git-LFS pointers: what a clone has in the place of large files until `git lfs pull` fetches them.

A pointer is a text of three lines, ``version``, ``oid`` and ``size``
(https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md).
"""

from __future__ import annotations

import re
from pathlib import Path

from motley.protocol.wording import human_bytes

_BEGIN = b"version https://git-lfs.github.com/spec/v1\n"
_LONGEST = 1024
"""Bytes of a pointer, at most."""
_SIZE = re.compile(rb"^size (\d{1,18})$", re.MULTILINE)


def pointer_told(file: Path) -> str:
    """What to say of a file that is a Git-LFS pointer; empty if it is none, or cannot be read."""
    try:
        with file.open("rb") as stream:
            text = stream.read(_LONGEST)
    except OSError:
        return ""
    if not text.startswith(_BEGIN):
        return ""
    size = _SIZE.search(text)
    itself = f"the file itself ({human_bytes(int(size[1]))})" if size else "the file itself"
    return (
        f"{file}: a Git-LFS pointer, not {itself}: run `git lfs pull` in {file.parent}, and `git lfs install` before it"
        " if that has never been done there"
    )
