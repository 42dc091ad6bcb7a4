"""What a rank has of an adapter: as much as it has of the matrices that the adapter adds to.

Where a rank has some rows of a matrix, it has all of A and those rows of B. Where it has some columns, it has those
columns of A and all of B: what it adds is a part of its own term of the sum over the ranks, so nothing more is
exchanged. Of a matrix in place of the head's it has the rows that it has of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from motley.daemon.adapters.reading import Adapter
from motley.daemon.models.graph.rank_graph import Declared
from motley.daemon.weights.spec import Piece
from motley.plugins.engine import AdapterProduct, Factor


def cut_adapter(adapter: Adapter, declared: Declared) -> tuple[dict[str, AdapterProduct], dict[str, Factor]]:
    """What a rank prepares (`motley.plugins.engine.AdaptedEngine.prepare_adapter`), given its graph: what is added to
    products, and what is in place of the head's matrix.

    Nothing is copied but rows that lie apart in the whole matrix.
    """
    cut, whole = {}, {}
    for part, pieces in declared.adapted.items():
        if (matrix := adapter.whole.get(pieces[0].tensor)) is not None:
            whole[part] = _rows_of(matrix, pieces)
        product = adapter.products.get(pieces[0].tensor)
        if product is None:
            continue
        columns = pieces[0].columns
        assert columns is not None
        cut[part] = AdapterProduct(product.down[:, columns.start : columns.stop], _rows_of(product.up, pieces))
    return cut, whole


def _rows_of(matrix: Factor, pieces: Sequence[Piece]) -> Factor:
    rows = [matrix[piece.rows.start : piece.rows.stop] for piece in pieces]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)
