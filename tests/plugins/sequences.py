"""Sequences that tests give an engine: each has the blocks that it needs, like what a scheduler would give it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from motley.plugins.engine import F32, Engine, RankGraph, Span


@dataclass
class Sequences:
    """The sequences of an engine, by numbers that a test chooses. Each gets a block when it needs one, the last that is
    free, so that no sequence's blocks follow each other."""

    engine: Engine
    graph: RankGraph
    prompt: int = 0
    """How long the prompts are, in tokens: see `Span.prompt`."""
    free: list[int] = field(init=False)
    tables: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    """Where each has its recurrent states."""

    def __post_init__(self) -> None:
        self.free = [*range(self.graph.blocks.count)]

    def span(self, sequence: int, position: int, rows: int, wanted: int = 0) -> Span:
        """Some rows of a sequence, which gets what blocks it lacks for them."""
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.graph.blocks.tokens < position + rows:
            table.append(self.free.pop())
        slot = self.slots.setdefault(sequence, min({*range(len(self.slots) + 1)} - {*self.slots.values()}))
        return Span(np.array(table, np.int32), position, rows, wanted, self.prompt, slot=slot)

    def step(self, sequence: int, hidden: F32, position: int, wanted: int = 1, halved: bool = False) -> F32:
        """Run rows of one sequence; the logits of the last `wanted`, f32[wanted, V]."""
        return self.engine.step(hidden, [self.span(sequence, position, len(hidden), wanted)], halved)

    def decode(self, sequences: Sequence[int], hidden: F32, positions: Iterable[int]) -> F32:
        """Run a row of each of some sequences in one step; their logits f32[B, V]."""
        spans = [self.span(*each, 1, 1) for each in zip(sequences, positions, strict=True)]
        return self.engine.step(hidden, spans)

    def close(self, sequence: int) -> None:
        """Have the blocks of a sequence back."""
        self.free += self.tables.pop(sequence, [])
        self.slots.pop(sequence, None)
