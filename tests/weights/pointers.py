"""What git writes in the place of a large file that it has not fetched yet."""

from __future__ import annotations

LFS_POINTER = b"""version https://git-lfs.github.com/spec/v1
oid sha256:c5a1b8c2a3a54ba7ff8b2dd3d8dd0a0c6ea1dc36d4b3d7e9ba1fbdc8a1e9e0f1
size 4976698672
"""
