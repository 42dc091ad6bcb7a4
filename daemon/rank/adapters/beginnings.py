"""Embeddings of tokens whose request has an adapter with an embedding table of its own, or with what it adds to it.

All ranks that begin with tokens must have the same bits, so what is added is multiplied by the kernel of which that is
said (`motley.plugins.native.adapted`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from motley.plugins.adapted_engine import AdapterProduct, Factor
from motley.plugins.engine import F32
from motley.plugins.huge_pages import huge_pages
from motley.plugins.native.adapted import AdaptedProduct, PackedFactors, StepRows, down_bytes, pack_down
from motley.plugins.native.matmul import Pool


@dataclass(frozen=True)
class Beginnings:
    """What an adapter makes of the rows that tokens begin with.

    Attributes:
        change: changes rows f32[T, D or more] of as many tokens in place.
        nbytes: memory that it takes.
    """

    change: Callable[[F32, Sequence[int]], None]
    nbytes: int


def beginnings(embedding: Factor | AdapterProduct | None) -> Beginnings | None:
    """What `motley.daemon.adapters.reading.Adapter.embedding` says; None: nothing."""
    if embedding is None:
        return None
    if not isinstance(embedding, AdapterProduct):
        return _replaced(embedding)
    return _added(embedding) if len(embedding.down) else None


def _replaced(table: Factor) -> Beginnings:
    def change(rows: F32, tokens: Sequence[int]) -> None:
        rows[:, : table.shape[1]] = table[tokens]

    return Beginnings(change, table.nbytes)


def _added(product: AdapterProduct) -> Beginnings:
    down, up = product
    width, rank = up.shape
    packed = pack_down(up, huge_pages(down_bytes(up)))
    multiplied = AdaptedProduct(rank, [width], 1, Pool(1))
    multiplied.load(1, 0, PackedFactors(width, rank, width, packed, None))

    def change(rows: F32, tokens: Sequence[int]) -> None:
        own = StepRows(len(tokens))
        own.set({1: range(len(tokens))})
        x = np.ascontiguousarray(down[:, tokens].T, np.float32)
        added = np.zeros((len(tokens), width), np.float32)
        multiplied.bind(x, added, own)()
        rows[:, :width] += added

    return Beginnings(change, down.nbytes + len(packed.data))
