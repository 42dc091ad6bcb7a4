"""Which positions rows see, in a step: what scores them, and what chooses."""

from __future__ import annotations

import ctypes

import onnx

from motley.plugins.cuda.kernels import PLACE, WARP, View, integers, pointer, rows_of
from motley.plugins.cuda.nodes.attention import Turning, places_of
from motley.plugins.cuda.nodes.submission import Submission
from motley.plugins.engine import SCALES
from motley.plugins.nodes import attributes_of, heads_choose, weighs_heads

SCORED = 32
"""Positions of a block of threads that scores, as in the source."""
SCORES_BYTES = 64 << 20
"""What the scores of rows take together, unless a single row takes more."""


class ChoiceNodes(Submission):
    """How a choice of positions becomes kernels."""

    def choose_positions(self, node: onnx.NodeProto) -> None:
        """What is chosen for rows, or for each KV head of them, as the `PLACE` of each row in a sequence of these
        positions alone."""
        graph, attributes = self._graph, attributes_of(node)
        heads, width, count = (attributes[name] for name in ("heads", "head_dim", "count"))
        apart, means = heads_choose(node), attributes.get("epsilon")
        lists, told = heads if apart else 1, heads if apart else attributes.get("lists", 1)
        names = node.input[: 3 if weighs_heads(node) else 2]
        cache, _, cosines, sines, *of_keys = node.input[len(names) :]
        block = attributes.get("block", 1)
        pool, kept = block if of_keys else 1, width if means is not None or not of_keys else 2 * width
        chooses = max(self._step.sees) > graph.all_seen
        none = View(0, 0, 0)
        q, k, weights = [*(graph.values[name] if chooses or name == names[1] else none for name in names), none][:3]
        arrays = [pointer(graph.caches.get(f"{cache}{end}", 0)) for end in ("", SCALES)]
        places, tokens = pointer(self._places), graph.blocks.tokens
        turning = Turning(*self._turns(cosines, sines), 0, 0, 0, 0, 0, attributes.get("rotary_dim", 0))
        plain = Turning(*self._turns(cosines, sines), 0, 0, 0, 0, 0, 0)
        asks = heads if chooses and (means is not None or not of_keys) else 0

        def rotate(queries: int, keys: View, turning: Turning) -> None:
            graph.launch(
                f"rotate_{graph.blocks.format}",
                self._tokens * (queries + bool(keys.address)) * WARP,
                *(*rows_of(q), *rows_of(keys), *rows_of(none), places, *arrays, *arrays),
                *integers(0, tokens, self._tokens, queries, 1, kept),
                turning,
            )

        if means is None:
            rotate(asks, k, turning)
        else:  # keys are kept as they are
            rotate(0, k, plain)
            if asks:
                rotate(asks, none, turning)
        for name in of_keys:
            graph.launch(
                f"{'pool' if means is None else 'average'}_index_{graph.blocks.format}",
                self._tokens * WARP,
                *(*rows_of(k), pointer(graph.address(name)), places, *arrays),
                *integers(tokens, self._tokens, width, pool),
                *([] if means is None else [turning, ctypes.c_float(means)]),
            )
        together = max(1, min(graph.max_rows, SCORES_BYTES // (4 * lists * graph.context)))
        scores = graph.buffer("scores of positions", lists * graph.context, together)
        slots = [graph.buffer(f"{node.output[0]}.{own}", count, graph.max_rows) for own in range(told)]
        chosen = [
            graph.buffer(places_of(node.output[0], own), PLACE.itemsize // 4, graph.max_rows) for own in range(told)
        ]
        for first in range(0, self._tokens, together):
            rows = min(together, self._tokens - first)
            places = pointer(self._places + PLACE.itemsize * first)
            # A captured step is for rows that might see more than there can be.
            room = max(1, min(max(self._step.sees[first : first + rows]), graph.context) // pool)
            if chooses:
                graph.launch(
                    f"score_index_{graph.blocks.format}",
                    rows * -(-room // SCORED) * 4 * WARP,
                    *(*rows_of(q.after(first)), *rows_of(weights.after(first)), places, *arrays, *integers(tokens)),
                    *(pointer(scores.address), *integers(heads, width, kept, int(apart), count, room, pool)),
                )
            for own in range(told):
                graph.launch(
                    "choose_positions",
                    rows * 4 * WARP,
                    *(pointer(scores.address + 4 * (own if apart else 0) * room), *integers(lists * room), places),
                    *(*integers(tokens, own, told), ctypes.c_ulonglong(slots[own].after(first).address)),
                    pointer(chosen[own].after(first).address),
                    *integers(count, block, attributes.get("latest", 0), int(pool > 1)),
                )

    def _turns(self, cosines: str, sines: str) -> tuple[int, int]:
        return self._step.turns[cosines], self._step.turns[sines]
