"""What a rank has of an adapter: as much as it has of the matrices that the adapter adds to.

Where a rank has some rows of a matrix, it has all of A and those rows of B. Where it has some columns, it has those
columns of A and all of B: what it adds is a part of its own term of the sum over the ranks, so nothing more is
exchanged. Of a matrix in place of the head's it has the rows that it has of that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from motley.daemon.adapters.reading import Adapter
from motley.daemon.weights.spec import Piece
from motley.plugins.adapted_engine import AdapterProduct, Factor

Parts = Mapping[str, tuple[Piece, ...]]
"""What there is of the matrices that adapters may add to, by the parts' names in a graph's Adapted nodes."""


def cut_adapter(adapter: Adapter, parts: Parts) -> tuple[dict[str, AdapterProduct], dict[str, Factor]]:
    """What a rank prepares, see `motley.plugins.adapted_engine`, given the parts of its graph: what is added to
    products, and what is in place of the head's matrix.

    Nothing is copied but rows that lie apart in the whole matrix.
    """
    own = ((part, pieces, adapter.whole.get(pieces[0].tensor)) for part, pieces in parts.items())
    whole = {part: _rows_of(matrix, pieces) for part, pieces, matrix in own if matrix is not None}
    return cut_products(adapter.products, parts), whole


def cut_products(products: Mapping[str, AdapterProduct], parts: Parts) -> dict[str, AdapterProduct]:
    """What is added to the parts of a graph, of what is added to products with the model's matrices."""
    cut = {}
    for part, pieces in parts.items():
        product, columns = products.get(pieces[0].tensor), pieces[0].columns
        if product is not None:
            assert columns is not None
            cut[part] = AdapterProduct(product.down[:, columns.start : columns.stop], _rows_of(product.up, pieces))
    return cut


def _rows_of(matrix: Factor, pieces: Sequence[Piece]) -> Factor:
    rows = [matrix[piece.rows.start : piece.rows.stop] for piece in pieces]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)
