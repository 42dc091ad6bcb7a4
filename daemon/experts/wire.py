"""A call for experts and its answer, as bytes: what trunk ranks and expert hosts say to each other.

A *call* takes the rows of all experts of one layer that one host is asked for; an *answer* brings what these experts
made of them, not weighted. A host may answer a call in several pieces, an expert or more each. Both are a header, a
record per expert and the rows, expert by expert, all little-endian::

    call     kind  format  layer  reply_to  number  count  hidden
             u8    u8      u16    u32       u64     u16    u32
    answer   kind  format  layer  busy_s    number  count  hidden
             u8    u8      u16    f32       u64     u16    u32
    expert   index  piece  rows
             u16    u16    u32
    refusal  kind  code    layer  0         number  count  0       then its reason in UTF-8

A call has behind `count` the number of adapters that its rows are of, u16. If there are any, their names of 32 bytes
each follow the records, and for each row u16: 0 if it is of none, else the place of its name, counted from 1; zeros
fill up four bytes. A refusal repeats the call's records where these are asked for again with what was lacking
(`motley.daemon.experts.factors`).

Rows of one expert that are too many for a message go in several, as pieces, numbered from 0, and are answered so.
`number` is the caller's, and comes back. `reply_to` has bit r set if trunk rank r gets the answer. `busy_s` is the time
that the host computed. `format` says how rows travel (`motley.transport.formats`), each on its own: its bits do not
depend on the rows beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from motley.protocol import MAX_TRUNK
from motley.transport import WireFormat
from motley.transport.formats import BLOCK, Codecs

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct("<BBH4sQHHI")
_EXPERT = struct.Struct("<HHI")
_MASK = struct.Struct("<I")
_SECONDS = struct.Struct("<f")
HEADER_BYTES = _HEAD.size
EXPERT_BYTES = _EXPERT.size
_OWN_BYTES = 2
_ALIGNED = 4
"""Rows begin at a multiple of so many bytes."""

NAME_BYTES = 32
"""Of an adapter's name: its fingerprint."""

MAX_REASON = 1024
_FORMATS = tuple(WireFormat)


class ExpertWireError(ValueError):
    """Bytes that are no call, or no answer, of this session."""


class Kind(IntEnum):
    """What a message is."""

    CALL = 1
    ANSWER = 2
    REFUSAL = 3
    FACTORS = 4
    """What an adapter adds to an expert: see `motley.daemon.experts.factors`."""


class RefusalCode(IntEnum):
    """Why a host does not answer a call."""

    NOT_HERE = 1
    """An expert of the call is not on this host (any more)."""
    BAD_CALL = 2
    """The call asks for what no host can do."""
    FAILED = 3
    """The host could not compute it."""
    NO_FACTORS = 4
    """The host lacks what an adapter adds to an expert of the call."""


class Part(NamedTuple):
    """An expert of a call's layer, and how many of the call's rows are for it."""

    expert: int
    rows: int
    piece: int = 0
    """The number of this piece of the expert's rows, where one message does not hold all of them."""


@dataclass(frozen=True)
class Call:
    """A question to a host: what experts of a layer make of rows.

    Attributes:
        number: the caller's, which comes back with the answer.
        reply_to: bit r is set if trunk rank r gets the answer.
        parts: the experts, and how many of the rows are for each, one after another.
        rows: f32[N, D].
        adapters: the names of those that rows are computed with.
        own: u16[N]: of each row, the place of its adapter among these, counted from 1; 0: it has none.
    """

    number: int
    layer: int
    reply_to: int
    parts: Sequence[Part]
    rows: F32
    adapters: Sequence[bytes] = ()
    own: U16 = field(default_factory=lambda: np.empty(0, np.uint16))


@dataclass(frozen=True)
class Answer:
    """What experts made of the rows of a call, or of some of its parts.

    Attributes:
        number, layer: of the call.
        busy_s: how long the host has computed, in seconds.
        parts: as the call has them.
        rows: f32[N, D].
    """

    number: int
    layer: int
    busy_s: float
    parts: Sequence[Part]
    rows: F32


@dataclass(frozen=True)
class Refusal:
    """A host's word that it does not answer a call, and why.

    Attributes:
        number, layer: of the call.
        parts: of the call, if it is to be made again with what this host lacks.
    """

    number: int
    layer: int
    code: RefusalCode
    reason: str
    parts: Sequence[Part] = ()


class ExpertWire:
    """Writes and reads the messages of one session. Has working space: one thread owns it.

    Rows in FP32 are not copied: written messages refer to them, and read ones to the bytes they came in.
    """

    def __init__(self, hidden: int, wire_format: WireFormat) -> None:
        """
        Args:
            hidden: D, the width of a row.
            wire_format: how rows travel.
        """
        self._hidden = hidden
        self._format = _FORMATS.index(wire_format)
        self._codec = Codecs(wire_format).of("float32")[1]
        self._as_it_is = wire_format is WireFormat.FP32
        self._row_bytes = self._codec.size(hidden)
        # Blocks that share a scale end where rows do: together they are what each would be alone.
        self._at_once = hidden % BLOCK == 0

    def message_bytes(self, experts: int, rows: int, adapters: int = 0) -> int:
        """The length of a call or an answer."""
        return HEADER_BYTES + experts * EXPERT_BYTES + _adapters_bytes(adapters, rows) + rows * self._row_bytes

    def most_rows(self, size: int, adapters: int = 0) -> int:
        """Rows of one expert that a message of this length holds: an even number, as kernels take rows by twos."""
        more, filling = (_OWN_BYTES, _ALIGNED) if adapters else (0, 0)
        rows = (size - self.message_bytes(1, 0, adapters) - filling) // (self._row_bytes + more)
        return max(1, rows - rows % 2)

    def stretches(self, rows: int, size: int, adapters: int = 0) -> list[slice]:
        """The rows of one expert in as few messages of this length as hold them."""
        most = self.most_rows(size, adapters)
        return [slice(first, min(rows, first + most)) for first in range(0, rows, most)]

    def write_call(self, call: Call) -> list[Buffer]:
        """The bytes of a call, in parts that follow each other."""
        assert 0 < call.reply_to < 1 << MAX_TRUNK
        whose = b"".join(call.adapters) + np.ascontiguousarray(call.own, "<u2").tobytes() if call.adapters else b""
        whose += bytes(-len(whose) % _ALIGNED)
        word, adapters = _MASK.pack(call.reply_to), len(call.adapters)
        return self._write(Kind.CALL, call.layer, word, call.number, call.parts, call.rows, adapters, whose)

    def write_answer(self, answer: Answer) -> list[Buffer]:
        """The bytes of an answer, in parts that follow each other."""
        busy = _SECONDS.pack(answer.busy_s)
        return self._write(Kind.ANSWER, answer.layer, busy, answer.number, answer.parts, answer.rows)

    def write_refusal(self, refusal: Refusal) -> list[Buffer]:
        """The bytes of a refusal, in parts that follow each other."""
        count = len(refusal.parts)
        head = _HEAD.pack(Kind.REFUSAL, refusal.code, refusal.layer, bytes(4), refusal.number, count, 0, 0)
        return [head + _records(refusal.parts) + refusal.reason.encode()[:MAX_REASON]]

    def read_call(self, data: Buffer) -> Call:
        """Read a call.

        Raises:
            ExpertWireError: it is no call, or not one of this session.
        """
        view = memoryview(data).cast("B")
        kind, code, layer, mask, number, count, adapters, hidden = _head(view)
        if kind != Kind.CALL:
            raise ExpertWireError(f"a message of kind {kind} in the place of a call")
        (reply_to,) = _MASK.unpack(mask)
        if not reply_to:
            raise ExpertWireError("a call whose answer nobody gets")
        parts, rows = self._read(view, code, count, hidden, adapters)
        if not adapters:
            return Call(number, layer, reply_to, parts, rows)
        first = HEADER_BYTES + count * EXPERT_BYTES
        stop = first + adapters * NAME_BYTES
        names = [bytes(view[at : at + NAME_BYTES]) for at in range(first, stop, NAME_BYTES)]
        own = np.frombuffer(view, "<u2", len(rows), stop)
        if own.max() > adapters or len({*names}) < adapters:
            raise ExpertWireError(f"rows of adapter {own.max()} of {adapters}, or one named twice")
        return Call(number, layer, reply_to, parts, rows, names, own)

    def read_answer(self, data: Buffer) -> Answer | Refusal:
        """Read an answer, or that there is none.

        Raises:
            ExpertWireError: it is neither, or not of this session.
        """
        view = memoryview(data).cast("B")
        kind, code, layer, busy, number, count, adapters, hidden = _head(view)
        if kind == Kind.REFUSAL:
            if code not in RefusalCode._value2member_map_ or adapters or hidden or any(busy):
                raise ExpertWireError(f"a refusal with the unknown code {code}")
            asked_again = code == RefusalCode.NO_FACTORS
            if asked_again != (count > 0):
                raise ExpertWireError(f"a refusal with code {code} that names {count} experts")
            parts = _parts(view, count)
            reason = bytes(view[HEADER_BYTES + count * EXPERT_BYTES :]).decode(errors="replace")
            return Refusal(number, layer, RefusalCode(code), reason, parts)
        if kind != Kind.ANSWER:
            raise ExpertWireError(f"a message of kind {kind} in the place of an answer")
        (busy_s,) = _SECONDS.unpack(busy)
        if not 0 <= busy_s < float("inf"):
            raise ExpertWireError(f"an answer that took {busy_s} s")
        if adapters:
            raise ExpertWireError(f"an answer of {adapters} adapters")
        return Answer(number, layer, busy_s, *self._read(view, code, count, hidden))

    def _write(
        self,
        kind: Kind,
        layer: int,
        word: bytes,
        number: int,
        parts: Sequence[Part],
        rows: F32,
        adapters: int = 0,
        whose: bytes = b"",
    ) -> list[Buffer]:
        assert rows.shape == (sum(part.rows for part in parts), self._hidden)
        head = _HEAD.pack(kind, self._format, layer, word, number, len(parts), adapters, self._hidden)
        begin = head + _records(parts) + whose
        if self._as_it_is:
            return [begin, np.ascontiguousarray(rows, "<f4").data.cast("B")]
        payload = np.empty((len(rows), self._row_bytes), np.uint8)
        for values, place in self._stretches(rows, payload):
            self._codec.encode(values, place)
        return [begin, payload.data.cast("B")]

    def _read(self, view: memoryview, code: int, count: int, hidden: int, adapters: int = 0) -> tuple[list[Part], F32]:
        if code != self._format or hidden != self._hidden:
            says = _FORMATS[code].value if code < len(_FORMATS) else f"format {code}"
            ours = _FORMATS[self._format].value
            raise ExpertWireError(f"rows of {hidden} in {says}; here they are of {self._hidden} in {ours}")
        if not count:
            raise ExpertWireError(f"{len(view)} bytes announce 0 experts")
        parts = _parts(view, count)
        total = sum(part.rows for part in parts)
        if len(view) != self.message_bytes(count, total, adapters):
            raise ExpertWireError(f"{total} rows of {count} experts in {len(view)} bytes")
        begin = len(view) - total * self._row_bytes
        payload = np.frombuffer(view, np.uint8, offset=begin).reshape(total, self._row_bytes)
        if self._as_it_is:
            rows = payload.view("<f4")
            return parts, rows if rows.flags.aligned else rows.copy()
        rows = np.empty((total, self._hidden), np.float32)
        for values, place in self._stretches(rows, payload):
            self._codec.decode(place, values)
        return parts, rows

    def _stretches(self, rows: F32, payload: npt.NDArray[np.uint8]) -> list[tuple[F32, npt.NDArray[np.uint8]]]:
        """What is encoded at a time, and where it lies."""
        if self._at_once:
            return [(np.ascontiguousarray(rows, np.float32).reshape(-1), payload.reshape(-1))]
        return list(zip(np.ascontiguousarray(rows, np.float32), payload, strict=True))


def kind_of(data: Buffer) -> int:
    """The kind of a message; 0: it has none."""
    return memoryview(data).cast("B")[0] if len(data) else 0


def _head(view: memoryview) -> tuple[int, int, int, bytes, int, int, int, int]:
    if len(view) < HEADER_BYTES:
        raise ExpertWireError(f"a message of {len(view)} bytes; at least {HEADER_BYTES} are needed")
    return _HEAD.unpack_from(view)


def _records(parts: Sequence[Part]) -> bytes:
    return b"".join([_EXPERT.pack(part.expert, part.piece, part.rows) for part in parts])


def _parts(view: memoryview, count: int) -> list[Part]:
    records = view[HEADER_BYTES : HEADER_BYTES + count * EXPERT_BYTES]
    if len(records) < count * EXPERT_BYTES:
        raise ExpertWireError(f"{len(view)} bytes announce {count} experts")
    parts = [Part(expert, rows, piece) for expert, piece, rows in _EXPERT.iter_unpack(records)]
    if not all(part.rows for part in parts) or len({(part.expert, part.piece) for part in parts}) < count:
        raise ExpertWireError("an expert without rows, or named twice")
    return parts


def _adapters_bytes(adapters: int, rows: int) -> int:
    """What a call has of adapters."""
    size = adapters * NAME_BYTES + rows * _OWN_BYTES if adapters else 0
    return size + -size % _ALIGNED
