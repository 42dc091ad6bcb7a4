"""A file in which a rank keeps blocks of its KV caches, for the next start of a session that is planned alike.

It has a place for each block in memory, which is written again when the block has come to hold something else; so the
file is as large as the caches, and no larger. Layers with a window have places of their own, as they have blocks.

A place has a CRC-32, the block's label (`motley.daemon.rank.blocks.kept_block`) and what the block holds. Nothing is
flushed: what a power cut leaves of a block is found out when it is read, as is what a failing disk makes of it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from motley.daemon.machine.files import own_file, take_room, write_all
from motley.daemon.rank.blocks.far_file import DiskFull
from motley.daemon.rank.blocks.kept_block import KeptBlock, decode_block, label_bytes
from motley.plugins.engine import CacheBlocks, CacheSpec
from motley.protocol import mesh_pb2 as pb
from motley.protocol.release import release

logger = logging.getLogger(__name__)

FORMAT = 2
"""A part of every key, to be raised whenever the same file comes to mean something else."""
FOLDER = "prefixes"
"""What the folder of these files is called, in that of the shares."""
SUFFIX = ".blocks"
ALIKE = 16
"""Sessions on one machine that are planned alike and keep blocks at a time."""
CRC_BYTES = 8
"""The CRC-32, and nothing after it: what follows is aligned."""

IRRELEVANT = {
    *("secret", "tls", "plain", "hosts", "draft", "sequences"),
    *("far_blocks", "far_blocks_on_disk", "cache_holders", "holder_bytes", "keep_prefixes", "loan"),
}
"""Fields of an assignment that change neither the bits of what blocks hold nor where these lie."""

Memory = Mapping[str, npt.NDArray[Any]]
"""The arrays of all blocks of a rank by the names of `CacheBlocks.arrays`: [count, *shape] each."""


def plan_key(assignment: pb.Assignment, rank: int, share: str) -> str:
    """A name for what a rank's blocks hold, of 64 hexadecimal digits: another one wherever the same tokens might have
    other bits in them, or lie elsewhere.

    Args:
        share: a name for the bytes of its weights.
    """
    plan = pb.Assignment()
    plan.CopyFrom(assignment)
    for irrelevant in IRRELEVANT:
        plan.ClearField(irrelevant)
    plan.model.ClearField("source")  # the fingerprint tells what the files are
    about = f"{FORMAT} {release()} {rank} {share}\n".encode()
    return sha256(about + plan.SerializeToString(deterministic=True)).hexdigest()


class FoundFile(NamedTuple):
    """A file in which a rank keeps blocks, or has kept them.

    Attributes:
        used: when it was last used, in seconds since the epoch.
        size: in bytes.
    """

    used: float
    size: int
    path: Path

    def remove(self) -> bool:
        """Remove it; False: a rank has it."""
        try:
            if (file := _owned(self.path)) is None:
                return False
            with file:
                if sys.platform == "win32":  # where nobody removes a file that is open, whoever has it
                    file.close()
                self.path.unlink()  # elsewhere before another can have it
        except OSError as error:
            logger.warning("%s stays: %s", self.path, error)
            return False
        return True


def kept_files(folder: Path) -> list[FoundFile]:
    """The files in a folder in which ranks keep blocks, the one that was not used for longest first."""
    found = []
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):  # another process has removed it
            status = path.stat()
            found.append(FoundFile(status.st_mtime, status.st_size, path))
    return sorted(found)


class _Places:
    """Places of one size in a file, each for a label and what a block holds of some layers, with a checksum."""

    def __init__(self, file: IO[bytes], start: int, count: int, label: int, arrays: Mapping[str, int]) -> None:
        """
        Args:
            start: where the first of them begins, in bytes.
            label: bytes of a label at most.
            arrays: what a block has of each array, in bytes, by name.
        """
        self._file = file
        self._start = start
        self._label = label
        self._arrays = [name for name, size in arrays.items() if size]
        self.data = sum(arrays.values())
        """Bytes that a block holds."""
        self._size = CRC_BYTES + label + self.data
        self.end = start + count * self._size
        """Where the last of them ends, in bytes."""

    def write(self, number: int, label: bytes, memory: Memory, block: int) -> None:
        """Keep a block of the memory in one of the places.

        Raises:
            OSError: it cannot be written.
        """
        label = label.ljust(self._label, b"\0")
        parts = [memory[name][block].data.cast("B") for name in self._arrays]
        check = crc32(label)
        for part in parts:
            check = crc32(part, check)
        self._file.seek(self._at(number))
        write_all(self._file, memoryview(check.to_bytes(CRC_BYTES, "little") + label))
        for part in parts:
            write_all(self._file, part)

    def label(self, number: int) -> bytes:
        """The label in a place, zeros after it, as it was written or not.

        Raises:
            OSError: it cannot be read.
        """
        self._file.seek(self._at(number) + CRC_BYTES)
        return self._file.read(self._label)

    def read(self, number: int, label: bytes, memory: Memory, block: int) -> bool:
        """Have what a place keeps in a block of the memory; whether it is what the label says, and undamaged. If not,
        the block holds anything.

        Raises:
            OSError: it cannot be read.
        """
        self._file.seek(self._at(number))
        head = self._file.read(CRC_BYTES + self._label)
        if head[CRC_BYTES:] != label.ljust(self._label, b"\0"):
            return False
        check = crc32(head[CRC_BYTES:])
        for name in self._arrays:
            part = memory[name][block].data.cast("B")
            if self._file.readinto(part) != len(part):  # type: ignore[attr-defined]
                return False
            check = crc32(part, check)
        if check.to_bytes(CRC_BYTES, "little") == head[:CRC_BYTES]:
            return True
        logger.warning("block %d in %s is damaged; its tokens are computed again", number, self._file.name)
        return False

    def _at(self, number: int) -> int:
        return self._start + number * self._size


class KeptFile:
    """The file in which a rank keeps blocks. See above."""

    def __init__(self, folder: Path, key: str, blocks: CacheBlocks, caches: Sequence[CacheSpec], limit: int) -> None:
        """Open the file of a key, or make it, with all its room. If another process has it, there is a second one, and
        so on.

        Args:
            folder: made if it is not there.
            key: see `plan_key`.
            caches: of the layers.
            limit: bytes that all these files together may take; others that nobody has open are removed for this one,
                those not used for longest first.

        Raises:
            DiskFull: the disk has too little room, or the folder cannot be written to.
        """
        self.plan = int(key[:16], 16)
        """The first bits of the key."""
        self._blocks = blocks
        movable = blocks.movable(caches)
        windowed = [spec for spec in caches if blocks.is_windowed(spec)]
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(_own(folder, key))
                self._near = _Places(file, 0, blocks.count, label_bytes(blocks.tokens), _sizes(blocks, movable))
                self._windowed = _Places(file, self._near.end, blocks.windowed, 8, _sizes(blocks, windowed))
                self.size = self._windowed.end
                """Bytes of the file."""
                _make_room(folder, file, self.size, limit)
                take_room(file, self.size)
            except OSError as error:
                raise DiskFull(
                    f"prefixes of {blocks.count * blocks.tokens} tokens cannot be kept in {folder}: {error}. Make room"
                    " there, or start the session without keeping prefixes"
                ) from error
            stack.pop_all()
        self._file = file

    @property
    def block_bytes(self) -> int:
        """Bytes that a block holds at most."""
        return self._near.data + self._windowed.data

    def blocks(self) -> list[KeptBlock]:
        """What the file says is there; what is damaged is found out by `read`."""
        found = []
        for number in range(self._blocks.count):
            try:
                told = decode_block(self._near.label(number))
            except ValueError:
                continue
            except OSError as error:
                logger.warning("%s cannot be read; prefixes are computed again: %s", self._file.name, error)
                return []
            if told.number == number and -1 <= told.windowed < self._blocks.windowed:
                found.append(told)
        return found

    def write(self, block: KeptBlock, memory: Memory) -> None:
        """Keep a block that is in memory.

        Raises:
            OSError: it cannot be written; what was in its place is lost.
        """
        if block.windowed >= 0:
            self._windowed.write(block.windowed, block.what.to_bytes(8, "little"), memory, block.windowed)
        self._near.write(block.number, block.encode(), memory, block.number)

    def read(self, block: KeptBlock, memory: Memory) -> int:
        """Have a kept block in memory, where nothing else is kept yet.

        Returns:
            2: it is there; 1: all but what layers with a window have for it; 0: it is not, or it is damaged.
        """
        try:
            if not self._near.read(block.number, block.encode(), memory, block.number):
                return 0
            label = block.what.to_bytes(8, "little")
            there = block.windowed >= 0 and self._windowed.read(block.windowed, label, memory, block.windowed)
        except OSError as error:
            logger.warning("block %d of %s cannot be read: %s", block.number, self._file.name, error)
            return 0
        return 1 + there

    def close(self) -> None:
        """Let another process have the file."""
        self._file.close()


def _sizes(blocks: CacheBlocks, caches: Sequence[CacheSpec]) -> dict[str, int]:
    """What a block has of each array of some layers, in bytes."""
    return {
        name: int(np.prod(shape)) * np.dtype(dtype).itemsize for name, (shape, dtype) in blocks.arrays(caches).items()
    }


def _own(folder: Path, key: str) -> IO[bytes]:
    """Open the first file of a key that nobody has, for this process alone.

    Raises:
        OSError: there is none, or it cannot be opened.
    """
    for number in range(ALIKE):
        path = folder / f"{key}.{number}{SUFFIX}"
        if (file := _owned(path, os.O_CREAT)) is not None:
            os.utime(path)
            return file
    raise OSError(f"{ALIKE} sessions that are planned alike have their files there")


def _owned(path: Path, how: int = 0) -> IO[bytes] | None:
    """Open a file for this process alone; None: another one has it, or has just removed it.

    Args:
        how: flags for `os.open`, besides those for reading and writing.

    Raises:
        OSError: it cannot be opened.
    """
    file = FileIO(str(path), "r+", opener=lambda name, flags: os.open(name, flags | how, 0o600))
    with suppress(FileNotFoundError):  # it was removed after it was opened
        if own_file(file) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None


def _make_room(folder: Path, mine: IO[bytes], size: int, limit: int) -> None:
    """Remove files, those not used for longest first, until all others and one of `size` bytes are within a limit."""
    others = [file for file in kept_files(folder) if str(file.path) != mine.name]
    total = sum(file.size for file in others)
    for other in others:
        if total + size > limit and other.remove():
            total -= other.size
