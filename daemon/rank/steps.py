"""What the scheduler, on rank 0, tells the other ranks to do, as small messages on the data plane.

Every rank, rank 0 included, executes the same messages in the same order; that alone keeps their caches, their samplers
and their collectives in step.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from motley.daemon.rank.adapters import messages as of_adapters
from motley.daemon.rank.adapters.messages import AdapterMessage
from motley.daemon.rank.adapters.table import NONE
from motley.daemon.rank.blocks.kept_block import KeptBlock, decode_blocks
from motley.daemon.rank.message_kinds import Kind

Numbers = npt.NDArray[np.int32]

_OPEN = struct.Struct("<BIIII")
_STEP = struct.Struct("<BBII")
_SLOT = struct.Struct("<BI")
_COUNT = struct.Struct("<BI")
_ABLE = struct.Struct("<BIQ")
_LENGTH = struct.Struct("<I")
_FIELDS = 8
"""Numbers that a `Step` has of each span, besides its blocks."""


class StepError(ValueError):
    """A step message, or a summary, that is malformed or does not fit the state of the rank that gets it."""


@dataclass(frozen=True)
class Open:
    """Begin a sequence.

    Attributes:
        slot: the number that it has on every rank until it is closed.
        prompt: how many of the tokens are its prompt. The others have been generated already, before it stepped back.
        sampling: a serialised `mesh_pb2.Sampling`.
        tokens: i32[T], all that are known, which penalties look at.
        adapter: the slot of what it is computed with beside the model; 0: nothing.
    """

    slot: int
    prompt: int
    sampling: bytes
    tokens: Numbers
    adapter: int = NONE

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        head = _OPEN.pack(Kind.OPEN, self.slot, self.prompt, self.adapter, len(self.sampling))
        return head + self.sampling + self.tokens.tobytes()


@dataclass(frozen=True)
class SpanPlan:
    """What one sequence has of a step.

    Attributes:
        slot: of the sequence.
        position: of its first token in the step. All tokens before it have been computed.
        rows: tokens that are computed.
        wanted: of how many of these, the last ones, the next tokens are to be chosen: all but the first of them are
            guesses.
        want: candidates for each of those that every rank sends to rank 0; 0 if none are wanted.
        blocks: i32[N], the cache blocks that the sequence has got since its last step, after those that it had.
        windowed: i32[N], what layers with a window have for these; -1: nothing, which its rows do not see. Empty where
            such layers have the same blocks as others.
        allowed: i32[wanted, W], for each of the next tokens a bit for every token of the vocabulary, the lowest bit of
            the first word first; 1: it may be chosen. None: all may.
    """

    slot: int
    position: int
    rows: int
    wanted: int
    want: int
    blocks: Numbers
    windowed: Numbers = field(default_factory=lambda: np.zeros(0, np.int32))
    allowed: Numbers | None = None

    @property
    def fields(self) -> tuple[int, ...]:
        """The numbers that `_FIELDS` counts."""
        new = len(self.blocks), len(self.windowed)
        return self.slot, self.position, self.rows, self.wanted, self.want, *new, self.words

    @property
    def words(self) -> int:
        """W of `allowed`; 0 if all tokens may be chosen."""
        return 0 if self.allowed is None else self.allowed.shape[1]


@dataclass(frozen=True)
class Step:
    """Compute some tokens of some sequences, and send rank 0 the best candidates for the next ones.

    Attributes:
        spans: of the sequences, each at most once.
        tokens: i32[T], of all spans, in their order.
        halved: whether to compute it as two micro-chunks.
    """

    spans: Sequence[SpanPlan]
    tokens: Numbers
    halved: bool = False

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        table = [each.fields for each in self.spans]
        new = (numbers for each in self.spans for numbers in (each.blocks, each.windowed) if len(numbers))
        masks = [each.allowed for each in self.spans if each.allowed is not None]
        parts = [np.array(table, np.int32), *new, *masks, self.tokens]
        head = _STEP.pack(Kind.STEP, self.halved, len(self.spans), len(self.tokens))
        return head + b"".join(part.tobytes() for part in parts)


@dataclass(frozen=True)
class Able:
    """Said to rank 0 by every other rank once it is loaded.

    Attributes:
        spans: how many its engine can take in a step, at least one.
        plan: a number for what its kept blocks are for, see `motley.daemon.rank.blocks.kept_file.KeptFile.plan`; 0: it
            keeps none.
        block_s: seconds that a step takes for each far block that it uses, by the place where these are, if there are
            several places.
    """

    spans: int
    plan: int = 0
    block_s: Sequence[float] = ()

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _ABLE.pack(Kind.ABLE, self.spans, self.plan) + np.array(self.block_s, "<f8").tobytes()


@dataclass(frozen=True)
class Move:
    """Copy cache blocks to far ones, and say how it went; sequences go on to have the blocks that they have.

    Attributes:
        pairs: i32[N, 2]: a block, and the far one that is overwritten.
    """

    pairs: Numbers

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.MOVE]) + self.pairs.tobytes()


@dataclass(frozen=True)
class Moved:
    """Said to rank 0 by every rank after a `Move`, a `Keep`, a `WriteAdapter` or a `LoadAdapter`.

    Attributes:
        trouble: why blocks could not be written, which are as they were, or why the adapter is not there; empty: all
            is well.
    """

    trouble: str = ""

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.MOVED]) + self.trouble.encode()


@dataclass(frozen=True)
class Renumber:
    """Give every sequence that has a block of some numbers the one that this was copied to, in its place.

    Attributes:
        pairs: i32[N, 2]: the number of a block, and the new one; each pair applies to what the one before has made.
    """

    pairs: Numbers

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.RENUMBER]) + self.pairs.tobytes()


@dataclass(frozen=True)
class CopyStates:
    """Copy recurrent states, one after another.

    Attributes:
        pairs: i32[N, 2]: the number of a sequence's slot or of a place where a state is remembered, and the one that is
            overwritten.
    """

    pairs: Numbers

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.COPY_STATES]) + self.pairs.tobytes()


@dataclass(frozen=True)
class Keep:
    """Write blocks to the file in which they are kept for another start, and say how it went (`Moved`)."""

    blocks: Sequence[KeptBlock]

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.KEEP]) + b"".join(block.encode() for block in self.blocks)


@dataclass(frozen=True)
class Restore:
    """Read blocks from the file in which they are kept, and say which are there (`Restored`). No sequence has them."""

    blocks: Sequence[KeptBlock]

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.RESTORE]) + b"".join(block.encode() for block in self.blocks)


@dataclass(frozen=True)
class Restored:
    """Said to rank 0 by every rank after a `Restore`: for each of the blocks what `KeptFile.read` gives."""

    there: Sequence[int]

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.RESTORED]) + bytes(self.there)


@dataclass(frozen=True)
class More:
    """The candidates for some sequences' next tokens did not decide: send rank 0 more of them.

    Attributes, all i32[B]:
        slots: of the sequences.
        rows: which of the wanted rows of its last step, by sequence, counted from the first of these.
        wants: how many candidates of each.
    """

    slots: Numbers
    rows: Numbers
    wants: Numbers

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _COUNT.pack(Kind.MORE, len(self.slots)) + np.stack([self.slots, self.rows, self.wants]).tobytes()


@dataclass(frozen=True)
class Close:
    """End a sequence; its slot is free."""

    slot: int

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return _SLOT.pack(Kind.CLOSE, self.slot)


@dataclass(frozen=True)
class Stop:
    """End the session."""

    def encode(self) -> bytes:
        """Write the message as bytes, which `decode` reads."""
        return bytes([Kind.STOP])


Message = (
    Open
    | Step
    | Able
    | Move
    | Moved
    | Renumber
    | CopyStates
    | Keep
    | Restore
    | Restored
    | More
    | Close
    | Stop
    | AdapterMessage
)


def decode(data: bytes) -> Message:
    """Read a message that one of these classes has encoded.

    Raises:
        StepError: unknown kind or wrong length.
    """
    try:
        match data[0]:
            case Kind.OPEN:
                _, slot, prompt, adapter, length = _OPEN.unpack_from(data)
                end = _OPEN.size + length
                if end > len(data):
                    raise StepError(f"an Open of {len(data)} bytes announces {length} bytes of sampling")
                tokens = np.frombuffer(data, np.int32, offset=end)
                if prompt > len(tokens):
                    raise StepError(f"an Open of {len(tokens)} tokens has a prompt of {prompt}")
                return Open(slot, prompt, data[_OPEN.size : end], tokens, adapter)
            case Kind.STEP:
                return _step(data)
            case Kind.MORE:
                _, count = _COUNT.unpack_from(data)
                fields = np.frombuffer(data, np.int32, offset=_COUNT.size)
                if not count or len(fields) != 3 * count:
                    raise StepError(f"a More of {count} sequences has {len(fields)} numbers, not {3 * count}")
                if fields.min() < 0:
                    raise StepError(f"a More asks for rows or candidates below 0: {fields.tolist()}")
                return More(*fields.reshape(3, count))
            case Kind.CLOSE:
                return Close(*_SLOT.unpack(data)[1:])
            case Kind.STOP if len(data) == 1:
                return Stop()
            case Kind.COPY_STATES:
                return CopyStates(_pairs(data))
            case Kind.ABLE:
                _, spans, plan = _ABLE.unpack_from(data)
                block_s = tuple(np.frombuffer(data, "<f8", offset=_ABLE.size).tolist())
                if not spans:
                    raise StepError("an Able of no span")
                if not all(seconds >= 0 for seconds in block_s):
                    raise StepError(f"an Able of {block_s} seconds")
                return Able(spans, plan, block_s)
            case Kind.MOVE:
                return Move(_pairs(data))
            case Kind.MOVED:
                return Moved(data[1:].decode())
            case Kind.RENUMBER:
                return Renumber(_pairs(data))
            case Kind.KEEP:
                return Keep(decode_blocks(data[1:]))
            case Kind.RESTORE:
                return Restore(decode_blocks(data[1:]))
            case Kind.RESTORED:
                return Restored(tuple(data[1:]))
            case kind if kind in of_adapters.KINDS:
                return of_adapters.decode(data)
    except (struct.error, IndexError, ValueError) as error:
        raise StepError(f"a step message of {len(data)} bytes is malformed: {error}") from error
    raise StepError(f"a step message of {len(data)} bytes has the unknown kind {data[0]}")


def _pairs(data: bytes) -> Numbers:
    """Read the numbers of a `Move`, a `Renumber` or a `CopyStates`; errors as `decode`."""
    pairs = np.frombuffer(data, np.int32, offset=1).reshape(-1, 2)
    if not pairs.size or pairs.min() < 0:
        raise StepError(f"blocks or states are to be moved from and to {pairs.tolist()}")
    return pairs


def _step(data: bytes) -> Step:
    """Read a `Step`; errors as `decode`."""
    _, halved, count, length = _STEP.unpack_from(data)
    numbers = np.frombuffer(data, np.int32, offset=_STEP.size)
    table = numbers[: _FIELDS * count].reshape(count, _FIELDS)
    if halved > 1 or not count or table.min() < 0:
        raise StepError(f"a step of {count} spans, halved: {halved}, has numbers out of range: {table.tolist()}")
    fields = table.tolist()
    spans = []
    at, all_rows = _FIELDS * count, 0
    mask_at = at + sum(new + windowed for *_, new, windowed, _ in fields)
    for slot, position, rows, wanted, want, new, windowed, words in fields:
        if not rows or wanted > rows:
            raise StepError(f"a span of {rows} tokens, of which {wanted} are wanted")
        masks = numbers[mask_at : mask_at + wanted * words].reshape(wanted, words) if words else None
        end = at + new + windowed
        blocks, own = numbers[at : at + new], numbers[at + new : end]
        spans.append(SpanPlan(slot, position, rows, wanted, want, blocks, own, masks))
        at, mask_at, all_rows = end, mask_at + wanted * words, all_rows + rows
    if all_rows != length or mask_at + length != len(numbers):
        raise StepError(f"{count} spans of {all_rows} rows do not fit {length} tokens and {len(numbers)} numbers")
    if len({span.slot for span in spans}) < count:
        raise StepError(f"a step has several spans of one sequence: {[span.slot for span in spans]}")
    return Step(spans, numbers[mask_at:], bool(halved))


def tell_losses(losses: Iterable[str], summaries: bytes) -> bytes:
    """What a rank tells of a step if there are far blocks.

    Args:
        losses: of each place where they are, why they are lost, so that what was computed may be wrong; empty: they are
            there.
        summaries: as `join` puts them together.
    """
    return join([lost.encode() for lost in losses]) + summaries


def split_losses(data: bytes, places: int) -> tuple[list[str], bytes]:
    """The inverse of `tell_losses`, where far blocks are in so many places.

    Raises:
        StepError: it is shorter than it says, or its words are no text.
    """
    losses = []
    at = 0
    try:
        for _ in range(places):
            start = at + _LENGTH.size
            at = start + _LENGTH.unpack_from(data, at)[0]
            if at > len(data):
                raise StepError(f"what is told of a step ends in the middle, after {len(data)} bytes")
            losses.append(data[start:at].decode())
        return losses, data[at:]
    except (struct.error, UnicodeDecodeError) as error:
        raise StepError(f"what is told of a step, {len(data)} bytes, is malformed: {error}") from error


def join(summaries: Sequence[bytes]) -> bytes:
    """The summaries of a step's wanted rows as one message."""
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
