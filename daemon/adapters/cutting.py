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
    """What a rank loads (`motley.plugins.engine.AdaptedEngine.load_adapter`), given its graph.

    Matrices that it needs as a whole are not copied.
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
            np.ascontiguousarray(product.down[:, columns.start : columns.stop]),
            np.asfortranarray(rows[0] if len(rows) == 1 else np.concatenate(rows)),
        )
    return cut
