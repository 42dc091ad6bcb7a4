"""The CPU engine: our own kernels compute quantised products and small steps, ONNX Runtime all else.

A step is a chain of actions on buffers whose addresses are bound once: a session's ``run_with_iobinding`` takes about
3 us besides its work, a product of ours about 1. Every value that crosses a segment lives in a buffer of this engine,
so the collectives work on it in place, and nothing is copied or allocated per token. KV caches are updated in place:
past and present are one buffer.

Decoded tokens of several sequences are rows of one step. Only attention runs once for each of them; weights are read,
and sums exchanged, once for all.

Two micro-chunks of a prompt take turns: one computes a segment while the sum of the other is under way.

In exact mode the runtime is never given an odd number of rows, because its kernels take rows by twos and round a lone
one otherwise: the last row is run twice, but for attention, whose result is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from math import prod

import numpy as np

from motley.plugins.engine import F32, Collectives, EngineError, EngineOptions, Pending, RankGraph, micro_chunks
from motley.plugins.mapped_share import Array
from motley.plugins.mixture import Sent, as_terms
from motley.plugins.native.rows import Action
from motley.plugins.onnxruntime.bound import Bound, BoundRows, Decoder, Slot
from motley.plugins.onnxruntime.experts import BoundMixture, LocalExperts
from motley.plugins.onnxruntime.lowering import lower
from motley.plugins.onnxruntime.sessions import (
    EXACT_PROBE,
    POSITION,
    ROWS_DIFFER,
    Part,
    Store,
    Threads,
    Workshop,
    compute,
)
from motley.plugins.segments import ROWS, Gathering, Kernel, Mixture, Reduction, cut_into_segments
from motley.plugins.slots import Slots, check_reserve, check_rows, check_skip, check_step, grown_capacity

FIRST_CAPACITY = 256
"""Tokens that a new slot has room for; it doubles when full."""

WAVES_KEPT = 64
"""Groups of sequences whose decode steps stay put together."""

Exchange = Callable[[Bound], None]
"""What is done after a segment has run."""


class OnnxRuntimeEngine:
    """See `motley.plugins.engine.Engine`."""

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        options.check_extra("onnxruntime")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._exact = options.exact
        self._each = 2 if options.exact and options.floats else 1
        """Rows that a decoded token is run as."""
        self._slots = Slots[Slot]()
        self._decoders: dict[int, Decoder] = {}
        """By the number of sequences."""
        self._waves: dict[tuple[int, ...], list[Bound]] = {}
        """Whole decode steps, by their slots; void once a cache moves."""
        self._logits = np.empty((0, graph.vocabulary), np.float32)
        """Of the latest decode step."""

        lowered = lower(graph.proto)
        outputs = [output.name for output in graph.proto.graph.output]
        segments = cut_into_segments(lowered.nodes, lowered.initializers, outputs)
        most_rows = options.max_rows + options.max_rows % 2
        self._threads = Threads(options.threads)
        self._workshop = Workshop(graph, lowered.initializers, self._threads)
        parts = self._workshop.make(segments)
        self._layers = [part for part in parts if not part.segment.head]
        self._head = [part for part in parts if part.segment.head]
        self._attentions = [part for part in self._layers if part.attends]
        self._buffers = self._workshop.buffers(segments, Store(most_rows))
        rows, between = np.zeros((most_rows, graph.hidden), np.float32), Store(most_rows)
        self._experts = {
            segment.then.totals: LocalExperts(segment.then.experts, self._workshop, lowered.initializers, rows, between)
            for segment in segments
            if isinstance(segment.then, Mixture) and segment.then.experts
        }
        gatherings = (each.then for each in segments if isinstance(each.then, Gathering))
        most = max((len(each.gathered) * self._workshop.width(each.gathered[0]) for each in gatherings), default=0)
        # What one segment gathers is read by the next, while that makes its own.
        self._gathers = [np.zeros(most * most_rows, np.float32) for _ in range(2)]
        self._alone = options.exact
        """Nobody else is to be asked."""
        if options.exact:
            self._test_rows()
            self._alone = False

    @property
    def most_sequences(self) -> int:
        return self._max_rows // self._each

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        self._slots.check_free(slot)
        self._slots[slot] = Slot(self._graph.constants(prompt))

    def close_slot(self, slot: int) -> None:
        self._slots.take(slot)
        self._waves.clear()

    def reserve(self, slot: int, tokens: int) -> None:
        state = self._slots[slot]
        check_reserve(slot, tokens, self._graph.context)
        if tokens > state.capacity:
            self._grow(slot, tokens)

    def skip(self, slot: int, position: int) -> None:
        state = self._slots[slot]
        check_skip(slot, state.length, position, self._graph.context)
        if position > state.capacity:
            self._grow(slot, position)
        for cached in state.caches.values():
            cached[:, :, state.length : position] = 0
        state.length = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        return self._step(slot, hidden, position, rows, halved, self._exchange)

    def decode(self, slots: Sequence[int], hidden: F32, positions: Sequence[int]) -> F32:
        if not 1 <= len(slots) == len(set(slots)) <= self.most_sequences:
            raise EngineError(f"a step decodes 1 to {self.most_sequences} sequences, each once, not slots {[*slots]}")
        for slot, position in zip(slots, positions, strict=True):
            check_step(slot, self._slots[slot].length, position, 1, self._graph.context)
        for slot, position in zip(slots, positions, strict=True):
            self._room(slot, position, 1).position[0] = position
        each, count = self._each, len(slots)
        for row in range(each):
            np.copyto(self._buffers["hidden"][row : count * each : each], hidden)
        for bound in self._waves.get(tuple(slots)) or self._bind_wave(tuple(slots)):
            self._run(bound)
            self._exchange(bound)
        for slot, position in zip(slots, positions, strict=True):
            self._slots[slot].length = position + 1
        return self._logits[: count * each : each]

    def close(self) -> None:
        self._slots.clear()
        self._waves.clear()
        self._decoders.clear()
        self._attentions.clear()
        self._layers.clear()
        self._head.clear()
        self._experts.clear()
        self._workshop.close()  # not before the sessions
        self._threads.close()
        self._buffers.clear()
        self._gathers.clear()

    def _step(
        self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool, exchange: Exchange
    ) -> F32:
        """As `step`; `exchange` is called after each segment, where `step` calls the transport."""
        tokens = len(hidden)
        if halved and self._exact:
            raise EngineError("engine 'onnxruntime' takes no step in halves with exact=true")
        check_rows(hidden, rows, self._max_rows, self._graph.hidden)
        check_step(slot, self._slots[slot].length, position, tokens, self._graph.context)
        state = self._room(slot, position, tokens)
        count = self._even(tokens)
        buffer = self._buffers["hidden"]
        np.copyto(buffer[:tokens], hidden)
        buffer[tokens:count] = hidden[-1]
        logits = self._prefill(state, position, tokens, rows, halved, exchange)
        state.length = position + tokens
        return logits

    def _room(self, slot: int, position: int, tokens: int) -> Slot:
        """A slot, with room for a step of so many tokens from `position` on."""
        state = self._slots[slot]
        if position + tokens > state.capacity:
            self._grow(slot, position + tokens)
        return state

    def _even(self, rows: int) -> int:
        """How many rows are run for so many."""
        return rows + rows % 2 if self._exact else rows

    def _bind_wave(self, slots: tuple[int, ...]) -> list[Bound]:
        """A decode step of these slots. Rows and sequences are bound once each, so that to join them is cheap."""
        if len(self._waves) >= WAVES_KEPT:
            self._waves.clear()
        decoder = self._decoder(len(slots))
        attentions = [self._next_attention(self._slots[slot], number) for number, slot in enumerate(slots)]
        wave = self._waves[slots] = [*decoder.rows.attending(attentions), *decoder.head]
        return wave

    def _decoder(self, sequences: int) -> Decoder:
        count = sequences * self._each
        if count > len(self._logits):
            self._logits = np.empty((count, self._graph.vocabulary), np.float32)
            self._decoders.clear()
            self._waves.clear()
        if sequences not in self._decoders:
            rows, wanted = self._bind_rows(slice(0, count)), np.arange(count)
            head = self._bind_head(rows.places, wanted, self._logits[:count])
            self._decoders[sequences] = Decoder(rows, head, wanted)
        return self._decoders[sequences]

    def _next_attention(self, state: Slot, number: int) -> Mapping[Part, Action]:
        """The attentions of a sequence's decoded token, where it is the one of this number in its step."""
        if number not in state.attentions:
            rows = slice(number * self._each, (number + 1) * self._each)
            state.attentions[number] = self._attention(state, state.position, rows, 1)
        return state.attentions[number]

    def _attention(self, state: Slot, position: Array, rows: slice, tokens: int) -> Mapping[Part, Action]:
        """Bind all attentions to `tokens` consecutive ones of a sequence, from `position` on.

        Args:
            rows: of the buffers; where they are more than the tokens, the last result is repeated.
        """
        placed = slice(rows.start, rows.start + tokens)
        places = {**state.constants, POSITION: position, **state.caches, **self._rows_of_buffers(placed)}
        actions = {part: part.then(places) for part in self._attentions if part.then}
        if placed == rows:
            return actions
        return {part: partial(_repeat, action, self._result(part)[rows], tokens) for part, action in actions.items()}

    def _result(self, part: Part) -> Array:
        """The buffer of what a kernel makes that follows a segment."""
        assert isinstance(part.segment.then, Kernel)
        return self._buffers[part.segment.then.results[0]]

    def _prefill(
        self, state: Slot, position: int, tokens: int, rows: Sequence[int], halved: bool, exchange: Exchange
    ) -> F32:
        """f32[R, V]{tp}: run a chunk, or its micro-chunks by turns, and the head where it is wanted."""
        count = self._even(tokens)
        wanted = np.zeros(self._even(len(rows)), np.int64)
        wanted[: len(rows)] = rows
        logits = np.empty((len(wanted), self._graph.vocabulary), np.float32)
        chunks = micro_chunks(count, halved)
        # Bindings hold addresses only: what they point to must outlive the run.
        standing = [np.array([position + chunk.start], np.int64) for chunk in chunks]
        bindings = [self._bind_rows(chunk) for chunk in chunks]
        layers = [
            rows.attending([self._attention(state, place, chunk, min(chunk.stop, tokens) - chunk.start)])
            for rows, chunk, place in zip(bindings, chunks, standing, strict=True)
        ]
        pending: Pending | None = None
        for turn in zip(*layers, strict=True):
            for bound in turn:
                self._run(bound)
                if pending is not None:
                    pending.finish()
                    pending = None
                if len(turn) > 1 and bound.partial is not None:
                    pending = self._collectives.all_reduce_start(bound.partial)
                else:
                    exchange(bound)
        if pending is not None:
            pending.finish()
        if len(rows):
            places = {**bindings[0].places, **self._rows_of_buffers(slice(0, count))}
            for bound in self._bind_head(places, wanted, logits):
                self._run(bound)
        return logits[: len(rows)]

    def _run(self, bound: Bound) -> None:
        compute(bound.actions)
        if bound.mixture is not None:
            bound.mixture.add()

    def _exchange(self, bound: Bound) -> None:
        if bound.partial is not None:
            self._collectives.all_reduce(bound.partial)
        elif bound.parts:
            self._collectives.all_gather(bound.parts[self._collectives.rank], bound.parts)

    def _test_rows(self) -> None:
        """Refuse kernels that give a row other bits when it is computed beside others; no peer is asked."""
        rank = self._collectives.rank
        count = min(EXACT_PROBE, self._max_rows, self._graph.context)
        hidden = np.random.default_rng(0).normal(size=(count, self._graph.hidden)).astype(np.float32)

        def outcome(chunk: int) -> list[F32]:
            """What this rank contributes and its logits, of all rows, computed `chunk` rows at a time."""
            steps: list[list[F32]] = []

            def keep(bound: Bound) -> None:
                for other, part in enumerate(bound.parts):
                    if other == rank:
                        steps[-1].append(part[:, : len(rows)].copy())
                    else:
                        part.fill(0)

            self.open_slot(-1)
            for start in range(0, count, chunk):
                rows = hidden[start : start + chunk]  # which `keep` reads too
                steps.append([])
                logits = self._step(-1, rows, start, range(len(rows)), False, keep)
                steps[-1].append(logits[None].copy())
            self.close_slot(-1)
            return [np.concatenate(pieces, axis=1) for pieces in zip(*steps, strict=True)]

        together = outcome(count)
        for chunk in (3, 1):
            if not all(map(np.array_equal, outcome(chunk), together)):
                raise EngineError(ROWS_DIFFER)

    def _grow(self, slot: int, needed: int) -> None:
        """Move a sequence's caches to larger buffers, a layer at a time: there may be no memory for all of them twice.
        If there is none for one, the layers before it have more room than they need."""
        state = self._slots[slot]
        state.attentions.clear()
        self._waves.clear()
        capacity = grown_capacity(state.capacity, needed, FIRST_CAPACITY, self._graph.context)
        for spec in self._graph.caches:
            names = [f"{kind}.{spec.layer}" for kind in ("key_cache", "value_cache")]
            grown = {name: np.zeros((1, spec.heads, capacity, spec.head_dim), np.float32) for name in names}
            if state.length:
                for name, larger in grown.items():
                    larger[:, :, : state.length] = state.caches[name][:, :, : state.length]
            state.caches.update(grown)
        state.capacity = capacity

    def _bind_rows(self, rows: slice) -> BoundRows:
        """Bind the layers to these rows of the shared buffers."""
        places = self._rows_of_buffers(rows)
        gathers = cycle(self._gathers)
        gathered = {  # before anything is bound: terms of one gathering are made by several parts
            part: self._lay_out(part.segment.then, next(gathers), rows.stop - rows.start, places)
            for part in self._layers
            if isinstance(part.segment.then, Gathering)
        }
        steps: list[tuple[Sequence[Action | Part], Bound]] = []
        actions: list[Action | Part] = []
        for part in self._layers:
            if part.run:
                actions.append(part.run(places))
            if part.attends:
                actions.append(part)
            elif part.then:
                actions.append(part.then(places))
            match part.segment.then:
                case Reduction(summed):
                    then = Bound(partial=places[summed])
                case Gathering():
                    then = Bound(parts=gathered[part])
                case Mixture() as mixture:
                    then = Bound(mixture=self._mixture(mixture, places))
                case _:
                    continue
            steps.append((actions, then))
            actions = []
        steps.append((actions, Bound()))
        return BoundRows(steps, places)

    def _mixture(self, mixture: Mixture, places: Mapping[str, Array]) -> BoundMixture:
        totals = [places[name] for name in mixture.totals]
        bases: list[F32 | float] = [places[name] for name in mixture.bases] or [0.0] * len(totals)
        return BoundMixture(
            x=places[mixture.x],
            weights=places[mixture.weights],
            chosen=places[mixture.chosen],
            totals=totals,
            begin=[(total, base) for total, base in zip(totals, bases, strict=True) if not _same_place(total, base)],
            compute=self._experts.get(mixture.totals) or as_terms(partial(self._elsewhere, mixture.layer)),
        )

    def _elsewhere(self, layer: int, x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
        if self._alone:
            return [np.zeros((len(own.rows), x.shape[1]), np.float32) for own in sent]
        results: Iterable[F32] = self._collectives.experts(layer)(x, sent)
        return results

    def _bind_head(self, places: Mapping[str, Array], rows: Array, logits: F32) -> list[Bound]:
        """Bind the head, if this rank has a part of it, for these of the rows whose values are in `places`."""
        thens = [part.segment.then for part in self._head if isinstance(part.segment.then, Kernel)]
        made = {name for part in self._head for name in part.segment.outputs}
        made.update(name for then in thens for name in then.results)
        own = {name: self._buffers[name][: len(rows)] for name in made if name in self._buffers}
        places = {**places, **own, ROWS: rows, "logits": logits}
        return [Bound([bind(places) for part in self._head for bind in (part.run, part.then) if bind])]

    def _rows_of_buffers(self, rows: slice) -> dict[str, Array]:
        return {name: buffer[rows] for name, buffer in self._buffers.items()}

    def _lay_out(self, gathering: Gathering, memory: F32, tokens: int, places: dict[str, Array]) -> list[F32]:
        """Give every gathered term a place f32[T, D] in `memory`, and add these to `places`.

        Returns:
            f32[count, T, D] for each rank: where its terms are.
        """
        shape = (len(gathering.gathered), tokens, self._workshop.width(gathering.gathered[0]))
        terms = memory[: prod(shape)].reshape(shape)
        parts = np.split(terms, np.cumsum(gathering.counts)[:-1])
        places.update(zip(gathering.gathered, terms, strict=True))
        places.update(zip(gathering.own, parts[self._collectives.rank], strict=True))
        return parts


def _repeat(attend: Action, results: Array, tokens: int) -> None:
    """Attend for some tokens, and repeat the last result in the rows after it."""
    attend()
    results[tokens:] = results[tokens - 1]


def _same_place(one: F32, other: F32 | float) -> bool:
    return isinstance(other, np.ndarray) and one.ctypes.data == other.ctypes.data
