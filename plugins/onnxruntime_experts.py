"""The experts of a layer in ONNX Runtime: a session each, of which a step runs those that its rows have chosen.

A decoded token runs K small sessions per layer, bound once to the same two buffers; beside reading their weights that
costs some 10 us each. An expert that is not chosen costs nothing but memory.

In a prompt, how many rows an expert gets depends on where the chunk was cut. Kernels take rows by twos and may round a
last odd one otherwise, so an expert is given an even number there, the last one twice if need be: the text does not
depend on the size of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from motley.plugins.engine import F32
from motley.plugins.experts import I64, Compute, Sent, add_mixture

Run = Callable[[ort.InferenceSession, Any], None]
"""Runs a session on a binding."""


@dataclass(frozen=True)
class BoundMixture:
    """The weighted sum of a step's experts, on buffers.

    Attributes:
        total: f32[T, D]; it holds what the sum is added to if `on_base`.
    """

    x: F32
    weights: F32
    chosen: I64
    total: F32
    on_base: bool
    compute: Compute

    def add(self) -> None:
        if not self.on_base:
            self.total.fill(0)
        add_mixture(self.total, self.x, self.weights, self.chosen, self.compute)


class LocalExperts:
    """All experts of a layer, on this machine: `motley.plugins.experts.Compute`."""

    def __init__(self, sessions: Sequence[ort.InferenceSession], rows: F32, results: F32, run: Run) -> None:
        """`rows` and `results`: f32[max_rows + 1, D] that experts take and leave their rows in, one after another."""
        self._sessions = sessions
        self._rows = rows
        self._results = results
        self._run = run
        self._single: list[Any] = [None] * len(sessions)

    def __call__(self, x: F32, sent: Sequence[Sent]) -> Iterator[F32]:
        for own in sent:
            count = len(own.rows)
            np.take(x, own.rows, axis=0, out=self._rows[:count])
            even = count if len(x) == 1 else count + count % 2
            self._rows[count:even] = self._rows[count - 1]
            self._run(self._sessions[own.expert], self._bound(own.expert, even))
            yield self._results[:count]

    def _bound(self, expert: int, count: int) -> Any:
        if count > 1:
            return self._bind(expert, count)
        if self._single[expert] is None:
            self._single[expert] = self._bind(expert, 1)
        return self._single[expert]

    def _bind(self, expert: int, count: int) -> Any:
        session = self._sessions[expert]
        binding = session.io_binding()
        x, y = self._rows[:count], self._results[:count]
        binding.bind_input(session.get_inputs()[0].name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
        binding.bind_output(session.get_outputs()[0].name, "cpu", 0, np.float32, y.shape, y.ctypes.data)
        return binding
