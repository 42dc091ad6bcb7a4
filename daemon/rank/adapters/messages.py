"""What ranks tell each other about adapters, between the steps: see `motley.daemon.rank.steps`.

An adapter is named by its fingerprint, 64 hexadecimal digits. Its files travel as one stretch of bytes
(`motley.daemon.adapters.store`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from motley.daemon.rank.message_kinds import Kind

_FIND = struct.Struct("<B32sBB")
_FOUND = struct.Struct("<B32sIQQB")
_READ = struct.Struct("<BI32sQ")
_PIECE = struct.Struct("<BBB")
_WRITE = struct.Struct("<B32sQQ")
_LOAD = struct.Struct("<B32sI")
_NOBODY = bytes(32)


@dataclass(frozen=True)
class FindAdapter:
    """Look for an adapter on this machine's disk, read it, and say what was found (`FoundAdapter`).

    Attributes:
        fingerprint: of the one that is wanted; empty: whichever is there.
        source: a folder where it may be; empty: it is only looked for among those that ranks have sent.
        again: some rank was still reading when this was asked last: who was not says the same as then.
        fetch: rank 0 is to fetch it from the hub: no rank has found it, and the source is a hub id.
    """

    fingerprint: str
    source: str
    again: bool = False
    fetch: bool = False

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return (
            _FIND.pack(Kind.FIND_ADAPTER, bytes.fromhex(self.fingerprint) or _NOBODY, self.again, self.fetch)
            + self.source.encode()
        )


@dataclass(frozen=True)
class FoundAdapter:
    """Said to rank 0 by every rank after a `FindAdapter`.

    Attributes:
        fingerprint: of what was found; empty: nothing.
        rank: the largest that one of its products has.
        weights: bytes of these on the disk.
        size: bytes of its files.
        trouble: what is wrong with that, or why there is nothing.
        pending: it still reads: ask again, after the next step.
    """

    fingerprint: str
    rank: int = 0
    weights: int = 0
    size: int = 0
    trouble: str = ""
    pending: bool = False

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        name = bytes.fromhex(self.fingerprint) or _NOBODY
        return (
            _FOUND.pack(Kind.FOUND_ADAPTER, name, self.rank, self.weights, self.size, self.pending)
            + self.trouble.encode()
        )


@dataclass(frozen=True)
class ReadAdapter:
    """Read a piece of an adapter's files, and say `Piece`: the rank that is named does, others say an empty one."""

    holder: int
    fingerprint: str
    start: int

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _READ.pack(Kind.READ_ADAPTER, self.holder, bytes.fromhex(self.fingerprint), self.start)


@dataclass(frozen=True)
class WriteAdapter:
    """Write a piece of an adapter's files on the disk of every rank that has not got them, and say how it went
    (`motley.daemon.rank.steps.Moved`). The pieces come in order; with the last one, the adapter is there.

    Attributes:
        start: where the piece is.
        size: bytes of all pieces.
    """

    fingerprint: str
    start: int
    size: int
    data: bytes

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _WRITE.pack(Kind.WRITE_ADAPTER, bytes.fromhex(self.fingerprint), self.start, self.size) + self.data


@dataclass(frozen=True)
class Piece:
    """Said to rank 0 by every rank after a `ReadAdapter`.

    Attributes:
        data: empty: this rank was not asked, or could not read it.
        trouble: why it could not.
        pending: it still reads: ask again, after the next step.
    """

    data: bytes = b""
    trouble: str = ""
    pending: bool = False

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _PIECE.pack(Kind.PIECE, bool(self.trouble), self.pending) + (self.trouble.encode() or self.data)


@dataclass(frozen=True)
class LoadAdapter:
    """Have this rank's share of an adapter in a slot, in place of what is there, and say how it went
    (`motley.daemon.rank.steps.Moved`)."""

    fingerprint: str
    slot: int

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _LOAD.pack(Kind.LOAD_ADAPTER, bytes.fromhex(self.fingerprint), self.slot)


AdapterMessage = FindAdapter | FoundAdapter | ReadAdapter | Piece | WriteAdapter | LoadAdapter
KINDS = range(Kind.FIND_ADAPTER, Kind.LOAD_ADAPTER + 1)
"""The first bytes of these messages."""


def decode(data: bytes) -> AdapterMessage:
    """Read a message that one of these classes has encoded.

    Raises:
        struct.error, ValueError: wrong length, text that is none, or an unknown kind.
    """
    match data[0]:
        case Kind.FIND_ADAPTER:
            _, name, again, fetch = _FIND.unpack_from(data)
            return FindAdapter(_named(name), data[_FIND.size :].decode(), _truth(again), _truth(fetch))
        case Kind.FOUND_ADAPTER:
            _, name, rank, weights, size, pending = _FOUND.unpack_from(data)
            trouble = data[_FOUND.size :].decode()
            return FoundAdapter(_named(name), rank, weights, size, trouble, _truth(pending))
        case Kind.READ_ADAPTER:
            _, holder, name, start = _READ.unpack(data)
            return ReadAdapter(holder, name.hex(), start)
        case Kind.PIECE:
            _, failed, pending = _PIECE.unpack_from(data)
            told = data[_PIECE.size :]
            if (_truth(pending) and (failed or told)) or (_truth(failed) and not told):
                raise ValueError("a Piece with trouble of which it says nothing, or of what is still read")
            return Piece(trouble=told.decode()) if failed else Piece(told, pending=bool(pending))
        case Kind.WRITE_ADAPTER:
            _, name, start, size = _WRITE.unpack_from(data)
            return WriteAdapter(name.hex(), start, size, data[_WRITE.size :])
        case Kind.LOAD_ADAPTER:
            _, name, slot = _LOAD.unpack(data)
            return LoadAdapter(name.hex(), slot)
    raise ValueError(f"the unknown kind {data[0]}")


def _named(name: bytes) -> str:
    return "" if name == _NOBODY else name.hex()


def _truth(value: int) -> bool:
    if value > 1:
        raise ValueError(f"{value} is neither true nor false")
    return bool(value)
