"""A rank's far cache blocks in a file: on a disk there is room for more than in memory."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.daemon.machine.files import take_room, write_all
from motley.plugins.engine import CacheBlocks, CacheSpec
from motley.plugins.native.mapped import Guard
from motley.protocol.wording import human_bytes

ALIGNED = 64
"""Each array begins at a multiple of so many bytes."""


class DiskFull(Exception):
    """There is no room on a disk for the cache blocks that are to be kept there; the message says where and how much
    is needed."""


class FarFile:
    """Far cache blocks of a rank in a file without a name, which nobody else can open and which is gone with this
    process, however it ends. See `motley.plugins.engine.FarBlocks`.

    All its room is taken when it is made. What is written goes through the system's cache of files, so blocks that are
    read often are in memory while there is memory to spare.
    """

    def __init__(self, folder: Path, blocks: CacheBlocks, caches: Iterable[CacheSpec]) -> None:
        """
        Args:
            folder: on the disk; made if it is not there.
            blocks: there is at least one far one.
            caches: of the layers; those that have blocks of their own are not kept (`CacheBlocks.movable`).

        Raises:
            DiskFull: the disk has too little room, or the folder cannot be written to.
        """
        self._places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        """Where each array begins, what shape it has in all blocks, and its type."""
        size = 0
        for name, (shape, dtype) in blocks.arrays(blocks.movable(caches)).items():
            self._places[name] = size, (blocks.far, *shape), np.dtype(dtype)
            size += -(-prod((blocks.far, *shape)) * np.dtype(dtype).itemsize // ALIGNED) * ALIGNED
        self.size = size
        """Bytes of the file."""
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(tempfile.TemporaryFile(dir=folder, buffering=0))
                take_room(file, max(1, size))
                mapped = mmap.mmap(file.fileno(), max(1, size), access=mmap.ACCESS_READ)
            except OSError as error:
                raise DiskFull(
                    f"{human_bytes(size)} for {blocks.far * blocks.tokens} tokens of KV caches cannot be taken in"
                    f" {folder}: {error}. Make room there, or ask for fewer tokens on disk"
                ) from error
            stack.pop_all()
        self._file = file
        self._folder = folder
        self._guard = Guard(mapped)
        self._bytes = np.frombuffer(mapped, np.uint8)

    @property
    def lost(self) -> str:
        """Why what is in the file is not to be relied upon any more; empty: all that was read could be. What could not
        is zeros."""
        return f"KV caches cannot be read from the disk of {self._folder}" if self._guard.broken else ""

    def read(self, name: str) -> npt.NDArray[Any]:
        start, shape, dtype = self._places[name]
        return self._bytes[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def write(self, name: str, number: int, values: npt.NDArray[Any]) -> None:
        start, _, _ = self._places[name]
        self._file.seek(start + number * values.nbytes)
        write_all(self._file, values.data.cast("B"))

    def close(self) -> None:
        """Give up the file. What was read of it stays valid while it is held."""
        self._bytes = self._bytes[:0]
        self._file.close()
