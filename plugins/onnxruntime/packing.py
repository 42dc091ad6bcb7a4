"""Adapters in memory as the CPU engine's kernel reads them: one stretch of huge pages each, in the order of use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from motley.plugins.engine import AdapterProduct, EngineMemoryError, PreparedAdapter
from motley.plugins.huge_pages import huge_pages
from motley.plugins.native.adapted import PackedFactors, pack_down, pack_up, packed_bytes


def pack_adapter(products: Mapping[str, AdapterProduct], in_order: Sequence[Sequence[str]]) -> PreparedAdapter:
    """Lay out an adapter.

    Args:
        products: its own, by part.
        in_order: the names of the parts of each product of the graph, in the order in which these are computed: first
            what is multiplied with x for all parts of one, then the rest.

    Raises:
        EngineMemoryError: there is no room.
    """
    sizes = {part: packed_bytes(*each) for part, each in products.items()}
    total = sum(map(sum, sizes.values()))
    try:
        room = huge_pages(total)
    except (OSError, MemoryError) as error:
        raise EngineMemoryError(f"there is no memory for an adapter of {total} bytes: {error}") from error
    parts: dict[str, PackedFactors] = {}
    at = 0
    for side_by_side in in_order:
        own = [part for part in side_by_side if part in products]
        downs, ups = {}, {}
        for part in own:
            downs[part] = pack_down(products[part].down, room[at : at + sizes[part][0]])
            at += sizes[part][0]
        for part in own:
            ups[part] = pack_up(products[part].up, room[at : at + sizes[part][1]])
            at += sizes[part][1]
        for part in own:
            (rank, columns), width = products[part].down.shape, len(products[part].up)
            parts[part] = PackedFactors(rank, columns, width, downs[part], ups[part])
    return PreparedAdapter(parts, total)
