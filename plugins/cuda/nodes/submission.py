"""One step that is being submitted: where its values are, how many rows a node computes, what sums go through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx
from onnx import numpy_helper

from motley.plugins.cuda.adapting import Adapting
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import View
from motley.plugins.cuda.recurrent_states import LinedUp, RecurrentStates
from motley.plugins.engine import Collectives


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    Attributes:
        places: the address of the `PLACE` of every row.
        sees: how many positions each of the rows sees, or more.
        spans: how many neighbouring rows are of one sequence each, or fewer.
        apart: whether each row is of another sequence.
        wanted: those that get logits.
        chunks: the micro-chunks that sums are cut in.
        turns: where each rotary table of a row begins among these, in elements, by name.
        lined_up: how recurrent layers take them.
        states: of recurrent layers.
    """

    places: int
    sees: Sequence[int]
    spans: Sequence[int]
    apart: bool
    wanted: Sequence[int]
    chunks: Sequence[slice]
    turns: Mapping[str, int]
    lined_up: LinedUp
    states: RecurrentStates


class Submission:
    """What the nodes of a step have in common. Those that follow ``rows`` compute the wanted rows alone."""

    def __init__(self, graph: DeviceGraph, summing: Collectives, step: StepRows, adapting: Adapting | None) -> None:
        """
        Args:
            summing: what sums go through.
            adapting: what adapters add to products; None: no row has one.
        """
        self._graph = graph
        self._summing = summing
        self._adapting = adapting
        self._step = step
        self._places = step.places
        self._rows = step.wanted
        self._tokens = len(step.sees)
        self._in_head = False

    @property
    def _count(self) -> int:
        """How many rows the node at hand computes: those of the step, or in the head those that get logits."""
        return len(self._rows) if self._in_head else self._tokens

    def _result(self, node: onnx.NodeProto, width: int) -> View:
        return self._buffer(node.output[0], width)

    def _buffer(self, name: str, width: int) -> View:
        """The place of a value of as many rows as the node at hand computes."""
        return self._graph.buffer(name, width, self._graph.head_rows if self._in_head else self._graph.max_rows)

    def _number(self, name: str) -> float:
        """A number of the graph itself."""
        return float(numpy_helper.to_array(self._graph.initializers[name]).item())

    def _integers_of(self, name: str) -> list[int]:
        """Whole numbers of the graph itself."""
        numbers: list[int] = numpy_helper.to_array(self._graph.initializers[name]).reshape(-1).tolist()
        return numbers

    def _operand(self, name: str) -> View:
        """The rows of a value; of what is the same for every row, a stride of 0."""
        weight = self._graph.initializers.get(name)
        if weight is None:
            return self._graph.values[name]
        return View(self._graph.address(name), prod(weight.dims), 0)
