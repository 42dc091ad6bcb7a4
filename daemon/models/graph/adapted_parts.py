"""The names by which an Adapted node and an adapter's matrices know the same part of a product."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from motley.daemon.weights.spec import Piece

Parts = dict[str, tuple[Piece, ...]]


def parts_of(pieces: Sequence[Piece]) -> Parts:
    """Name the matrices that some pieces are of, which stand one below the other and have the same columns.

    The columns are in the name: where sums are exact, a rank multiplies with those of each leaf by themselves.
    """
    parts: Parts = {}
    for tensor, group in groupby(pieces, key=lambda piece: piece.tensor):
        own = tuple(group)
        columns = _columns(own)
        parts[f"{tensor}[:, {columns.start}:{columns.stop}]"] = own
    return parts


def attributes_of_parts(parts: Parts) -> dict[str, Any]:
    """The attributes of the Adapted node of some parts."""
    widths = [sum(len(piece.rows) for piece in pieces) for pieces in parts.values()]
    return {"parts": [*parts], "widths": widths, "columns": len(_columns(next(iter(parts.values()))))}


def _columns(pieces: Sequence[Piece]) -> range:
    columns = pieces[0].columns
    assert columns is not None
    return columns
