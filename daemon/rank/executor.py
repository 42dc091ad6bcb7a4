"""Executing step messages on one rank: embedding rows, the engine, and this rank's part in sampling."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf.message import DecodeError

from motley.daemon.rank.steps import Able, Close, Message, More, Open, Reserve, Step, StepError, Stop, Wave, join
from motley.daemon.sampling.parameters import SamplingParams
from motley.daemon.sampling.shard import ShardSampler
from motley.plugins.engine import F32, Engine, EngineMemoryError
from motley.protocol import mesh_pb2 as pb
from motley.transport import StatsSnapshot

Embed = Callable[[Sequence[int]], F32]
"""Gives the embedding rows of token ids, f32[T, D]."""

STEP_HISTORY = 4096
"""Decode steps whose times are remembered."""


class Clocks(Protocol):
    """What tells where the time of a rank's collectives went."""

    def snapshot(self) -> StatsSnapshot:
        """The clocks as they are now, in seconds since the session began."""
        ...


@dataclass
class DecodeTimes:
    """Where the time of this rank's decode steps went, cumulative, in seconds. Sequences of one step share it."""

    tokens: int = 0
    compute: float = 0.0
    wire: float = 0.0
    wait: float = 0.0
    collectives: int = 0
    steps: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=STEP_HISTORY))
    """(compute, wire, wait) of each of the latest steps, until someone has told of them and clears it."""


@dataclass
class _Sequence:
    """A sequence that is open on this rank.

    Attributes:
        logits: f32[V_r]{tp} of its last step that asked for candidates, so that more can be asked for.
        generated: tokens of its answer that have been fed back.
        in_engine: whether the engine has its slot open; it has not had the memory for it before.
    """

    sampler: ShardSampler
    prompt_tokens: int
    in_engine: bool = False
    logits: F32 | None = None
    generated: int = 0


class Executor:
    """Everything that a rank does with a step message, the same on rank 0 and on the others."""

    def __init__(self, engine: Engine, embed: Embed, vocabulary: range, words_per_unit: int, stats: Clocks) -> None:
        """
        Args:
            engine: becomes this executor's, which closes it.
            vocabulary: token ids whose logits this rank computes.
            words_per_unit: tokens in a unit of the vocabulary; masses are summed by these first.
            stats: of the collectives that the engine uses.
        """
        self._engine = engine
        self._embed = embed
        self._vocabulary = vocabulary
        self._words_per_unit = words_per_unit
        self._stats = stats
        self._sequences: dict[int, _Sequence] = {}
        self.times = DecodeTimes()

    def execute(self, message: Message) -> bytes | None:
        """Do what a message says.

        Returns:
            What rank 0 is to be told; None: nothing. If the message asks for candidates, a summary of this rank's
            logits: of a `Wave` those of its sequences that are asked about, and of a `More` those of all, as
            `motley.daemon.rank.steps.join` puts them together. If it asks for room, why there is none, as text; empty:
            there is.

        Raises:
            StepError: the message does not fit the state of this rank.
            motley.plugins.engine.EngineError, motley.transport.TransportError: from the engine.
        """
        match message:
            case Step():
                return self._step(message)
            case Wave():
                return self._decode(message)
            case More(slots, wants):
                return join([self._more(*each) for each in zip(slots.tolist(), wants.tolist(), strict=True)])
            case Open(slot, room, sampling, prompt):
                if slot in self._sequences:
                    raise StepError(f"slot {slot} is open already on this rank")
                params = SamplingParams.from_proto(_sampling(sampling))
                ids = self._vocabulary
                sampler = ShardSampler(params, ids.start, len(ids), prompt.tolist(), self._words_per_unit)
                self._sequences[slot] = _Sequence(sampler, len(prompt))
                return self._reserve(slot, room)
            case Reserve(slot, room):
                return self._reserve(slot, room)
            case Close(slot):
                if self._sequence(slot).in_engine:
                    self._engine.close_slot(slot)
                del self._sequences[slot]
            case Stop():
                pass
            case Able():
                raise StepError("a follower is told how many sequences it can take")
        return None

    @property
    def most_sequences(self) -> int:
        """How many sequences a `Wave` may have on this rank."""
        return self._engine.most_sequences

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _sequence(self, slot: int) -> _Sequence:
        try:
            return self._sequences[slot]
        except KeyError:
            raise StepError(f"slot {slot} is not open on this rank") from None

    def _reserve(self, slot: int, room: int) -> bytes:
        """Make room for so many tokens of a sequence; why there is no memory for them, empty: there is."""
        sequence = self._sequence(slot)
        try:
            if not sequence.in_engine:
                self._engine.open_slot(slot, sequence.prompt_tokens)
                sequence.in_engine = True
            self._engine.reserve(slot, room)
        except (MemoryError, EngineMemoryError) as error:
            return (str(error) or "out of memory").encode()
        return b""

    def _more(self, slot: int, want: int) -> bytes:
        """A summary with more candidates of a sequence's last step."""
        sequence = self._sequence(slot)
        if sequence.logits is None:
            raise StepError(f"slot {slot} has no logits to say more about")
        return sequence.sampler.summarise(sequence.logits, sequence.generated, want)

    def _step(self, step: Step) -> bytes | None:
        """A chunk of a prompt."""
        sequence = self._sequence(step.slot)
        rows = (len(step.tokens) - 1,) if step.want else ()
        logits = self._engine.step(step.slot, self._embed(step.tokens.tolist()), step.position, rows, step.halved)
        return self._summarise(sequence, logits[0], step.want) if step.want else None

    def _decode(self, wave: Wave) -> bytes:
        """A token each of some sequences; their summaries in order, of those that are wanted."""
        slots, tokens = wave.slots.tolist(), wave.tokens.tolist()
        sequences = [self._sequence(slot) for slot in slots]
        began, before = time.perf_counter(), self._stats.snapshot()
        for sequence, position, token in zip(sequences, wave.positions, tokens, strict=True):
            if position >= sequence.prompt_tokens:  # by this session: fed back, or once more after a break
                sequence.sampler.accept(token)
                sequence.generated += 1
        logits = self._engine.decode(slots, self._embed(tokens), wave.positions.tolist())
        wanted = [
            self._summarise(sequence, row, want)
            for sequence, row, want in zip(sequences, logits, wave.wants.tolist(), strict=True)
            if want
        ]
        after, times = self._stats.snapshot(), self.times
        wire, wait = after.wire_s - before.wire_s, after.wait_s - before.wait_s
        compute = time.perf_counter() - began - wire - wait
        times.tokens += len(slots)
        times.wire += wire
        times.wait += wait
        times.compute += compute
        times.steps.append((compute, wire, wait))
        times.collectives += after.collectives - before.collectives
        return join(wanted)

    def _summarise(self, sequence: _Sequence, logits: F32, want: int) -> bytes:
        sequence.logits = logits
        return sequence.sampler.summarise(logits, sequence.generated, want)


def _sampling(data: bytes) -> pb.Sampling:
    """Read how a sequence is sampled, as rank 0 has sent it.

    Raises:
        StepError: it is nothing of that kind.
    """
    try:
        return pb.Sampling.FromString(data)
    except DecodeError as error:
        raise StepError(f"the {len(data)} bytes on sampling of an Open are malformed: {error}") from error
