"""The engine for NVIDIA's GPUs computes with adapters what the weights with these in them give; each row with its own
bits. Kernels are compiled for the host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.adapters.reading import Adapter
from motley.daemon.models.cutting.units import units
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import F32, Collectives, EngineError, EngineOptions, RankGraph
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.adapters.adapted import AdaptedSession, baked, random_adapter
from tests.models.cases import LocalSession, golden_case, uneven_shares
from tests.transport.cuda.host_driver import HostDriver


class Engines:
    """Makes engines on stand-ins for a GPU, which must have given back everything in the end."""

    def __init__(self) -> None:
        self.drivers: list[HostDriver] = []

    def __call__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        self.drivers.append(HostDriver())
        options = replace(options, extra={"host_step": "function"})
        return CudaEngine(graph, collectives, options, self.drivers[-1], None)

    def check(self) -> None:
        assert [driver.live for driver in self.drivers] == [0] * len(self.drivers)


def test_an_adapter_beside_the_weights_is_as_one_in_them(tmp_path: Path) -> None:
    """Of the head too, beside a processor, in prompts, halves and captured steps."""
    case, engines = golden_case("llama-mqa"), Engines()
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1, head=True)
    alone = uneven_shares(units(case.model, "fp32", 32), 1)
    with baked(case.folder, adapter) as model, LocalSession(model, ReferenceEngine, alone, tmp_path / "baked") as ranks:
        expected = ranks.step(case.tokens, 0)
    shares = uneven_shares(units(case.model, "fp32", 32), 3)
    with AdaptedSession(case.folder, [engines, OnnxRuntimeEngine, engines], shares, tmp_path / "ranks") as session:
        session.load(1, adapter)
        few = len(case.tokens) - 3
        got = [session.adapted(case.tokens[:few], 1, halved=True).copy()]
        for at in range(few, len(case.tokens)):
            got.append(session.adapted(case.tokens[at : at + 1], 1, position=at).copy())
        assert any(engine._graphs for engine in session.engines if isinstance(engine, CudaEngine))
    assert np.abs(np.concatenate(got) - expected).max() < 1e-4 * np.abs(expected).max()
    engines.check()


def test_a_head_of_an_adapter_s_own_is_refused_by_name(tmp_path: Path) -> None:
    case, engines = golden_case("llama-mqa"), Engines()
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1, whole=("lm_head",))
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with (
        AdaptedSession(case.folder, engines, shares, tmp_path / "ranks") as session,
        pytest.raises(EngineError, match=r"'cuda' .* in place of the head's.* use engine 'onnxruntime'"),
    ):
        session.load(1, adapter)
    engines.check()


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
def test_rows_of_other_adapters_share_a_step(quantisation: str, tmp_path: Path) -> None:
    """Each with the bits that it has alone, also when what is in a slot changes between captured steps; no adapter,
    zeros and rank 0 change none."""
    case, engines, texts = golden_case("mistral-window"), Engines(), 5
    some = [
        random_adapter(tmp_path / str(seed), case.model, seed, rank=seed, only=only, head=not only)
        for seed, only in ((1, ["q_proj", "up_proj"]), (2, ["v_proj", "down_proj"]), (5, ()))
    ]
    products = some[2].products.items()
    zeros = Adapter("", {name: AdapterProduct(own.down, 0 * own.up) for name, own in products})
    nothing = Adapter("", {name: AdapterProduct(own.down[:0], own.up[:, :0].copy()) for name, own in products})
    shares = uneven_shares(units(case.model, quantisation, 32), 2)
    tokens = np.random.default_rng(0).integers(0, case.model.vocabulary, (texts, 3)).tolist()
    with AdaptedSession(case.folder, engines, shares, tmp_path / "ranks", quantisation, slots=4) as session:

        def steps(slots: list[int]) -> list[F32]:
            """The logits of a text for each slot, i.e. of two rows at first, of which one is wanted by every second
            text, and then of one."""
            span = session.sequences.span
            first = [span(at, 0, 2, 1 + at % 2)._replace(adapter=slot) for at, slot in enumerate(slots)]
            got = [session.run(first, [token for at, _ in enumerate(slots) for token in tokens[at][:2]]).copy()]
            then = [span(at, 2, 1, 1)._replace(adapter=slot) for at, slot in enumerate(slots)]
            got.append(session.run(then, [tokens[at][2] for at, _ in enumerate(slots)]).copy())
            for at, _ in enumerate(slots):
                session.sequences.close(at)
            cuts = np.cumsum([1 + at % 2 for at, _ in enumerate(slots)])[:-1]
            pieces = zip(np.split(got[0], cuts), got[1], strict=True)
            return [np.concatenate([begin, end[None]]) for begin, end in pieces]

        plain = steps([0] * texts)
        alone = {}
        for slot, adapter in enumerate([*some, zeros], 1):
            session.load(slot, adapter)
            alone[slot] = steps([slot] * texts)
        assert min(np.abs(alone[slot][0] - plain[0]).max() for slot in (1, 2, 3)) > 0.01
        for slots in ([1, 2, 3, 0, 1], [0, 3, 3, 2, 4], [1, 2, 3, 0, 1]):
            for at, (slot, got) in enumerate(zip(slots, steps(slots), strict=True)):
                np.testing.assert_array_equal(got, (alone[slot] if slot else plain)[at])
        session.load(1, some[1])
        np.testing.assert_array_equal(steps([1, 2, 3, 0, 1])[0], alone[2][0])
        for adapter in (zeros, nothing):
            session.load(4, adapter)
            for got, right in zip(steps([4, 0, 4, 0, 4]), plain, strict=True):
                np.testing.assert_array_equal(got.view(np.int32), right.view(np.int32))
        session.unload(4)
        with pytest.raises(EngineError, match="'cuda' has no adapter in slot 4"):
            steps([4])
    engines.check()
