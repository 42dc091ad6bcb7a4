"""Executing step messages on one rank: rows that enter, the engine, what goes on, and this rank's part in sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import ceil
from typing import Protocol

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from motley.daemon.models.description.hashed_rows import I64, with_those_before
from motley.daemon.rank.adapters.messages import (
    FindAdapter,
    FoundAdapter,
    LoadAdapter,
    Piece,
    ReadAdapter,
    WriteAdapter,
)
from motley.daemon.rank.adapters.table import NONE
from motley.daemon.rank.blocks.far_file import FarPlace
from motley.daemon.rank.blocks.kept_block import KeptBlock
from motley.daemon.rank.blocks.kept_file import KeptFile
from motley.daemon.rank.decode_times import Clocks, DecodeTimes
from motley.daemon.rank.guessing.handed_rows import HandedRows
from motley.daemon.rank.pooling import Pool
from motley.daemon.rank.steps import (
    Able,
    Close,
    CopyStates,
    Keep,
    Message,
    More,
    Move,
    Moved,
    Numbers,
    Open,
    Renumber,
    Restore,
    Restored,
    SpanPlan,
    Step,
    StepError,
    Stop,
    join,
    tell_losses,
)
from motley.daemon.sampling.parameters import SamplingParams
from motley.daemon.sampling.shard import ShardSampler
from motley.plugins.engine import F32, CacheBlocks, Engine, Span, blocks_in_memory
from motley.plugins.recurrent import RecurrentEngine
from motley.protocol import mesh_pb2 as pb


class Embed(Protocol):
    """Gives the rows f32[T, D] that a step of token ids begins with on this rank: their embeddings, or what the stage
    before has made of them; raises `IndexError` where there is no such token."""

    def __call__(self, tokens: Sequence[int], recent: I64 | None = None, /) -> F32:
        """`recent`: i64[T, N + 1], each token and the N before it, where these say which rows they are: see
        `motley.daemon.models.description.hashed_rows.HashedRows.numbers`; None: they do not."""
        ...


class Adapters(Protocol):
    """What a rank has of the adapters of its session."""

    def do(self, message: FindAdapter | ReadAdapter | WriteAdapter | LoadAdapter) -> FoundAdapter | Piece | Moved:
        """Do what rank 0 says, and say how it went.

        Raises:
            StepError: there is no such slot.
        """
        ...

    def embed(self, slot: int, rows: F32, tokens: Sequence[int]) -> None:
        """Have the rows that tokens begin with here, f32[T, D or more], be those of the adapter in a slot."""
        ...


class _Sequence:
    """A sequence that is open on this rank.

    Attributes:
        adapter: the slot of what it is computed with beside the model; 0: nothing.
        blocks: i32[N], its cache blocks so far.
        windowed: i32[N], those of layers with a window, where these have blocks of their own; else None.
        known: how many of its tokens this rank has been told, up to the end of its last step.
        told: i32[N], these tokens, where those before a row say which rows it begins with; empty where they do not.
        logits: f32[R, V_r]{tp} of the wanted rows of its last step, so that more can be asked for.
        first: how many tokens were generated before the one that the first of these rows is to choose.
        allowed: which tokens may be chosen by these rows, as `SpanPlan` has them.
        pool: what its embedding is made of; None: it is answered.
    """

    def __init__(
        self, sampler: ShardSampler, prompt: int, tokens: Numbers, most_blocks: int, adapter: int, told: int
    ) -> None:
        """`prompt`: tokens of it; `tokens`: that are known; `most_blocks`: that it may come to have; `told`: tokens
        that are kept at most."""
        self.sampler = sampler
        self.adapter = adapter
        self.prompt = prompt
        self.known = len(tokens)
        self.told = np.zeros(told, np.int32)
        self.told[: len(tokens)] = tokens[:told]
        self._table = np.zeros(most_blocks, np.int32)
        self.blocks = self._table[:0]
        self._windowed = np.zeros(most_blocks, np.int32)
        self.windowed: Numbers | None = None
        self.logits: F32 | None = None
        self.first = 0
        self.pool: Pool | None = None
        self.allowed: Numbers | None = None

    def add(self, blocks: Numbers, windowed: Numbers, there_are: CacheBlocks) -> None:
        """Give it more blocks, of those that there are.

        Args:
            windowed: those of layers with a window, see `SpanPlan`.

        Raises:
            StepError: there are no such blocks, or they are too many.
        """
        begin, count = len(self.blocks), there_are.count + there_are.far
        end = begin + len(blocks)
        if end > len(self._table) or blocks.min() < 0 or blocks.max() >= count:
            raise StepError(f"a sequence of {end} blocks, of at most {len(self._table)}, gets {blocks} of {count}")
        self._table[begin:end] = blocks
        self.blocks = self._table[:end]
        if len(windowed) != bool(there_are.windowed) * len(blocks) or windowed.max(initial=-1) >= there_are.windowed:
            raise StepError(f"a sequence gets {windowed} of {there_are.windowed} blocks of layers with a window")
        if there_are.windowed:
            self._windowed[begin:end] = windowed
            self.windowed = self._windowed[:end]

    def renumber(self, pairs: Numbers) -> None:
        """Have the blocks that some of its own were copied to: i32[N, 2], the old and the new number of each."""
        for old, new in pairs:
            self.blocks[self.blocks == old] = new

    def go_on(self, plan: SpanPlan, tokens: Sequence[int]) -> Span:
        """Take the tokens of its next step, which may be guesses; those of the answer go to the sampler.

        Raises:
            StepError: there are tokens before them that this rank has not been told, or a next token is to be chosen in
                the middle of the prompt.
        """
        end = plan.position + plan.rows
        if plan.position > self.known or (plan.wanted and end - plan.wanted + 1 < self.prompt):
            raise StepError(
                f"slot {plan.slot} gets tokens {plan.position} to {end}, of which {plan.wanted} are wanted; it has a"
                f" prompt of {self.prompt} and knows {self.known}"
            )
        if len(self.told):
            if end > len(self.told):
                raise StepError(f"slot {plan.slot} gets tokens {plan.position} to {end} of {len(self.told)} at most")
            self.told[plan.position : end] = tokens
        for position in range(max(self.prompt, plan.position), end):
            self.sampler.accept(position - self.prompt, tokens[position - plan.position])
        self.known = end
        guesses = max(0, plan.wanted - 1)  # whose next token is wanted after another's: see `SpanPlan`
        own = self.prompt, self.windowed, plan.slot, guesses, self.adapter
        return Span(self.blocks, plan.position, plan.rows, plan.wanted, *own)


class Executor:
    """Everything that a rank does with a step message, the same on rank 0 and on the others."""

    def __init__(
        self,
        engine: Engine,
        blocks: CacheBlocks,
        context: int,
        embed: Embed,
        vocabulary: range,
        words_per_unit: int,
        stats: Clocks,
        far: Sequence[FarPlace] = (),
        kept: KeptFile | None = None,
        adapters: Adapters | None = None,
        pass_on: Callable[[F32], None] | None = None,
        keeps_logits: bool = False,
        pooling: str = "",
        handed: HandedRows | None = None,
        block_s: Sequence[float] = (),
        recent: int = 0,
    ) -> None:
        """
        Args:
            engine: becomes this executor's, which closes it.
            blocks: of its caches.
            context: the longest sequence, in tokens.
            vocabulary: token ids whose logits this rank computes.
            words_per_unit: tokens in a unit of the vocabulary; masses are summed by these first.
            stats: of the collectives that the engine uses.
            far: where the far ones of the blocks are: all places that there are, in the order of the blocks' numbers.
            kept: keeps blocks for another start of the session; None: none are kept. The engine is then one that
                `keeps_prefixes`.
            adapters: what this rank has of the session's; None: the session has no slots for any.
            pass_on: takes the residual f32[T, D] of a step to the next stage: it is what the engine gives. None: there
                is none, the engine gives logits.
            keeps_logits: rank 0 may ask for more of a step (`More`) after it has begun another one: then a copy is
                kept, as an engine's are valid until the next step.
            pooling: how texts become embeddings, one of `motley.daemon.rank.pooling.POOLINGS`, where that is all that
                the session does: the engine gives hidden states in the place of logits. Empty: it is not.
            handed: takes what the engine gives behind the logits, for the model's own head to guess tokens by; None: it
                gives nothing there.
            block_s: what a step takes for each block in these places, in seconds, if there are several.
            recent: how many tokens before a row say, besides its own, which rows it begins with.
        """
        self._engine = engine
        self._blocks = blocks
        self._most_blocks = ceil(context / blocks.tokens)
        self._told = self._most_blocks * blocks.tokens if recent else 0
        self._recent = recent
        self._embed = embed
        self._vocabulary = vocabulary
        self._words_per_unit = words_per_unit
        self._stats = stats
        self._far = far
        self._block_s = block_s
        self.kept = kept
        self._adapters = adapters
        self._pass_on = pass_on
        self._keeps_logits = keeps_logits
        self._pooling = pooling
        self._handed = handed
        self._sequences: dict[int, _Sequence] = {}
        self.times = DecodeTimes()

    def execute(self, message: Message) -> bytes | None:
        """Do what a message says.

        Returns:
            What rank 0 is to be told; None: nothing. If the message asks for candidates, summaries of this rank's
            logits for all wanted rows in order, as `motley.daemon.rank.steps.join` puts them together; where texts are
            embedded, the embeddings in the place of these, of ranks without the last layers empty ones. If it is a
            `Move` or a `Keep`, the encoded `Moved`; if it is a `Restore`, the encoded `Restored`; if it is about an
            adapter, what `motley.daemon.rank.adapters.messages` says.

        Raises:
            StepError: the message does not fit the state of this rank.
            motley.plugins.engine.EngineError, motley.transport.TransportError: from the engine.
        """
        match message:
            case Step():
                return self._step(message)
            case More(slots, rows, wants):
                fields = (each.tolist() for each in (slots, rows, wants))
                return join([self._more(*each) for each in zip(*fields, strict=True)])
            case FindAdapter() | ReadAdapter() | WriteAdapter() | LoadAdapter():
                if self._adapters is None:
                    raise StepError(f"this rank has no slots for adapters, and is told {type(message).__name__}")
                return self._adapters.do(message).encode()
            case Open(slot, prompt, sampling, tokens, adapter):
                if slot in self._sequences:
                    raise StepError(f"slot {slot} is open already on this rank")
                params = SamplingParams.from_proto(_sampling(sampling))
                ids = self._vocabulary
                sampler = ShardSampler(params, ids.start, len(ids), tokens[:prompt], self._words_per_unit)
                for step, token in enumerate(tokens[prompt:].tolist()):
                    sampler.accept(step, token)
                if adapter != NONE and self._adapters is None:
                    raise StepError(f"slot {slot} is to be computed with adapter {adapter}; this rank has none")
                self._sequences[slot] = _Sequence(sampler, prompt, tokens, self._most_blocks, adapter, self._told)
            case Close(slot):
                self._sequence(slot)
                del self._sequences[slot]
            case Move(pairs):
                return self._move(pairs).encode()
            case Renumber(pairs):
                self._check_pairs(pairs)
                for sequence in self._sequences.values():
                    sequence.renumber(pairs)
            case CopyStates(pairs):
                self._copy_states(pairs)
            case Keep(blocks):
                return self._keep(blocks).encode()
            case Restore(blocks):
                kept = self._kept_for(blocks)
                return Restored([kept.read(block, blocks_in_memory(self._engine)) for block in blocks]).encode()
            case Stop():
                pass
            case Able() | Moved() | Restored() | FoundAdapter() | Piece():
                raise StepError(f"a rank is told what only rank 0 is to hear: {message}")
        return None

    @property
    def able(self) -> Able:
        """What this rank is able to do."""
        return Able(self.most_spans, self.kept.plan if self.kept else 0, self._block_s)

    @property
    def most_spans(self) -> int:
        """How many spans a `Step` may have on this rank."""
        return self._engine.most_spans

    def close(self) -> None:
        """Free the engine."""
        self._engine.close()

    def _sequence(self, slot: int) -> _Sequence:
        try:
            return self._sequences[slot]
        except KeyError:
            raise StepError(f"slot {slot} is not open on this rank") from None

    def _more(self, slot: int, row: int, want: int) -> bytes:
        """A summary with more candidates for one of the wanted rows of a sequence's last step."""
        sequence = self._sequence(slot)
        if sequence.logits is None or not 0 <= row < len(sequence.logits):
            raise StepError(f"slot {slot} has no logits of wanted row {row} to say more about")
        return self._summary(sequence, row, want)

    def _check_pairs(self, pairs: Numbers) -> None:
        """Make sure that there are the blocks that are to be moved, and the far ones that they go to.

        Raises:
            StepError: there are not.
        """
        near, every = self._blocks.count, self._blocks.count + self._blocks.far
        if pairs[:, 0].max() >= near or pairs[:, 1].min() < near or pairs[:, 1].max() >= every:
            raise StepError(f"blocks are to be moved from and to {pairs.tolist()}; far ones are {near} to {every - 1}")

    def _move(self, pairs: Numbers) -> Moved:
        """Copy blocks to far ones."""
        self._check_pairs(pairs)
        try:
            self._engine.move([(block, far) for block, far in pairs.tolist()])
        except OSError as error:
            return Moved(f"cache blocks cannot be moved: {error}")
        return Moved()

    def _copy_states(self, pairs: Numbers) -> None:
        """Copy recurrent states.

        Raises:
            StepError: there are no such slots, or no states.
        """
        if pairs.max() >= self._blocks.states or not isinstance(self._engine, RecurrentEngine):
            raise StepError(f"recurrent states are to be copied from and to {pairs.tolist()}, of which there are fewer")
        self._engine.copy_states([(source, target) for source, target in pairs.tolist()])

    def _kept_for(self, blocks: Sequence[KeptBlock]) -> KeptFile:
        """The file for blocks that are to be kept or read.

        Raises:
            StepError: there are no such blocks, or none are kept.
        """
        count, windowed = self._blocks.count, self._blocks.windowed
        if self.kept is None:
            raise StepError("blocks are to be kept or read, of which this rank keeps none")
        for block in blocks:
            known = 0 <= block.number < count and -1 <= block.windowed < windowed
            if not known or not 1 <= len(block.tokens) <= self._blocks.tokens:
                raise StepError(f"{block} is to be kept or read; there are {count} blocks, {windowed} with a window")
        return self.kept

    def _keep(self, blocks: Sequence[KeptBlock]) -> Moved:
        """Write blocks to the file in which they are kept."""
        kept = self._kept_for(blocks)
        try:
            for block in blocks:
                kept.write(block, blocks_in_memory(self._engine))
        except OSError as error:
            return Moved(f"prefixes cannot be kept on the disk: {error}")
        return Moved()

    def _step(self, step: Step) -> bytes | None:
        """Some tokens of some sequences; the summaries of the wanted rows in order, None if there are none. If there
        are far blocks, whether they are lost comes first, see `tell_losses`."""
        began, before = time.perf_counter(), self._stats.snapshot()
        tokens = step.tokens.tolist()
        spans = []
        at = 0
        for plan in step.spans:
            sequence = self._sequence(plan.slot)
            if len(plan.blocks):
                sequence.add(plan.blocks, plan.windowed, self._blocks)
            spans.append(sequence.go_on(plan, tokens[at : at + plan.rows]))
            at += plan.rows
        for place in self._far:
            place.verify(np.concatenate([p.blocks for p in step.spans]), np.concatenate([s.blocks for s in spans]))
        try:
            hidden = self._embed(tokens, self._recent_of(step.spans))
        except IndexError as error:
            raise StepError(f"a step has tokens that there are not: {error}") from error
        self._embed_by_adapters(hidden, tokens, spans)
        results = self._compute(hidden, spans, step.halved)
        if all(plan.rows == plan.wanted for plan in step.spans):
            self.times.add(len(step.spans), time.perf_counter() - began, before, self._stats.snapshot())
        summaries = (self._pool if self._pooling else self._summarise)(step.spans, results)
        if self._blocks.far:
            return tell_losses([place.lost for place in self._far], join(summaries))
        return join(summaries) if summaries else None

    def _recent_of(self, plans: Sequence[SpanPlan]) -> I64 | None:
        """The tokens of a step, which its sequences know, each with those before it; None: those say nothing."""
        if not self._recent:
            return None
        told = ((self._sequences[plan.slot].told, plan.position, plan.position + plan.rows) for plan in plans)
        return np.concatenate([with_those_before(*own, self._recent) for own in told])

    def _embed_by_adapters(self, hidden: F32, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Have the rows of sequences whose adapters have embeddings of their own begin with those."""
        begin = 0
        for span in spans:
            end = begin + span.rows
            if self._adapters and span.adapter:
                self._adapters.embed(span.adapter, hidden[begin:end], tokens[begin:end])
            begin = end

    def _compute(self, hidden: F32, spans: Sequence[Span], halved: bool) -> F32:
        """f32[R, V_r]{tp}: logits of the wanted rows, or, where texts are embedded, hidden states f32[T, D] of all
        rows; of a rank whose residuals go on, none."""
        if self._pass_on is None and not self._pooling:
            logits = self._engine.step(hidden, spans, halved)
            return logits.copy() if self._keeps_logits else logits
        every = self._engine.step(hidden, [span._replace(wanted=span.rows) for span in spans], halved)
        if self._pass_on is None:
            return every
        self._pass_on(every)
        return np.empty((sum(span.wanted for span in spans), 0), np.float32)

    def _pool(self, plans: Sequence[SpanPlan], states: F32) -> list[bytes]:
        """The embeddings of the texts of which a step has the last rows, given f32[T, D] of all of its rows."""
        if self._pass_on is not None:
            return [b""] * sum(plan.wanted for plan in plans)
        embeddings = []
        at = 0
        for plan in plans:
            sequence = self._sequences[plan.slot]
            sequence.pool = sequence.pool or Pool(self._pooling)
            sequence.pool.add(states[at : at + plan.rows])
            at += plan.rows
            if plan.wanted:
                embeddings.append(sequence.pool.encoded())
        return embeddings

    def _summarise(self, plans: Sequence[SpanPlan], logits: F32) -> list[bytes]:
        """A summary of each row of f32[R, V_r]{tp}, the wanted ones of all sequences of a step, with what is handed."""
        summaries = []
        at = 0
        for plan in plans:
            sequence = self._sequences[plan.slot]
            own = logits[at : at + plan.wanted]
            if self._handed is not None:
                own, rows = own[:, : len(self._vocabulary)], own[:, len(self._vocabulary) :]
                self._handed.keep(plan.slot, plan.position + plan.rows - plan.wanted, rows)
            sequence.logits = own
            sequence.first = plan.position + plan.rows - plan.wanted + 1 - sequence.prompt
            sequence.allowed = plan.allowed
            summaries += [self._summary(sequence, row, plan.want) for row in range(len(own))]
            at += plan.wanted
        return summaries

    def _summary(self, sequence: _Sequence, row: int, want: int) -> bytes:
        """Summarise one of the wanted rows of a sequence's last step."""
        assert sequence.logits is not None, "it has had a step"
        allowed = None if sequence.allowed is None else self._own_bits(sequence.allowed[row])
        return sequence.sampler.summarise(sequence.logits[row], sequence.first + row, want, allowed)

    def _own_bits(self, words: Numbers) -> npt.NDArray[np.bool_]:
        """Which tokens of this rank's slice may be chosen, bool[V_r]{tp}: not those that a mask i32[W] does not reach,
        which fill the model's rows up."""
        start, stop = self._vocabulary.start, self._vocabulary.stop
        bits = np.unpackbits(words.view(np.uint8)[start // 8 : -(-stop // 8)], bitorder="little")
        allowed = np.zeros(stop - start, np.bool_)
        own = bits[start % 8 :][: stop - start]
        allowed[: len(own)] = own
        return allowed


def _sampling(data: bytes) -> pb.Sampling:
    """Read how a sequence is sampled, as rank 0 has sent it.

    Raises:
        StepError: it is nothing of that kind.
    """
    try:
        return pb.Sampling.FromString(data)
    except DecodeError as error:
        raise StepError(f"the {len(data)} bytes on sampling of an Open are malformed: {error}") from error
