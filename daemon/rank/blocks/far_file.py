"""A rank's far cache blocks in a file: on a disk there is room for more than in memory.

Disks may give back what nobody wrote. To look at every block in every step would take as long as attention does, so a
block is compared with its checksum when a sequence begins with it, as it may have been there for long, and by turns
while it is used.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import numpy.typing as npt

from motley.daemon.machine.files import take_room, write_all
from motley.daemon.machine.memory import available_memory
from motley.plugins.engine import CacheBlocks, CacheSpec
from motley.plugins.native.mapped import Guard
from motley.protocol.wording import human_bytes

ALIGNED = 64
"""Each array begins at a multiple of so many bytes."""
SAMPLE = 64 << 20
"""Bytes that are read to measure how fast a file is read, at most."""
TRIES = 3
"""How often that is measured; the quickest time counts."""


class DiskFull(Exception):
    """There is no room on a disk for the cache blocks that are to be kept there; the message says where and how much
    is needed."""


class FarPlace(Protocol):
    """Where the far ones of a rank's cache blocks are: on its disk, or another machine has them."""

    @property
    def lost(self) -> str:
        """Why they are lost, so that what was computed with them may be wrong; empty: they are there."""
        ...

    def verify(self, new: npt.NDArray[np.int32], used: npt.NDArray[np.int32]) -> None:
        """Look whether blocks are still what was kept: those that a sequence begins with, and of all that a step uses
        some, by turns."""
        ...

    def block_s(self, blocks: int) -> float:
        """Measure what a step that uses so many blocks takes for each of them, in seconds; infinite: there are none. To
        be called before any is kept there."""
        ...


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
            self._places[name] = size, (blocks.on_disk, *shape), np.dtype(dtype)
            size += -(-prod((blocks.on_disk, *shape)) * np.dtype(dtype).itemsize // ALIGNED) * ALIGNED
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
                    f"{human_bytes(size)} for {blocks.on_disk * blocks.tokens} tokens of KV caches cannot be taken in"
                    f" {folder}: {error}. Make room there, or ask for fewer tokens on disk"
                ) from error
            stack.pop_all()
        self._file = file
        self._folder = folder
        self._guard = Guard(mapped)
        self._bytes = np.frombuffer(mapped, np.uint8)
        self._numbers = range(blocks.count, blocks.first_held)
        self._sums = {name: np.zeros(blocks.on_disk, np.uint32) for name in self._places}
        """Of each array of each block, as it was written."""
        self._latest = -1
        """The block that was verified by turns."""
        self._damaged = False

    @property
    def lost(self) -> str:
        """Why what is in the file is not to be relied upon any more; empty: all that was read could be. What could not
        is zeros."""
        if self._guard.broken:
            return f"KV caches cannot be read from the disk of {self._folder}"
        return f"KV caches on the disk of {self._folder} are damaged" if self._damaged else ""

    def verify(self, new: npt.NDArray[np.int32], used: npt.NDArray[np.int32]) -> None:
        """Compare blocks with what was written: the `new` ones, and another one of those that are `used`. Takes a
        millisecond for a megabyte. What is found shows in `lost`.

        Args:
            new, used: numbers of blocks; those that are elsewhere are left out.
        """
        due = {*self._own(new).tolist()}
        if len(far := self._own(used)):
            later = far[far > self._latest]
            self._latest = int(later.min() if len(later) else far.min())
            due.add(self._latest)
        self._damaged |= any(
            crc32(self.read(name)[number]) != sums[number] for number in due for name, sums in self._sums.items()
        )

    def block_s(self, blocks: int) -> float:
        """Measure what a step that uses so many blocks takes to read each of them, in seconds; infinite: it cannot.

        They are read as they will be: from the system's cache of files if the whole file has room there, else, where
        the system lets us, from the disk.
        """
        read = min(blocks * self.size // len(self._numbers), self.size, SAMPLE)
        some = np.random.default_rng(0).bytes(max(1, read))  # nothing that a disk could make smaller
        sample, best = bytearray(some), math.inf
        from_disk = self.size > available_memory()
        try:
            self._file.seek(0)
            write_all(self._file, memoryview(sample))
            os.fsync(self._file.fileno())
            for _ in range(TRIES):
                if sys.platform == "linux" and from_disk:
                    os.posix_fadvise(self._file.fileno(), 0, len(sample), os.POSIX_FADV_DONTNEED)
                self._file.seek(0)
                began = time.perf_counter()
                self._file.readinto(sample)
                best = min(best, time.perf_counter() - began)
        except OSError:
            return math.inf
        return best * self.size / len(self._numbers) / len(sample)

    def read(self, name: str) -> npt.NDArray[Any]:
        start, shape, dtype = self._places[name]
        return self._bytes[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    def write(self, name: str, number: int, values: npt.NDArray[Any]) -> None:
        start, _, _ = self._places[name]
        self._file.seek(start + number * values.nbytes)
        write_all(self._file, values.data.cast("B"))
        self._sums[name][number] = crc32(values.data)

    def _own(self, numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Those of some blocks that are in the file, counted from its first."""
        return numbers[(numbers >= self._numbers.start) & (numbers < self._numbers.stop)] - self._numbers.start

    def close(self) -> None:
        """Give up the file. What was read of it stays valid while it is held."""
        self._bytes = self._bytes[:0]
        self._file.close()
