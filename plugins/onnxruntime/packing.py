"""Adapters in memory as the CPU engine's kernel reads them: one stretch of huge pages each, in the order of use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.engine import EngineMemoryError
from motley.plugins.huge_pages import huge_pages
from motley.plugins.native.adapted import PackedFactors, down_bytes, pack_down, pack_up, up_bytes
from motley.plugins.native.library import U8
from motley.plugins.onnxruntime.kernels import Adapt


def pack_adapter(
    products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor], in_order: Sequence[Sequence[str]]
) -> PreparedAdapter:
    """Lay out an adapter.

    Args:
        products: its own, by part.
        whole: what it has in place of the base's matrices, by part.
        in_order: the names of the parts of each product of the graph, in the order in which these are computed: first
            what is multiplied with x for all parts of one, then the rest.

    Raises:
        EngineMemoryError: there is no room.
    """
    first = {part: each.down for part, each in products.items()} | dict(whole)
    total = sum(map(down_bytes, first.values())) + sum(up_bytes(each.up) for each in products.values())
    try:
        room = huge_pages(total)
    except (OSError, MemoryError) as error:
        raise EngineMemoryError(f"there is no memory for an adapter of {total} bytes: {error}") from error
    parts: dict[str, PackedFactors] = {}
    at = 0

    def place(size: int) -> U8:
        nonlocal at
        at += size
        return room[at - size : at]

    for side_by_side in in_order:
        own = [part for part in side_by_side if part in first]
        downs = {part: pack_down(first[part], place(down_bytes(first[part]))) for part in own}
        ups = {part: products[part].up for part in own if part in products}
        packed = {part: pack_up(up, place(up_bytes(up))) for part, up in ups.items()}
        for part in own:
            rank, columns = first[part].shape
            width = len(ups[part]) if part in ups else rank
            parts[part] = PackedFactors(rank, columns, width, downs[part], packed.get(part))
    return PreparedAdapter(parts, total)


def fill_slot(adapts: Iterable[Adapt], slot: int, adapter: PreparedAdapter) -> None:
    """Have an adapter in a slot of all products, in place of what is there."""
    for each in adapts:
        each.factors.unload(slot)
        for number, part in enumerate(each.parts):
            if part in adapter.parts:
                each.factors.load(slot, number, adapter.parts[part])


def clear_slot(adapts: Iterable[Adapt], slot: int) -> None:
    """Forget what is in a slot of all products."""
    for each in adapts:
        each.factors.unload(slot)
