"""What a borrower and a lender of a model's files say to each other: messages, each a kind and what belongs to it.

The borrower asks for the list of files (LIST, answered by FILES), then for stretches of them (READ, answered by BYTES,
all of them in one message), one question at a time. What makes no sense is answered by REFUSED, with the reason.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum

MOST_BYTES = 8 << 20
"""Bytes that one READ may ask for."""
_HEAD = struct.Struct("<BI")
_STRETCH = struct.Struct("<QI")
_MOST_STRETCHES = MOST_BYTES // 64


class LendingError(Exception):
    """Borrower and lender do not understand each other, or the files are not what they should be; the message says
    what and where."""


class Kind(IntEnum):
    """What a message is."""

    LIST = 1
    FILES = 2
    READ = 3
    BYTES = 4
    REFUSED = 5


@dataclass(frozen=True)
class LentFile:
    """A file of a model.

    Attributes:
        name: without a folder.
        size: in bytes.
        modified: when it last was, as the lender's system counts, in nanoseconds.
        needed: so many of its first bytes are wanted by everybody: a header, or all.
    """

    name: str
    size: int
    modified: int
    needed: int


@dataclass(frozen=True)
class Files:
    """The files of a model.

    Attributes:
        main: the one that the model is opened by; empty: the folder that they are in.
    """

    main: str
    files: tuple[LentFile, ...]

    @property
    def key(self) -> str:
        """A name for exactly these files: hex digits."""
        return hashlib.sha256(self.pack()).hexdigest()

    def pack(self) -> bytes:
        """As a message has them."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def read(cls, body: bytes) -> Files:
        """Files as a message has them.

        Raises:
            LendingError: it has none that make sense.
        """
        try:
            told = json.loads(body)
            files = tuple(LentFile(**each) for each in told["files"])
            names = [file.name for file in files]
            sound = all(
                type(number) is int and number >= 0
                for file in files
                for number in (file.size, file.modified, file.needed)
            )
            if not sound or len(set(names)) < len(names) or not all(map(_is_plain, names)):
                raise ValueError(f"files {names}")
            if any(file.needed > file.size for file in files) or told["main"] not in ("", *names):
                raise ValueError(f"main {told['main']!r}")
            return cls(told["main"], files)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LendingError(f"the lender's list of files makes no sense: {error}") from error


def _is_plain(name: object) -> bool:
    """Whether something is the name of a file in a folder, and leads nowhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


Stretch = tuple[int, int]
"""Where bytes lie in a file: offset and length."""


def pack(kind: Kind, number: int = 0) -> bytes:
    """The head of a message: its kind and, of a READ, the number of the file."""
    return _HEAD.pack(kind, number)


def read(message: memoryview) -> tuple[Kind, int, memoryview]:
    """A message's kind, number and body.

    Raises:
        LendingError: it is none.
    """
    try:
        kind, number = _HEAD.unpack_from(message)
        return Kind(kind), number, message[_HEAD.size :]
    except (struct.error, ValueError) as error:
        raise LendingError(f"a message of {len(message)} bytes is of no kind that is known") from error


def pack_stretches(stretches: Iterable[Stretch]) -> bytes:
    """The body of a READ."""
    return b"".join(_STRETCH.pack(*stretch) for stretch in stretches)


def read_stretches(body: memoryview, size: int) -> Sequence[Stretch]:
    """The stretches that a READ asks for, of a file of so many bytes.

    Raises:
        LendingError: they are too many, too long, or not in the file.
    """
    if len(body) % _STRETCH.size or len(body) > _MOST_STRETCHES * _STRETCH.size:
        raise LendingError(f"stretches of a file in {len(body)} bytes")
    stretches = list(_STRETCH.iter_unpack(body))
    if sum(length for _, length in stretches) > MOST_BYTES:
        raise LendingError(f"more than {MOST_BYTES} bytes were asked for at a time")
    for offset, length in stretches:
        if offset + length > size:
            raise LendingError(f"bytes {offset} to {offset + length} were asked for of a file of {size}")
    return stretches
