"""What the CPU engine's steps are once they are bound: segments, rows and sequences at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from motley.plugins.engine import F32
from motley.plugins.mapped_share import Array
from motley.plugins.native.rows import Action
from motley.plugins.onnxruntime.experts import BoundMixture
from motley.plugins.onnxruntime.sessions import Part


@dataclass(frozen=True)
class Bound:
    """Segments bound to buffers, and what is done in place when they have run.

    Attributes:
        actions: what computes the segments.
        partial: what is then summed over all ranks; None: nothing.
        parts: what is then gathered, by rank; empty: nothing.
        mixture: the experts that are then computed; None: none.
    """

    actions: Sequence[Action] = ()
    partial: F32 | None = None
    parts: Sequence[F32] = ()
    mixture: BoundMixture | None = None


@dataclass
class Slot:
    """One sequence.

    Attributes:
        constants: its rotary tables, by graph input.
        position: i64[1], where its next decoded token stands.
        caches: its keys and values, by graph input.
        capacity: tokens that the caches have room for.
        length: tokens that are in them.
        attentions: what computes the attention of the next decoded token, by the number of that token among those of a
            step. It is void once the caches move.
    """

    constants: Mapping[str, F32]
    position: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    caches: dict[str, F32] = field(default_factory=dict)
    capacity: int = 0
    length: int = 0
    attentions: dict[int, Mapping[Part, Action]] = field(default_factory=dict)


@dataclass(frozen=True)
class BoundRows:
    """The layers bound to some rows of the buffers. Attention is not: it is bound to sequences.

    Attributes:
        steps: actions, with a `Part` wherever an attention belongs, and what is done after them.
        places: where the values of these rows are, by name.
    """

    steps: Sequence[tuple[Sequence[Action | Part], Bound]]
    places: Mapping[str, Array]

    def attending(self, attentions: Sequence[Mapping[Part, Action]]) -> list[Bound]:
        """The layers, with the attentions of every sequence that has some of the rows in their places."""
        bound = []
        for actions, then in self.steps:
            own: list[Action] = []
            for action in actions:
                if isinstance(action, Part):
                    own += [attention[action] for attention in attentions]
                else:
                    own.append(action)
            bound.append(replace(then, actions=own))
        return bound


@dataclass(frozen=True)
class Decoder:
    """What decodes one token of each of so many sequences, whichever they are.

    Attributes:
        wanted: the numbers of the rows that get logits: of all. It is kept here as bindings hold addresses only.
    """

    rows: BoundRows
    head: Sequence[Bound]
    wanted: Array
