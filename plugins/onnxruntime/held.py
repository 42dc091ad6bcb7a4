"""Attention to sequences of which another machine keeps some stretches, see `motley.plugins.block_holder`.

Its question leaves first; meanwhile this rank attends to what it has itself. If the rows of a step were told more than
there is room for, they go through each layer's attention a few at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from motley.plugins.block_holder import F32, Array, Asked, BlockHolder, HeldLayer
from motley.plugins.engine import EngineError, RankGraph
from motley.plugins.native.attention import I32, SIGHT, Attending, Away, SpanRows, Spans
from motley.plugins.native.rows import Action
from motley.plugins.native.summaries import summary_floats

ROOM = 1 << 22
"""Numbers that are told at a time, unless those of a single row are more: 16 MiB."""


class _Absent(NamedTuple):
    """A span of which some stretches are with the holder.

    Attributes:
        number: of the span in its round.
        stretches: i32[F], ascending.
        blocks: i32[F], of each the block there.
    """

    number: int
    span: SpanRows
    stretches: I32
    blocks: I32
    told: F32


class _Round(NamedTuple):
    """Spans whose attention is computed in one call."""

    spans: list[SpanRows]
    absent: list[_Absent]


class HeldAttention:
    """The attention of all layers of a rank, some of whose blocks a holder keeps.

    Args:
        holder: has been begun with these layers.
        first: the number of the first block that the holder keeps; those that follow are its next ones.
        layers: of the rank, in the order of its graph.
        rows: that a step may have.
        context: the longest sequence, in tokens.
    """

    def __init__(self, holder: BlockHolder, first: int, layers: Sequence[HeldLayer], rows: int, context: int) -> None:
        self._holder = holder
        self._first = first
        self._layers = layers
        self._each = max(summary_floats(layer.heads, layer.size) for layer in layers)
        self._told = np.zeros(max(ROOM, context // SIGHT * self._each), np.float32)
        self._queries = np.zeros(rows * max(layer.heads * layer.size for layer in layers), np.float32)
        self._rounds: dict[Spans, list[_Round]] = {}
        self._error: BaseException | None = None

    def set(self, spans: Spans, rows: Sequence[SpanRows]) -> None:
        """Take the spans of the next step, see `Spans.set`; the first of them that are computed together are set."""
        rounds = self._rounds[spans] = self._cut(rows)
        spans.set(rounds[0].spans)

    def bind(self, attending: Attending, spans: Spans, number: int) -> Action:
        """Bind the attention of the layer with this number.

        Args:
            attending: bound to `spans`, and awaits `await_told`.
        """
        layer, holder = self._layers[number], self._holder

        def attend() -> None:
            rounds = self._rounds[spans]
            for each in rounds:
                if len(rounds) > 1:
                    spans.set(each.spans)
                if each.absent:
                    holder.ask(number, self._questions(layer, attending, each.absent))
                attending()
                if self._error is not None:
                    raise self._error

        return attend

    def await_told(self) -> None:
        """Wait for what was asked; an error is raised by the attention that has called this."""
        try:
            self._holder.take()
        except BaseException as error:  # a kernel has called this
            self._error = error

    def _cut(self, rows: Sequence[SpanRows]) -> list[_Round]:
        """Cut spans where more would be told of them than there is room for."""
        rounds = [_Round([], [])]
        used = 0
        for whole in rows:
            numbers = whole.blocks[: whole.position // SIGHT]
            stretches = np.flatnonzero(numbers >= self._first).astype(np.int32)
            if not len(stretches):
                rounds[-1].spans.append(whole)
                continue
            blocks, a_row = numbers[stretches] - self._first, len(stretches) * self._each
            done = 0
            while done < whole.rows:
                if used and used + a_row > len(self._told):
                    rounds.append(_Round([], []))
                    used = 0
                count = min(whole.rows - done, max(1, (len(self._told) - used) // a_row))
                told = self._told[used : used + count * a_row]
                span = whole._replace(
                    row=whole.row + done, rows=count, position=whole.position + done, away=Away(stretches, told)
                )
                rounds[-1].absent.append(_Absent(len(rounds[-1].spans), span, stretches, blocks, told))
                rounds[-1].spans.append(span)
                used, done = used + count * a_row, done + count
        return rounds

    def _questions(self, layer: HeldLayer, attending: Attending, absent: Sequence[_Absent]) -> list[Asked]:
        """What the holder is asked for in a layer: nothing of stretches before the window of all rows."""
        asked = []
        at = 0
        for number, span, stretches, blocks, told in absent:
            first = layer.first_seen(span.position) // SIGHT
            unseen = int(np.searchsorted(stretches, first))
            if unseen == len(stretches):
                continue
            shape = span.rows, layer.heads, layer.size
            size = span.rows * layer.heads * layer.size
            queries = self._queries[at : at + size].reshape(shape)
            attending.queries(number, queries)
            every = told[: len(stretches) * span.rows * summary_floats(layer.heads, layer.size)]
            places = every.reshape(len(stretches), span.rows, layer.heads, layer.size + 2)
            asked.append(Asked(span.position, stretches[unseen:], blocks[unseen:], queries, places[unseen:]))
            at += size
        return asked


def check_holder(graph: RankGraph) -> None:
    """Make sure that a holder, if there is one, can keep blocks of all layers.

    Raises:
        EngineError: it cannot.
    """
    if graph.holder is None:
        return
    if any(spec.keys_alone and not spec.index for spec in graph.caches):
        raise EngineError(
            "engine 'onnxruntime' cannot have blocks of latent caches on another node: what is told of a block is as"
            " much as the block; ask for none there"
        )
    if any(spec.index for spec in graph.caches):
        raise EngineError(
            "engine 'onnxruntime' cannot have blocks on another node of a model whose rows see the positions that are"
            " chosen for them; ask for none there, or for a context of no more"
        )


def begin_holder(graph: RankGraph, layers: Sequence[HeldLayer], rows: int) -> HeldAttention | None:
    """Have another machine make room for the blocks of layers that it is to keep; None: there is none.

    Args:
        layers: those whose blocks can be far, in the order of the graph.
        rows: that a step may have.

    Raises:
        motley.transport.TransportError: it cannot be reached, or has no room.
    """
    if graph.holder is None:
        return None
    graph.holder.begin(layers, graph.blocks.format)
    return HeldAttention(graph.holder, graph.blocks.first_held, layers, rows, graph.context)


def move_block(arrays: Mapping[str, Array], number: int, graph: RankGraph) -> None:
    """Copy a block to a far one.

    Args:
        arrays: what it holds, as `motley.plugins.engine.CacheBlocks.arrays` has it.
        number: of the far one.

    Raises:
        OSError: it cannot be written, or its holder is lost.
    """
    there_are, far, holder = graph.blocks, graph.far, graph.holder
    if number < there_are.first_held:
        assert far is not None
        for name, values in arrays.items():
            far.write(name, number - there_are.count, values)
        return
    assert holder is not None
    holder.keep(number - there_are.first_held, [*arrays.values()])
    if holder.lost:
        raise OSError(f"the node that keeps blocks is lost: {holder.lost}")
