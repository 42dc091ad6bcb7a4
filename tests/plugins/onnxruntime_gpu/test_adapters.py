"""The engine for any GPU computes with adapters what the weights with these in them give; each row with its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.daemon.adapters.reading import Adapter
from motley.daemon.models.cutting.units import units
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.engine import EngineError, EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from tests.adapters.adapted import AdaptedSession, baked, random_adapter
from tests.models.cases import LocalSession, golden_case, uneven_shares
from tests.plugins.onnxruntime_gpu.test_engine import assert_close


@pytest.mark.parametrize("name", ["qwen2-some-windows", "gemma3-softcaps", "phi3"])
def test_an_adapter_beside_the_weights_is_as_one_in_them(name: str, tmp_path: Path) -> None:
    """Of the head too, beside a processor, whole and in halves."""
    case = golden_case(name)
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1, head=True)
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with (
        baked(case.folder, adapter) as model,
        LocalSession(model, OnnxRuntimeEngine, shares, tmp_path / "baked") as ranks,
    ):
        expected = ranks.step(case.tokens, 0)
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with AdaptedSession(case.folder, [WebGpuEngine, OnnxRuntimeEngine], shares, tmp_path / "ranks") as session:
        session.load(1, adapter)
        first = session.adapted(case.tokens[:9], 1, halved=True)
        rest = session.adapted(case.tokens[9:], 1, position=9)
    assert_close(np.concatenate([first, rest]), expected)


def test_a_head_of_an_adapter_s_own_is_refused_by_name(tmp_path: Path) -> None:
    case = golden_case("phi3")
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1, whole=("lm_head",))
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with (
        AdaptedSession(case.folder, WebGpuEngine, shares, tmp_path / "ranks") as session,
        pytest.raises(EngineError, match=r"'webgpu' .* in place of the head's.* use engine 'onnxruntime'"),
    ):
        session.load(1, adapter)


@pytest.mark.soak
def test_rows_of_other_adapters_share_a_step(tmp_path: Path) -> None:
    """Also when what is in a slot, or how many rows it has, changes; no adapter, zeros and rank 0 change no bit."""
    case, texts = golden_case("qwen2-some-windows"), 5
    some = [
        random_adapter(tmp_path / str(seed), case.model, seed, rank=seed, only=only)
        for seed, only in ((1, ["q_proj", "up_proj"]), (2, ["v_proj", "down_proj"]), (3, ()))
    ]
    products = some[2].products.items()
    zeros = Adapter("", {name: AdapterProduct(own.down, 0 * own.up) for name, own in products})
    nothing = Adapter("", {name: AdapterProduct(own.down[:0], own.up[:, :0].copy()) for name, own in products})
    shares = uneven_shares(units(case.model, "int4", 32), 2)
    tokens = np.random.default_rng(0).integers(0, case.model.vocabulary, (texts, 3)).tolist()
    options = EngineOptions(max_rows=64)
    with AdaptedSession(
        case.folder, WebGpuEngine, shares, tmp_path / "ranks", "int4", slots=4, options=options
    ) as session:
        span = session.sequences.span

        def together(slots: list[int], rows: int, halved: bool = False) -> list[np.ndarray]:
            spans = [span(at, 0, rows, rows)._replace(adapter=slot) for at, slot in enumerate(slots)]
            asked = [token for at, _ in enumerate(slots) for token in tokens[at % texts][:rows]]
            got = session.run(spans, asked, halved).copy()
            for at, _ in enumerate(slots):
                session.sequences.close(at)
            return np.split(got, len(slots))

        plain = together([0] * texts, 3)
        for slot, adapter in enumerate([*some, zeros], 1):
            session.load(slot, adapter)
        alone = []
        for at, slot in enumerate((1, 2, 3, 0, 1)):
            spans = [span(0, 0, 3, 3)._replace(adapter=slot)]
            alone.append(session.run(spans, tokens[at]).copy())
            session.sequences.close(0)
        assert min(np.abs(alone[at] - plain[at]).max() for at in (0, 1, 2, 4)) > 0.01
        for halved in (False, True):
            for rows in (3, 1):
                for got, right in zip(together([1, 2, 3, 0, 1], rows, halved), alone, strict=True):
                    assert_close(got, right[:rows])
        session.load(2, some[0])
        assert_close(together([1, 2, 3, 0, 1], 3)[1], together([1, 1, 3, 0, 1], 3)[1])
        for adapter in (zeros, nothing):
            session.load(4, adapter)
            for got, right in zip(together([4, 0, 4, 0, 4], 3), plain, strict=True):
                np.testing.assert_array_equal(got.view(np.int32), right.view(np.int32))
        session.unload(4)
        with pytest.raises(EngineError, match="'webgpu' has no adapter in slot 4"):
            together([4], 1)
