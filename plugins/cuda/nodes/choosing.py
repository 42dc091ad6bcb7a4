"""Which positions rows see, in a step: what scores them, and what chooses."""

from __future__ import annotations

import ctypes

import onnx

from motley.plugins.cuda.kernels import PLACE, WARP, View, integers, pointer, rows_of
from motley.plugins.cuda.nodes.attention import Turning, places_of
from motley.plugins.cuda.nodes.submission import Submission
from motley.plugins.engine import SCALES
from motley.plugins.nodes import attributes_of, heads_choose

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
        lists = heads if heads_choose(node) else 1
        names = node.input[: 2 if heads_choose(node) else 3]
        cache, _, cosines, sines, *pooling = node.input[len(names) :]
        block = attributes.get("block", 1)
        pool = block if pooling else 1
        chooses = max(self._step.sees) > graph.all_seen
        none = View(0, 0, 0)
        q, k, weights = [*(graph.values[name] if chooses or name == names[1] else none for name in names), none][:3]
        kept = [pointer(graph.caches.get(f"{cache}{end}", 0)) for end in ("", SCALES)]
        places, tokens = pointer(self._places), graph.blocks.tokens
        turned = heads if chooses and not pooling else 0
        turns = self._step.turns[cosines], self._step.turns[sines]
        graph.launch(
            f"rotate_{graph.blocks.format}",
            self._tokens * (turned + 1) * WARP,
            *(*rows_of(q), *rows_of(k), *rows_of(none), places, *kept, *kept, *integers(0, tokens, self._tokens)),
            *integers(turned, 1, 2 * width if pooling else width),
            Turning(*turns, 0, 0, 0, 0, 0, attributes.get("rotary_dim", 0)),
        )
        for name in pooling:
            graph.launch(
                f"pool_index_{graph.blocks.format}",
                self._tokens * WARP,
                *(*rows_of(k), pointer(graph.address(name)), places, *kept),
                *integers(tokens, self._tokens, width, pool),
            )
        together = max(1, min(graph.max_rows, SCORES_BYTES // (4 * lists * graph.context)))
        scores = graph.buffer("scores of positions", lists * graph.context, together)
        slots = [graph.buffer(f"{node.output[0]}.{own}", count, graph.max_rows) for own in range(lists)]
        chosen = [
            graph.buffer(places_of(node.output[0], own), PLACE.itemsize // 4, graph.max_rows) for own in range(lists)
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
                    *(*rows_of(q.after(first)), *rows_of(weights.after(first)), places, *kept, *integers(tokens)),
                    *(pointer(scores.address), *integers(heads, width, count, room, pool)),
                )
            for own in range(lists):
                graph.launch(
                    "choose_positions",
                    rows * 4 * WARP,
                    *(pointer(scores.address + 4 * own * room), *integers(lists * room), places),
                    *(*integers(tokens, own, lists), ctypes.c_ulonglong(slots[own].after(first).address)),
                    pointer(chosen[own].after(first).address),
                    *integers(count, block, attributes.get("latest", 0), int(pool > 1)),
                )
