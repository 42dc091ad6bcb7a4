"""What ranks have of an adapter: together, exactly what it adds to their parts of the model's matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.daemon.adapters.cutting import cut_adapter
from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.plugins.adapters import is_adapted, parts_of
from motley.plugins.nodes import is_collective
from tests.adapters.adapted import head_of, matrices, random_adapter
from tests.models.cases import dense_cases, golden_case, others_soak, uneven_shares


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("case", others_soak(dense_cases()), ids=str)
def test_parts_tile_what_an_adapter_adds(case: object, ranks: int, exact: bool, tmp_path: Path) -> None:
    model = golden_case(str(case)).model
    adapter = random_adapter(tmp_path, model, seed=0, rank=2, head=True)
    whole = [*matrices(model), head_of(model)]
    shares = uneven_shares(units(model, "fp32", 32, exact=exact), ranks)
    found = {w.name: np.full(w.shape, np.nan) for w in whole}
    for rank in range(ranks):
        declared = build_rank_graph(model, shares, rank, "fp32", 32, 64, exact=exact, adapters=1)
        cut, _ = cut_adapter(adapter, declared.adapted)
        nodes = filter(is_adapted, declared.proto.graph.node)
        parts = {part: (width, columns) for node in nodes for part, width, columns in parts_of(node)}
        assert {*parts} == {*declared.adapted} >= {*cut}, "this adapter adds nothing to routers"
        for part, (down, up) in cut.items():
            pieces = declared.adapted[part]
            assert parts[part] == (len(up), down.shape[1])
            added, done = up.astype(np.float64) @ down.astype(np.float64), 0
            for piece in pieces:
                place = tuple(slice(own.start, own.stop) for own in piece.ranges)
                found[piece.tensor][place] = added[done : done + len(piece.rows)]
                done += len(piece.rows)
            assert done == len(added)
    for w in whole:
        product = adapter.products[w.name]
        np.testing.assert_array_equal(found[w.name], product.up.astype(np.float64) @ product.down.astype(np.float64))


def test_what_an_adapter_leaves_alone_is_absent(tmp_path: Path) -> None:
    model = golden_case("llama-mqa").model
    adapter = random_adapter(tmp_path, model, seed=0, only=("v_proj",))
    shares = uneven_shares(units(model, "fp32", 32), 1)
    cut, _ = cut_adapter(adapter, build_rank_graph(model, shares, 0, "fp32", 32, 64, adapters=1).adapted)
    assert [*cut] == [f"{name}[:, 0:{model.hidden}]" for name in adapter.products]
    for own, whole in zip(cut.values(), adapter.products.values(), strict=True):
        assert np.shares_memory(own.down, whole.down)
        assert np.shares_memory(own.up, whole.up)


@pytest.mark.parametrize("exact", [False, True])
def test_adapters_cost_no_collective(exact: bool) -> None:
    model = golden_case("olmo2").model
    shares = uneven_shares(units(model, "fp32", 32, exact=exact), 3)
    for rank in range(3):
        with_slots, without = (
            build_rank_graph(model, shares, rank, "fp32", 32, 64, exact=exact, adapters=slots).proto.graph.node
            for slots in (4, 0)
        )
        assert [*filter(is_collective, with_slots)] == [*filter(is_collective, without)]
        assert len(with_slots) == len(without) + len([*filter(is_adapted, with_slots)])
        assert not any(map(is_adapted, without))
