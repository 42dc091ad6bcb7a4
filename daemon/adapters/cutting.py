"""What a rank has of an adapter: as much as it has of the matrices that the adapter adds to.

Where a rank has some rows of a matrix, it has all of A and those rows of B. Where it has some columns, it has those
columns of A and all of B: what it adds is a part of its own term of the sum over the ranks, so nothing more is
exchanged.
"""

from __future__ import annotations

import numpy as np

from motley.daemon.adapters.reading import Adapter
from motley.daemon.models.graph.rank_graph import Declared
from motley.plugins.engine import AdapterProduct


def cut_adapter(adapter: Adapter, declared: Declared) -> dict[str, AdapterProduct]:
    """What a rank prepares (`motley.plugins.engine.AdaptedEngine.prepare_adapter`), given its graph.

    Nothing is copied but rows that lie apart in the whole matrix.
    """
    cut = {}
    for part, pieces in declared.adapted.items():
        product = adapter.products.get(pieces[0].tensor)
        if product is None:
            continue
        columns = pieces[0].columns
        assert columns is not None
        rows = [product.up[piece.rows.start : piece.rows.stop] for piece in pieces]
        cut[part] = AdapterProduct(
            product.down[:, columns.start : columns.stop],
            rows[0] if len(rows) == 1 else np.concatenate(rows),
        )
    return cut
