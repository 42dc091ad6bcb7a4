"""The CPU engine: our own kernels compute quantised products, attention and what is between, ONNX Runtime all else.

A step is a chain of actions on buffers whose addresses are bound once for each number of rows: a session's
``run_with_iobinding`` takes about 3 us besides its work, a product of ours about 1. Every value that crosses a segment
lives in a buffer of this engine, so the collectives work on it in place, and between two of them nothing is allocated.

Rows of several sequences are one step: weights are read, and sums exchanged, once for all. Attention looks up whose
rows they are, and in which blocks the sequences' keys and values lie.

Two micro-chunks of a step take turns: one computes a segment while the sum of the other is under way.

In exact mode the runtime is never given an odd number of rows, because its kernels take rows by twos and round a lone
one otherwise: the last row is run twice.

What an action computes is told in files beside this one. This one binds them to buffers and runs them, which share so
much state that a cut would show all of it to both halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import cycle
from math import ceil, prod

import numpy as np

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.adapters import AdapterSlots, slots_of_rows
from motley.plugins.engine import (
    CACHE_FORMATS,
    F32,
    Collectives,
    EngineError,
    EngineOptions,
    Pending,
    RankGraph,
    Span,
    micro_chunks,
)
from motley.plugins.latest import Latest
from motley.plugins.mapped_share import Array
from motley.plugins.mixture import Sent, as_terms
from motley.plugins.native.adapted import StepRows
from motley.plugins.native.attention import Attending, SpanRows, Spans
from motley.plugins.native.recurrent import RecurrentRows, RecurrentSpans
from motley.plugins.native.rows import Action
from motley.plugins.nodes import all_seen, only_for_choices
from motley.plugins.onnxruntime.bound import Bound, BoundHead, BoundRows
from motley.plugins.onnxruntime.exact import PROBE, check_company
from motley.plugins.onnxruntime.experts import BoundMixture, LocalExperts
from motley.plugins.onnxruntime.held import begin_holder, check_holder, move_block
from motley.plugins.onnxruntime.kernels import FAR, Attend, allocated_blocks
from motley.plugins.onnxruntime.lowering import lower
from motley.plugins.onnxruntime.packing import clear_slot, fill_slot, pack_adapter
from motley.plugins.onnxruntime.recurrences import allocated_slots
from motley.plugins.onnxruntime.sessions import Part, Store, Threads, Workshop, compute, multiplies
from motley.plugins.segments import ROWS, Gathering, Kernel, Mixture, Reduction, cut_into_segments
from motley.plugins.spans import check_step, spans_of, wanted_rows

BOUND_KEPT = 32
"""Numbers of rows whose steps stay bound; the one that was not used for longest goes first."""

GATHERINGS = 3
"""That a layer has at most: of attention, an MLP and experts. What it gathers may be read as late as at its end."""

TABLES_KEPT = 8
"""Rotary tables of so many lengths of long prompts are kept."""

Exchange = Callable[[Bound], None]
"""What is done after a segment has run."""


class OnnxRuntimeEngine:
    """See `motley.plugins.engine.Engine`."""

    cache_formats = CACHE_FORMATS
    reads_far_blocks = True
    asks_block_holders = True
    keeps_windows = True
    keeps_prefixes = True
    takes_adapters = True
    embeds = True

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        options.check_extra("onnxruntime")
        graph.blocks.check_able("onnxruntime", self.cache_formats, self.reads_far_blocks, self.keeps_windows)
        check_holder(graph)
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._exact = options.exact
        self._bound = Latest[tuple[int, int], BoundRows](BOUND_KEPT)
        """The layers, by the first of their rows and the one after the last."""
        self._heads = Latest[tuple[int, int], BoundHead](BOUND_KEPT)
        """By the rows of a step and how many of them get logits."""

        lowered = lower(graph.proto)
        outputs = [output.name for output in graph.proto.graph.output]
        segments = cut_into_segments(lowered.nodes, lowered.initializers, outputs)
        most_rows = options.max_rows + options.max_rows % 2
        self._blocks = allocated_blocks(graph)
        movable = graph.blocks.movable(graph.caches)
        self._movable = {name: self._blocks[name] for name in graph.blocks.arrays(movable)}
        """Those that can be copied to far ones."""
        self._far_blocks = {f"{FAR}{name}": graph.far.read(name) for name in self._movable} if graph.far else {}
        self._for_choices = only_for_choices(lowered.nodes, outputs)
        self._all_seen = all_seen(lowered.nodes, graph.context)
        """Rows that see no more positions see all of them."""
        self._choosing = True
        """Whether a row of this step sees more."""
        self._threads = Threads(options.threads, multiplies(segments, lowered.initializers))
        self._workshop = Workshop(graph, lowered.initializers, self._threads)
        parts = self._workshop.make(segments)
        self._layers = [part for part in parts if not part.segment.head]
        self._head = [part for part in parts if part.segment.head]
        self._ropes = list(dict.fromkeys(part.attend.rope for part in parts if part.attend))
        self._turning = lru_cache(TABLES_KEPT)(self._tables)
        # Rows go through the graph all together, or in two halves.
        self._spans = [Spans(most_rows, len(self._ropes)) for _ in range(2)]
        self._windowed = [Spans(most_rows, len(self._ropes)) for _ in range(2)] if graph.blocks.windowed else []
        """The same with the blocks of layers that have their own."""
        self._slots = AdapterSlots("onnxruntime", graph, experts=True)
        self._adapted = [StepRows(most_rows) for _ in range(2)]
        self._adapted_head = StepRows(most_rows)
        self._slots_of_rows = [np.zeros(most_rows, np.int32) for _ in range(2)]
        """Of the adapters of the rows of each half."""
        self._recurring = [RecurrentSpans(most_rows) for _ in range(2)] if graph.states else []
        """The same as recurrent layers read them."""
        self._states = {spec.layer: allocated_slots(spec, graph.blocks.states) for spec in graph.states}
        self._caches = [spec.names[0] for spec in movable]
        layers = {part.attend.keys: part.attend.layer for part in parts if part.attend}
        self._held = begin_holder(graph, [layers[name] for name in self._caches], most_rows)
        self._buffers = self._workshop.buffers(segments, Store(most_rows))
        self._logits = np.empty((most_rows, graph.vocabulary), np.float32)
        mixtures = [each.then for each in segments if isinstance(each.then, Mixture) and each.then.experts]
        width = self._workshop.width(mixtures[0].x) if mixtures else 0  # the same in all layers
        rows, between = np.zeros((most_rows, width), np.float32), Store(most_rows)
        adapted, weights = StepRows(most_rows), lowered.initializers
        self._experts = {
            then.totals: LocalExperts(then.experts, self._workshop, weights, rows, between, adapted)
            for then in mixtures
        }
        self._adapts = [part.adapt for part in parts if part.adapt]
        self._adapts += [adapt for experts in self._experts.values() for adapt in experts.adapts]
        gatherings = (each.then for each in segments if isinstance(each.then, Gathering))
        most = max((len(each.gathered) * self._workshop.width(each.gathered[0]) for each in gatherings), default=0)
        self._gathers = [np.zeros(most * most_rows, np.float32) for _ in range(GATHERINGS)]
        self._alone = options.exact
        """Nobody else is to be asked."""
        if options.exact:
            self._test_rows()
            self._alone = False

    @property
    def cached(self) -> Mapping[str, Array]:
        """See `motley.plugins.engine.blocks_in_memory`."""
        return self._blocks

    @property
    def most_spans(self) -> int:
        return self._max_rows

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        return self._step(hidden, spans, halved, self._exchange)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for states in self._states.values():
            for source, target in pairs:
                states.copy(source, target)

    def prepare_adapter(
        self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None = None
    ) -> PreparedAdapter:
        own, in_place = self._slots.fitting(products), self._slots.fitting_whole(whole)
        return pack_adapter(own, in_place, [each.parts for each in self._adapts])

    def load_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        self._slots.check(slot)
        fill_slot(self._adapts, slot, adapter)
        self._slots.taken.add(slot)

    def unload_adapter(self, slot: int) -> None:
        self._slots.check(slot)
        self._slots.taken.discard(slot)
        clear_slot(self._adapts, slot)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        for block, number in pairs:
            move_block({name: blocks[block] for name, blocks in self._movable.items()}, number, self._graph)

    def close(self) -> None:
        self._bound.clear()
        self._heads.clear()
        self._layers.clear()
        self._head.clear()
        self._adapts.clear()
        self._experts.clear()
        self._workshop.close()  # not before the sessions
        self._threads.close()
        self._buffers.clear()
        self._gathers.clear()
        self._blocks.clear()
        self._movable.clear()
        self._far_blocks.clear()
        self._states.clear()

    def _step(self, hidden: F32, spans: Sequence[Span], halved: bool, exchange: Exchange) -> F32:
        """Carry out `step`, but call `exchange` after each segment, where `step` calls the transport."""
        if halved and self._exact:
            raise EngineError("engine 'onnxruntime' takes no step in halves with exact=true")
        check_step(self._graph, hidden, spans, self._max_rows, self.most_spans)
        rows = len(hidden)
        count = self._even(rows)
        self._choosing = any(span.position + span.rows > self._all_seen for span in spans)
        if self._recurring:  # of the rows that there are: a state takes each of them once
            for number, chunk in enumerate(micro_chunks(rows, halved)):
                self._recurring[number].set(
                    [
                        RecurrentRows(row, own.rows, own.position, own.slot, own.guesses)
                        for row, own in spans_of(spans, chunk)
                    ]
                )
        buffer = self._buffers["hidden"]
        np.copyto(buffer[:rows], hidden)
        if count > rows:  # the last row once more
            buffer[rows:count] = hidden[-1]
            last = spans[-1]
            spans = [*spans, last._replace(position=last.position + last.rows - 1, rows=1, wanted=0)]
        chunks = micro_chunks(count, halved)
        adapted = [self._slots.rows([span for _, span in spans_of(spans, chunk)]) for chunk in chunks]
        for number, chunk in enumerate(chunks):
            parts = spans_of(spans, chunk)
            self._adapted[number].set(adapted[number])
            if self._graph.adapters:
                self._slots_of_rows[number][:] = slots_of_rows(adapted[number], len(self._slots_of_rows[number]))
            rows_of = [self._rows_of(span, row) for row, span in parts]
            if self._held is None:
                self._spans[number].set(rows_of)
            else:
                self._held.set(self._spans[number], rows_of)
            if self._windowed:
                self._windowed[number].set(
                    [
                        own._replace(blocks=span.windowed)
                        for own, (_, span) in zip(rows_of, parts, strict=True)
                        if span.windowed is not None
                    ]
                )
        bound = [
            self._bound.get((chunk.start, chunk.stop), partial(self._bind_rows, chunk, number))
            for number, chunk in enumerate(chunks)
        ]
        steps = [own.adapted if rows else own.steps for own, rows in zip(bound, adapted, strict=True)]
        if len(steps) == 1:
            for each in steps[0]:
                self._run(each)
                exchange(each)
        else:
            self._run_by_turns(steps, exchange)
        wanted = wanted_rows(spans)
        if not wanted:
            return np.empty((0, self._graph.vocabulary), np.float32)
        heads, places = (count, self._even(len(wanted))), bound[0].places
        head = self._heads.get(heads, lambda: self._bind_head(*heads, places))
        head.wanted[: len(wanted)] = wanted
        head.wanted[len(wanted) :] = wanted[-1]
        in_head = self._slots.rows(spans, head=True)
        self._adapted_head.set(in_head)
        compute(head.adapted if in_head else head.actions)
        return head.logits[: len(wanted)]

    def _run_by_turns(self, halves: Sequence[Sequence[Bound]], exchange: Exchange) -> None:
        """Run a segment of each half in turn; while one computes, the sum of the other is under way.

        Experts of this rank are computed meanwhile, too. To ask others for some is one more thing that all ranks do
        together, and waits for the sums.
        """
        sums: list[tuple[int, Pending]] = []
        """Under way, each with its half; the first one first."""
        for turn in zip(*halves, strict=True):
            for half, bound in enumerate(turn):
                while any(own == half for own, _ in sums):
                    sums.pop(0)[1].finish()
                for action in bound.actions:
                    compute((action,))
                    for _, pending in sums:
                        pending.advance()
                mixture = bound.mixture
                if mixture is not None:
                    while mixture.asks and sums:
                        sums.pop(0)[1].finish()
                    mixture.add()
                if bound.partial is not None:
                    sums.append((half, self._collectives.all_reduce_start(bound.partial)))
                elif bound.parts:
                    while sums:
                        sums.pop(0)[1].finish()
                    exchange(bound)
        for _, pending in sums:
            pending.finish()

    def _rows_of(self, span: Span, row: int) -> SpanRows:
        """A span as attention reads it, which begins at a row of a chunk."""
        turning = self._turning(self._graph.same_tables(span.prompt))
        return SpanRows(row, span.rows, span.position, span.blocks, turning)

    def _tables(self, prompt: int) -> list[tuple[F32, F32]]:
        """The cosines and sines of each rotary embedding, for prompts of a length."""
        tables = self._graph.constants(prompt)
        return [(tables[cosines], tables[sines]) for cosines, sines in self._ropes]

    def _even(self, rows: int) -> int:
        """How many rows are run for so many."""
        return rows + rows % 2 if self._exact else rows

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
        blocks = self._graph.blocks
        fewest = min(blocks.count, blocks.windowed or blocks.count)
        count = min(PROBE, self._max_rows, self._graph.context, fewest * blocks.tokens)
        table = np.arange(ceil(count / blocks.tokens), dtype=np.int32)
        hidden = np.random.default_rng(0).normal(size=(count, self._graph.entering)).astype(np.float32)

        def outcome(chunk: int) -> list[F32]:
            """What this rank contributes and its logits, of all rows, computed `chunk` rows at a time."""
            steps: list[list[F32]] = []

            def keep(bound: Bound) -> None:
                for other, part in enumerate(bound.parts):
                    if other == rank:
                        steps[-1].append(part[:, : len(rows)].copy())
                    else:
                        part.fill(0)

            for start in range(0, count, chunk):
                rows = hidden[start : start + chunk]  # which `keep` reads too
                steps.append([])
                span = Span(table, start, len(rows), wanted=len(rows), windowed=table)
                steps[-1].append(self._step(rows, [span], False, keep)[None].copy())
            for own in self._blocks.values():
                own[table] = 0
            return [np.concatenate(pieces, axis=1) for pieces in zip(*steps, strict=True)]

        check_company(outcome)

    def _bind_rows(self, rows: slice, number: int) -> BoundRows:
        """The layers bound to rows of the shared buffers, which are of the chunk with this number."""
        places = self._rows_of_buffers(rows)
        gathers = cycle(self._gathers)
        gathered = {  # before anything is bound: terms of one gathering are made by several parts
            part: self._lay_out(part.segment.then, next(gathers), rows.stop - rows.start, places)
            for part in self._layers
            if isinstance(part.segment.then, Gathering)
        }
        # What adapters add to a product is added where that lies.
        places |= {part.adapt.product: places[part.adapt.y] for part in self._layers if part.adapt}
        places |= self._blocks | self._far_blocks
        steps: list[Bound] = []
        adapted: list[Bound] = []
        actions: list[Action] = []
        adding: list[Action] = []
        """The same with what adapters add."""
        for part in self._layers:
            made = [part.run(places)] if part.run else []
            if part.attend:
                made.append(self._attention(part.attend, places, number))
            if part.recur:
                made.append(part.recur.bind(places, self._recurring[number], self._states[part.recur.layer]))
            if part.then:
                made.append(part.then(places))
            actions += self._spared(part, made)
            adding += made
            if part.adapt:
                part.adapt.append(adding, places, self._adapted[number])
            match part.segment.then:
                case Reduction(summed):
                    then = Bound(actions, partial=places[summed])
                case Gathering():
                    then = Bound(actions, parts=gathered[part])
                case Mixture() as mixture:
                    then = Bound(actions, mixture=self._mixture(mixture, places, number))
                case _:
                    continue
            together = then.mixture.together() if then.mixture else None
            steps.append(Bound([*actions, together]) if together else then)
            adapted.append(replace(then, actions=adding))
            actions, adding = [], []
        steps.append(Bound(actions))
        adapted.append(Bound(adding))
        return BoundRows(steps, adapted, places)

    def _spared(self, part: Part, made: Sequence[Action]) -> list[Action]:
        """The actions of a part; those that make nothing but what positions are chosen by are for steps that choose."""

        def where_choosing(action: Action) -> None:
            if self._choosing:
                action()

        then = part.segment.then
        results = [part.segment.outputs] if part.run else []
        results += [then.results] if isinstance(then, Kernel) else []
        return [
            partial(where_choosing, action) if self._for_choices.issuperset(own) else action
            for action, own in zip(made, results, strict=False)
        ]

    def _attention(self, attend: Attend, places: Mapping[str, Array], number: int) -> Action:
        """A layer's attention, bound to the spans of the chunk with this number."""
        rope, spans = self._ropes.index(attend.rope), self._spans[number]
        if attend.keys not in self._movable:
            return attend.bind(places, self._windowed[number], rope, None)
        if self._held is None:
            return attend.bind(places, spans, rope, None)
        bound = attend.bind(places, spans, rope, self._held.await_told)
        assert isinstance(bound, Attending), "where another machine keeps blocks, all are seen"
        return self._held.bind(bound, spans, self._caches.index(attend.keys))

    def _mixture(self, mixture: Mixture, places: Mapping[str, Array], number: int) -> BoundMixture:
        here = self._experts.get(mixture.totals)
        totals = [places[name] for name in mixture.totals]
        bases: list[F32 | float] = [places[name] for name in mixture.bases] or [0.0] * len(totals)
        return BoundMixture(
            x=places[mixture.x],
            weights=places[mixture.weights],
            chosen=places[mixture.chosen],
            totals=totals,
            begin=[(total, base) for total, base in zip(totals, bases, strict=True) if not _same_place(total, base)],
            compute=here or as_terms(partial(self._elsewhere, mixture.layer)),
            asks=here is None,
            slots=self._slots_of_rows[number],
        )

    def _elsewhere(self, layer: int, x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
        if self._alone:
            return [np.zeros((len(own.rows), x.shape[1]), np.float32) for own in sent]
        results: Iterable[F32] = self._collectives.experts(layer)(x, sent)
        return results

    def _bind_head(self, rows: int, count: int, places: Mapping[str, Array]) -> BoundHead:
        """The head, if this rank has a part of it, bound to `count` of a step's rows.

        Args:
            places: where the values of the step's first rows are.
        """
        thens = [part.segment.then for part in self._head if isinstance(part.segment.then, Kernel)]
        computed = {name for part in self._head for name in part.segment.outputs}
        computed.update(name for then in thens for name in then.results)
        own = {name: self._buffers[name][:count] for name in computed if name in self._buffers}
        wanted, logits = np.zeros(count, np.int64), self._logits[:count]
        places = {**places, **self._rows_of_buffers(slice(0, rows)), **own, ROWS: wanted, "logits": logits}
        places |= {part.adapt.product: places[part.adapt.y] for part in self._head if part.adapt}
        actions: list[Action] = []
        adding: list[Action] = []
        for part in self._head:
            made = [bind(places) for bind in (part.run, part.then) if bind]
            actions += made
            adding += made
            if part.adapt:
                part.adapt.append(adding, places, self._adapted_head)
        return BoundHead(actions, adding, wanted, logits)

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


def _same_place(one: F32, other: F32 | float) -> bool:
    return isinstance(other, np.ndarray) and one.ctypes.data == other.ctypes.data
