"""What the scheduler, on rank 0, tells the other ranks to do, as small messages on the data plane.

Every rank, rank 0 included, executes the same messages in the same order; that alone keeps their caches, their samplers
and their collectives in step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

_OPEN = struct.Struct("<BIII")
_STEP = struct.Struct("<BIIIB")
_SLOT = struct.Struct("<BI")
_RESERVE = struct.Struct("<BII")
_COUNT = struct.Struct("<BI")
_LENGTH = struct.Struct("<I")


class StepError(ValueError):
    """A step message, or a summary, that is malformed or does not fit the state of the rank that gets it."""


@dataclass(frozen=True)
class Open:
    """Begin a sequence, and tell rank 0 as for a `Reserve` whether there is room for it.

    Attributes:
        slot: the number that it has on every rank until it is closed.
        room: tokens whose keys and values there is to be room for.
        sampling: a serialised `mesh_pb2.Sampling`.
        prompt: i32[T], which penalties look at.
    """

    slot: int
    room: int
    sampling: bytes
    prompt: Tokens

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _OPEN.pack(1, self.slot, self.room, len(self.sampling)) + self.sampling + self.prompt.tobytes()


@dataclass(frozen=True)
class Reserve:
    """Have room for the keys and values of so many tokens of a sequence; tell rank 0 why there is none, or nothing.

    No rank meets another in it. So one that lacks memory says so, while all of them can still let the sequence be; in
    the middle of a step the others would wait for its sums.
    """

    slot: int
    room: int

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _RESERVE.pack(8, self.slot, self.room)


@dataclass(frozen=True)
class Step:
    """Compute a chunk of a prompt.

    Attributes:
        slot: of its sequence.
        position: tokens of it that have been computed.
        want: candidates for the token after the chunk that every rank sends to rank 0; 0: none, the prompt goes on.
        halved: whether to compute it as two micro-chunks.
        tokens: i32[T].
    """

    slot: int
    position: int
    want: int
    halved: bool
    tokens: Tokens

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _STEP.pack(2, self.slot, self.position, self.want, self.halved) + self.tokens.tobytes()


@dataclass(frozen=True)
class Wave:
    """Compute one token of each of several sequences, and send rank 0 the best candidates for the next ones.

    Attributes, all i32[B]:
        slots: of the sequences.
        positions: tokens of each that have been computed.
        wants: candidates of each; 0: none, its next token is known.
        tokens: that are computed.
    """

    slots: Tokens
    positions: Tokens
    wants: Tokens
    tokens: Tokens

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        fields = np.stack([self.slots, self.positions, self.wants, self.tokens])
        return _COUNT.pack(6, len(self.slots)) + fields.tobytes()


@dataclass(frozen=True)
class Able:
    """Said to rank 0 by every other rank once it is loaded: how many sequences its engine can take in one `Wave`, at
    least one."""

    sequences: int

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _COUNT.pack(7, self.sequences)


@dataclass(frozen=True)
class More:
    """The candidates of some sequences' last step did not decide: send rank 0 more of them.

    Attributes, both i32[B]:
        slots: of the sequences.
        wants: how many candidates of each.
    """

    slots: Tokens
    wants: Tokens

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _COUNT.pack(3, len(self.slots)) + np.stack([self.slots, self.wants]).tobytes()


@dataclass(frozen=True)
class Close:
    """End a sequence; its slot is free."""

    slot: int

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _SLOT.pack(4, self.slot)


@dataclass(frozen=True)
class Stop:
    """End the session."""

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return b"\x05"


Message = Open | Reserve | Step | Wave | Able | More | Close | Stop


def decode(data: bytes) -> Message:
    """Read a message that one of these classes has encoded.

    Raises:
        StepError: unknown kind or wrong length.
    """
    try:
        match data[0]:
            case 1:
                _, slot, room, length = _OPEN.unpack_from(data)
                end = _OPEN.size + length
                if end > len(data):
                    raise StepError(f"an Open of {len(data)} bytes announces {length} bytes of sampling")
                return Open(slot, room, data[_OPEN.size : end], np.frombuffer(data, np.int32, offset=end))
            case 2:
                _, slot, position, want, halved = _STEP.unpack_from(data)
                if halved > 1:
                    raise StepError(f"a Step is halved or not, but not {halved}")
                return Step(slot, position, want, bool(halved), np.frombuffer(data, np.int32, offset=_STEP.size))
            case 3:
                return More(*_columns("More", data, 2))
            case 4:
                return Close(*_SLOT.unpack(data)[1:])
            case 5 if len(data) == 1:
                return Stop()
            case 6:
                return Wave(*_columns("Wave", data, 4))
            case 7:
                _, sequences = _COUNT.unpack(data)
                if not sequences:
                    raise StepError("an Able of no sequence")
                return Able(sequences)
            case 8:
                return Reserve(*_RESERVE.unpack(data)[1:])
    except (struct.error, IndexError, ValueError) as error:
        raise StepError(f"a step message of {len(data)} bytes is malformed: {error}") from error
    raise StepError(f"a step message of {len(data)} bytes has the unknown kind {data[0]}")


def _columns(kind: str, data: bytes, number: int) -> Tokens:
    """The numbers that a message has of each of its sequences, i32[number, B]; errors as `decode`."""
    _, count = _COUNT.unpack_from(data)
    fields = np.frombuffer(data, np.int32, offset=_COUNT.size)
    if not count or len(fields) != number * count:
        raise StepError(f"a {kind} of {count} sequences has {len(fields)} numbers, not {number * count}")
    return fields.reshape(number, count)


def join(summaries: Sequence[bytes]) -> bytes:
    """The summaries of a wave's sequences as one message."""
    return b"".join(part for summary in summaries for part in (_LENGTH.pack(len(summary)), summary))


def split(data: bytes, count: int) -> list[bytes]:
    """The inverse of `join`, of `count` summaries.

    Raises:
        StepError: the lengths do not add up, or there are more or fewer.
    """
    summaries = []
    at = 0
    while at < len(data):
        start = at + _LENGTH.size
        if start > len(data) or (at := start + _LENGTH.unpack_from(data, at)[0]) > len(data):
            raise StepError(f"summaries of {len(data)} bytes end in the middle of one")
        summaries.append(data[start:at])
    if len(summaries) != count:
        raise StepError(f"there are {len(summaries)} summaries, not {count}")
    return summaries
