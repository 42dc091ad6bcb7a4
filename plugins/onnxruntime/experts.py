"""The experts of a layer that the rank's own graph holds: a step runs those that its rows have chosen.

Where experts are two products with codes and a gate between them, as most quantised ones are, one call of a kernel
computes all that few rows without adapters have chosen (`motley.plugins.native.mixture`): to go on from one small
expert to the next takes Python as long as a fifth of reading it. Others are computed one by one. They are bound once to
the same buffers for each small number of rows, as decoded tokens come in. One that is not chosen costs nothing but
memory.

How many rows an expert gets depends on where a prompt's chunk was cut, and on who else is being answered. The runtime's
kernels take rows by twos and may round a last odd one otherwise; so an expert that is computed by those is given an
even number, the last one twice if need be, but for a token alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from motley.plugins.adapters import rows_by_slot
from motley.plugins.engine import F32
from motley.plugins.mixture import I64, Sent, Slots, Terms, add_mixture, deal
from motley.plugins.native.adapted import StepRows
from motley.plugins.native.mixture import GatedExpert, GatedExperts
from motley.plugins.native.rows import Action
from motley.plugins.onnxruntime.kernels import Gate, QuantisedProduct
from motley.plugins.onnxruntime.sessions import Store, Workshop, compute
from motley.plugins.segments import cut_into_segments

MOST_BOUND = 16
"""Rows of an expert that stay bound: as many as there are sequences in a step."""

MOST_TOGETHER = 32
"""Rows of a step whose experts one call computes. More would want large buffers, and leave little to gain."""


@dataclass(frozen=True)
class BoundMixture:
    """The weighted sums of a step's experts, on buffers.

    Attributes:
        totals: f32[T, D] each.
        begin: totals that must first be set, each with what it is set to: zero, or what the sum is added to.
        compute: what computes the experts.
        asks: whether it asks other machines to.
        slots: i32[T], of the adapters of the rows.
    """

    x: F32
    weights: F32
    chosen: I64
    totals: Sequence[F32]
    begin: Sequence[tuple[F32, F32 | float]]
    compute: Terms
    asks: bool
    slots: Slots

    def together(self) -> Action | None:
        """One call that does the same for rows that have no adapters; None: there is none for these."""
        if not isinstance(self.compute, LocalExperts) or not self.compute.as_one or len(self.x) > MOST_TOGETHER:
            return None
        (total,) = self.totals
        base = self.begin[0][1] if self.begin else total
        added = base if isinstance(base, np.ndarray) else None
        return self.compute.as_one.bind(self.x, self.chosen, self.weights, added, total)

    def add(self) -> None:
        for total, value in self.begin:
            np.copyto(total, value)
        add_mixture(self.totals, self.x, self.weights, deal(self.chosen, self.slots, self.weights), self.compute)


class LocalExperts:
    """All experts of a layer, on this machine: `motley.plugins.mixture.Terms`."""

    def __init__(
        self,
        experts: Sequence[onnx.GraphProto],
        workshop: Workshop,
        weights: Collection[str],
        rows: F32,
        store: Store,
        adapted: StepRows,
    ) -> None:
        """
        Args:
            weights: the names of all initializers.
            rows: f32[max_rows, D], where each expert in its turn finds its rows of x.
            store: where each expert in its turn leaves its results.
            adapted: the rows of an expert that adapters compute.
        """
        self._rows = rows
        self._adapted = adapted
        self._experts = [_LocalExpert(expert, workshop, weights, store, adapted) for expert in experts]
        self.adapts = [adapt for expert in self._experts for adapt in expert.adapts]
        """What adapters add to the products of the experts."""
        self.as_one = _as_one([expert.gated for expert in self._experts])

    def __call__(self, x: F32, sent: Sequence[Sent]) -> Iterator[list[F32]]:
        if len(x) == 1:
            yield from self._of_one_row(x, sent)
            return
        for own in sent:
            self._adapted.set(rows_by_slot(own.slots))
            expert, count = self._experts[own.expert], len(own.rows)
            np.take(x, own.rows, axis=0, out=self._rows[:count])
            run = expert.run_for(count)
            self._rows[count:run] = self._rows[count - 1]
            yield [result[:count] for result in expert(self._rows[:run])]

    def _of_one_row(self, x: F32, sent: Sequence[Sent]) -> Iterator[list[F32]]:
        """A token alone, as decoding has it: all its experts read the same row, and it has the adapter that it has."""
        rows = self._rows[:1]
        np.copyto(rows, x)
        self._adapted.set(rows_by_slot(sent[0].slots) if sent else {})
        for own in sent:
            yield self._experts[own.expert](rows)


def _as_one(experts: Sequence[GatedExpert | None]) -> GatedExperts | None:
    """All experts of a layer as one; None: they are not all usual, or not alike."""
    usual = [expert for expert in experts if expert]
    try:
        return GatedExperts(usual) if len(usual) == len(experts) else None
    except ValueError:  # a checkpoint may hold some of them in other formats
        return None


class _LocalExpert:
    """One expert: f32[N, D] -> f32[N, D], or several of these."""

    def __init__(
        self, graph: onnx.GraphProto, workshop: Workshop, weights: Collection[str], store: Store, adapted: StepRows
    ) -> None:
        self._chain = Chain(graph, graph.node, workshop, weights)
        self._store = store
        self._adapted = adapted
        self.adapts = self._chain.adapts
        self.gated = self._chain.gated
        self._bound: dict[int, tuple[list[Action], list[F32]]] = {}
        """By the number of rows."""

    def run_for(self, count: int) -> int:
        """How many rows are run for so many."""
        return self._chain.run_for(count)

    def __call__(self, x: F32) -> list[F32]:
        """The expert's results for rows x, which are always in the same memory; valid until another expert computes."""
        bound = self._bound.get(len(x)) or self._chain.bind(x, self._store, self._adapted)
        if len(x) <= MOST_BOUND:
            self._bound[len(x)] = bound
        actions, results = bound
        compute(actions)
        return results


class Chain:
    """An expert, cut into segments that are ready to be bound."""

    def __init__(
        self, graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto], workshop: Workshop, weights: Collection[str]
    ) -> None:
        """`nodes`: those of the graph, lowered; `weights`: the names of all initializers."""
        self._x, self._results = graph.input[0].name, [output.name for output in graph.output]
        self._workshop = workshop
        workshop.know([*graph.input, *graph.output])
        self._segments = cut_into_segments(nodes, weights, self._results)
        self._parts = workshop.make(self._segments)
        self.adapts = [part.adapt for part in self._parts if part.adapt]

    @property
    def gated(self) -> GatedExpert | None:
        """The expert without what adapters add, if it is a usual quantised one."""
        match [(part.run, part.then) for part in self._parts if part.run or not part.adapt]:
            case [(None, QuantisedProduct(first)), (None, Gate(up="") as gate), (None, QuantisedProduct(last))]:
                return GatedExpert(first, gate.activation, last, gate.limits)
        return None

    def run_for(self, count: int) -> int:
        """How many rows are run for so many: the runtime's kernels want even numbers."""
        return count + count % 2 if any(part.run for part in self._parts) else count

    def bind(self, x: F32, store: Store, adapted: StepRows | None = None) -> tuple[list[Action], list[F32]]:
        """Bind the expert to its rows.

        Args:
            x: f32[N, D].
            store: has room for N rows or more.
            adapted: the rows that adapters compute, where the graph has slots.

        Returns:
            What computes the results, and where these are: f32[N, D] each.
        """
        buffers = self._workshop.buffers(self._segments, store)
        places = {name: buffer[: len(x)] for name, buffer in buffers.items()} | {self._x: x}
        places |= {each.product: places[each.y] for each in self.adapts}
        actions: list[Action] = []
        for part in self._parts:
            actions += [bind(places) for bind in (part.run, part.then) if bind]
            if part.adapt and adapted:
                part.adapt.append(actions, places, adapted)
        return actions, [places[name] for name in self._results]
