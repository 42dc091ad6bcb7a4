"""How a rank and the holder of some of its cache blocks talk: what their messages look like. Pure.

Little-endian. A message begins with its kind and three numbers; numbers that it does not need are 0::

    message   from     numbers                   what follows
    BEGIN     rank     blocks, -, format         a record per layer
    BEGUN     holder   -                         -
    KEEP      rank     block, first, count       so many of its parts from that one on: of each layer the keys,
                                                 their scales, the values and theirs
    KEPT      holder   block, first              -
    ASK       rank     call, layer, questions    for each question a record; then, for each, its stretches i32[F], their
                                                 blocks i32[F] and the queries f32[rows, heads, d]
    TELL      holder   call, question, first     summaries f32[n, rows, heads, d + 2] from that of its stretches on
    REFUSE    holder   -                         why, in UTF-8: it ends the link
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from motley.plugins.block_holder import F32, I32, Array, Asked, HeldLayer
from motley.plugins.engine import cached_bytes
from motley.plugins.native.attention import SIGHT
from motley.transport import MAX_MESSAGE

HEAD = struct.Struct("<B3xIII")
_LAYER = struct.Struct("<IIIIf?")
_QUESTION = struct.Struct("<qII")

Buffer = bytes | memoryview | Array

MOST_NUMBER = 2**31 - 1
MOST_LAYERS = 4096
KEEP_BYTES = 16 << 20
"""The parts of a block travel in messages of at most this size, unless a single one is larger."""
TELL_BYTES = 1 << 20
"""Summaries travel in messages of about this size, so that the first are on their way while others are computed."""


class CacheWireError(ValueError):
    """Bytes that are no message of this session."""


class Kind(IntEnum):
    """What a message is."""

    BEGIN = 1
    BEGUN = 2
    KEEP = 3
    KEPT = 4
    ASK = 5
    TELL = 6
    REFUSE = 7


class Head(NamedTuple):
    """How a message begins; what the numbers are is in the table above."""

    kind: Kind
    first: int = 0
    second: int = 0
    third: int = 0

    def pack(self) -> bytes:
        """Write it as bytes."""
        return HEAD.pack(*self)


class Question(NamedTuple):
    """A question as a holder reads it; see `motley.plugins.block_holder.Asked`."""

    position: int
    stretches: I32
    blocks: I32
    queries: F32


def read(data: memoryview) -> tuple[Head, memoryview]:
    """The head of a message, and what follows.

    Raises:
        CacheWireError: it is none.
    """
    view = data.cast("B")
    if len(view) < HEAD.size:
        raise CacheWireError(f"a message of {len(view)} bytes; at least {HEAD.size} are needed")
    kind, *numbers = HEAD.unpack_from(view)
    if kind not in Kind._value2member_map_:
        raise CacheWireError(f"a message of the unknown kind {kind}")
    return Head(Kind(kind), *numbers), view[HEAD.size :]


def write_layers(layers: Sequence[HeldLayer]) -> bytes:
    """What follows a BEGIN."""
    return b"".join(_LAYER.pack(*layer) for layer in layers)


def read_layers(body: memoryview) -> list[HeldLayer]:
    """The inverse of `write_layers`.

    Raises:
        CacheWireError: there is none, or one that no model has.
    """
    if not body or len(body) % _LAYER.size or len(body) > MOST_LAYERS * _LAYER.size:
        raise CacheWireError(f"layers in {len(body)} bytes")
    layers = [HeldLayer(*fields) for fields in _LAYER.iter_unpack(body)]
    for layer in layers:
        impossible = not layer.soft_cap >= 0 or (layer.chunked and not layer.window)
        if not layer.kv_heads or not layer.size or layer.heads % layer.kv_heads or impossible:
            raise CacheWireError(f"a layer with numbers out of range: {layer}")
    return layers


def write_questions(asked: Sequence[Asked]) -> list[Buffer]:
    """What follows an ASK."""
    records = [_QUESTION.pack(each.position, len(each.queries), len(each.stretches)) for each in asked]
    parts: list[Buffer] = [b"".join(records)]
    for each in asked:
        parts += each.stretches, each.blocks, each.queries
    return parts


def read_questions(body: memoryview, count: int, layer: HeldLayer) -> list[Question]:
    """The inverse of `write_questions`.

    Args:
        count: how many questions there are.

    Raises:
        CacheWireError: they are longer or shorter than they say, or ask for nothing.
    """
    at = count * _QUESTION.size
    if not count or len(body) < at:
        raise CacheWireError(f"{count} questions in {len(body)} bytes")
    questions = []
    for position, rows, stretches in _QUESTION.iter_unpack(body[:at]):
        shape = rows, layer.heads, layer.size
        numbers, floats = 2 * stretches, rows * layer.heads * layer.size
        end = at + 4 * (numbers + floats)
        if not rows or not stretches or not 0 <= position <= MOST_NUMBER or end > len(body):
            raise CacheWireError(f"a question of {rows} rows at {position} and {stretches} stretches")
        table = np.frombuffer(body, "<i4", numbers, at)
        queries = np.frombuffer(body, "<f4", floats, at + 4 * numbers).reshape(shape)
        questions.append(Question(position, table[:stretches], table[stretches:], queries))
        at = end
    if at != len(body):
        raise CacheWireError(f"{len(body) - at} bytes follow {count} questions")
    return questions


def table_of(question: Question) -> I32:
    """i32[N], the blocks of a question's sequence by their place in it; -1 where they are not those of its stretches.

    Raises:
        CacheWireError: its stretches are not ascending, or not all before its rows.
    """
    stretches = question.stretches
    if stretches[0] < 0 or (np.diff(stretches) <= 0).any() or (int(stretches[-1]) + 1) * SIGHT > question.position:
        raise CacheWireError(f"stretches {stretches.tolist()} for rows at {question.position}")
    table = np.full(int(stretches[-1]) + 1, -1, np.int32)
    table[stretches] = question.blocks
    return table


def stretches_in_a_tell(question: Question, layer: HeldLayer) -> int:
    """How many stretches of a question are told in one message."""
    each = 4 * len(question.queries) * layer.heads * (layer.size + 2)
    if HEAD.size + each > MAX_MESSAGE:
        raise CacheWireError(f"a question of {len(question.queries)} rows, whose answer is too long for a message")
    return max(1, TELL_BYTES // each)


def block_bytes(layers: Sequence[HeldLayer], cache_format: str) -> int:
    """Bytes of one block of all layers."""
    return sum(2 * layer.kv_heads * SIGHT * cached_bytes(cache_format, layer.size) for layer in layers)
