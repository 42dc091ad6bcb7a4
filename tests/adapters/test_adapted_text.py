"""A model with an adapter beside it computes what it computes with the adapter in its weights, however it is cut; and
nobody sees the adapters of others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motley.daemon.adapters.reading import Adapter
from motley.daemon.models.cutting.units import units
from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.engine import F32, EngineError, EngineFactory, EngineOptions
from motley.plugins.installed import abilities
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine
from tests.adapters.adapted import AdaptedSession, baked, head_of, random_adapter
from tests.models.cases import (
    TELLING,
    Case,
    LocalSession,
    golden_case,
    golden_cases,
    others_soak,
    staged_shares,
    uneven_shares,
)
from tests.plugins.reference.strict_arrays import STRICT

TELLING_CASES = [case for case in golden_cases() if str(case) in TELLING]
STAGED = [golden_case(name) for name in ("llama-mqa", "qwen3-next", "deepseek-v3")]
"""One with caches of every kind of layer."""
ENGINES: dict[str, EngineFactory] = {"reference": ReferenceEngine, "onnxruntime": OnnxRuntimeEngine}
COMPANY = golden_case("qwen2-some-windows")
SLOTS = 16
TARGETS = ("q_proj", "up_proj", "o_proj", "down_proj")


def logits_in_weights(case: Case, adapter: Adapter, encoding: str, folder: Path) -> F32:
    """What one rank computes of a case's tokens, with the adapter in its weights."""
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with baked(case.folder, adapter, encoding) as model, LocalSession(model, ReferenceEngine, shares, folder) as ranks:
        return ranks.step(case.tokens, 0)


def assert_close(got: F32, expected: F32, limit: float = 1e-5) -> None:
    """Within a hundred-thousandth of the largest logit, and with the same greedy tokens."""
    assert np.abs(got - expected).max() < limit * np.abs(expected).max()
    np.testing.assert_array_equal(got.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize(("case", "engine"), others_soak(product(TELLING_CASES, ENGINES)), ids=str)
def test_an_adapter_beside_the_weights_is_as_one_in_them(case: Case, engine: str, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1)
    expected = logits_in_weights(case, adapter, "fp32", tmp_path / "baked")
    assert np.abs(expected[:-1] - case.logits).max() > 0.1 * np.abs(case.logits).max()
    for ranks in (1, 3, 8):
        shares = uneven_shares(units(case.model, "fp32", 32), ranks)
        with AdaptedSession(case.folder, ENGINES[engine], shares, tmp_path / str(ranks)) as session:
            session.load(1, adapter)
            adds_up = len(case.attentions) < len(case.model.layers) or case.model.further_streams  # roundings
            limit = 5e-5 if adds_up else 1e-5
            assert_close(session.adapted(case.tokens, 1), expected, limit)


@pytest.mark.parametrize("case", STAGED, ids=str)
def test_stages_have_the_adapter_of_their_own_layers(case: Case, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=1)
    expected = logits_in_weights(case, adapter, "fp32", tmp_path / "baked")
    layers = len(case.model.layers)
    stages = [(range(layers // 2), 2), (range(layers // 2, layers), 1)]
    shares = staged_shares(units(case.model, "fp32", 32), stages)
    with AdaptedSession(case.folder, OnnxRuntimeEngine, shares, tmp_path / "ranks") as session:
        session.load(1, adapter)
        assert_close(session.adapted(case.tokens, 1), expected, 5e-5)
        for declared, share in zip(session.declared, shares, strict=True):
            assert share.layers is not None
            layers_of = [name for name in declared.adapted if name.startswith("model.layers.")]
            assert {int(name.split(".")[2]) for name in layers_of} == {*share.layers}


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_the_base_may_be_quantised(encoding: str, tmp_path: Path) -> None:
    """Which is not the adapter: what one adds to the other is exact."""
    case = golden_case("qwen2-some-windows")
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=2)
    expected = logits_in_weights(case, adapter, encoding, tmp_path / "baked")
    for ranks in (1, 3, 8):
        shares = uneven_shares(units(case.model, encoding, 32), ranks)
        folder = tmp_path / str(ranks)
        with AdaptedSession(case.folder, ReferenceEngine, shares, folder, encoding) as session:
            session.load(1, adapter)
            assert_close(session.adapted(case.tokens, 1), expected)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_narrow_matrices_are_used_as_they_are(kind: type, tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=3, dtype=kind)
    assert {factor.dtype for product in adapter.products.values() for factor in product} == {np.dtype(kind)}
    expected = logits_in_weights(case, adapter, "fp32", tmp_path / "baked")
    shares = uneven_shares(units(case.model, "fp32", 32), 3)
    with AdaptedSession(case.folder, OnnxRuntimeEngine, shares, tmp_path / "ranks") as session:
        session.load(1, adapter)
        assert_close(session.adapted(case.tokens, 1), expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["llama-mqa", "qwen2-some-windows", "llama-llama3-rope-tied", "gemma3-softcaps"])
def test_the_head_may_be_adapted(name: str, engine: str, tmp_path: Path) -> None:
    """Also one that is the embedding table, which it leaves alone; rows without an adapter stay as they are."""
    case = golden_case(name)
    quantisation = "int8" if name == COMPANY.folder.name else "fp32"
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=8, head=True)
    assert head_of(case.model).name in adapter.products
    expected = logits_in_weights(case, adapter, quantisation, tmp_path / "baked")
    others = logits_in_weights(case, random_adapter(tmp_path / "other", case.model, 8), quantisation, tmp_path / "less")
    assert np.abs(others - expected).max() > 0.01 * np.abs(expected).max()
    for ranks in (1, 3):
        shares = uneven_shares(units(case.model, quantisation, 32), ranks)
        folder = tmp_path / str(ranks)
        with AdaptedSession(case.folder, ENGINES[engine], shares, folder, quantisation, slots=2) as session:
            plain = session.adapted(case.tokens[:5], 0, sequence=1)
            session.load(2, adapter)
            alone = session.adapted(case.tokens, 2)
            if quantisation == "fp32" or engine == "reference":
                assert_close(alone, expected, 5e-5)
            else:  # whose products round activations, too
                assert np.abs(alone - expected).mean() < 0.04 * np.abs(expected).mean()
            for number in (0, 1):
                session.sequences.close(number)
            asked = enumerate(((2, 2), (0, 5), (2, 1), (2, 0)))  # the slot and the logits of each
            spans = [session.sequences.span(at, 0, 5, wanted)._replace(adapter=slot) for at, (slot, wanted) in asked]
            got = session.run(spans, case.tokens[:5] * 4)
            np.testing.assert_allclose(got, np.concatenate([alone[3:5], plain, alone[4:5]]), atol=1e-4)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("name", "quantisation"), [("llama-mha", "fp32"), ("qwen2-some-windows", "int8")])
@pytest.mark.parametrize("tables", [{"whole": ("model.embed_tokens", "lm_head")}, {"rows": True, "head": True}])
def test_embeddings_and_a_head_of_an_adapter_s_own(
    name: str, quantisation: str, engine: str, tables: dict[str, Any], tmp_path: Path
) -> None:
    """At any split as if the base had them, tied and quantised, too; a row beside others has the bits it has alone."""
    case = golden_case(name)
    adapters = [random_adapter(tmp_path / str(seed), case.model, seed, **tables) for seed in (8, 9)]
    lora = random_adapter(tmp_path / "lora", case.model, 3, head=True)
    expected = logits_in_weights(case, adapters[0], quantisation, tmp_path / "baked")
    for ranks in (1, 3):
        shares = uneven_shares(units(case.model, quantisation, 32), ranks)
        folder = tmp_path / str(ranks)
        with AdaptedSession(case.folder, ENGINES[engine], shares, folder, quantisation, slots=3) as session:
            for slot, adapter in enumerate([*adapters, lora], 1):
                session.load(slot, adapter)
            assert_near = assert_close if quantisation == "fp32" or engine == "reference" else assert_similar
            assert_near(session.adapted(case.tokens, 1), expected)
            session.sequences.close(0)
            alone = []
            for slot in range(4):
                alone.append(session.adapted(case.tokens[:4], slot)[2:])
                session.sequences.close(0)
            asked = [*enumerate((1, 0, 2, 3, 1))]
            spans = [session.sequences.span(at, 0, 4, 2)._replace(adapter=slot) for at, slot in asked]
            got = session.run(spans, case.tokens[:4] * 5).reshape(5, 2, -1)
            for at, slot in asked:
                if quantisation == "fp32" or engine == "reference":  # whose float products may round otherwise
                    np.testing.assert_allclose(got[at], alone[slot], atol=1e-4)
                else:
                    np.testing.assert_array_equal(got[at], alone[slot])


def assert_similar(got: F32, expected: F32, limit: float = 0.04) -> None:
    """As of products that round activations, too."""
    assert np.abs(got - expected).mean() < limit * np.abs(expected).mean()


def test_engines_and_devices_mix(tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=4)
    expected = logits_in_weights(case, adapter, "fp32", tmp_path / "baked")
    shares = uneven_shares(units(case.model, "fp32", 32), 3)
    engines = [ReferenceEngine, OnnxRuntimeEngine, partial(ReferenceEngine, device=STRICT)]
    with AdaptedSession(case.folder, engines, shares, tmp_path / "ranks") as session:
        session.load(1, adapter)
        assert_close(session.adapted(case.tokens, 1), expected)


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
def test_exact_sums_do_not_depend_on_the_split(quantisation: str, tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path / "adapter", COMPANY.model, seed=5)
    results = []
    for ranks in (1, 2, 5):
        shares = uneven_shares(units(COMPANY.model, quantisation, 32, exact=True), ranks)
        with AdaptedSession(
            COMPANY.folder,
            OnnxRuntimeEngine,
            shares,
            tmp_path / str(ranks),
            quantisation,
            options=EngineOptions(exact=True),
            exact=True,
        ) as session:
            session.load(1, adapter)
            results.append(session.adapted(COMPANY.tokens, 1))
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.int32), results[0].view(np.int32))


class Company:
    """Two ranks with sixteen adapters, and the logits of a text of each: alone, with nothing in the other slots."""

    def __init__(self, folder: Path) -> None:
        model = COMPANY.model
        shares = uneven_shares(units(model, "int4", 32), 2)
        options = EngineOptions(max_rows=64)
        self.session = AdaptedSession(
            COMPANY.folder, OnnxRuntimeEngine, shares, folder / "ranks", "int4", slots=SLOTS, options=options
        )
        self.adapters = [
            random_adapter(folder / str(slot), model, slot, rank=slot % 5 + 1, only=TARGETS[:slot])
            for slot in range(1, SLOTS + 1)
        ]
        random = np.random.default_rng(0)
        self.texts: list[list[int]] = random.integers(0, model.vocabulary, (SLOTS + 1, 3)).tolist()
        self.alone = [self.session.adapted(self.texts[0], 0)]
        for slot, adapter in enumerate(self.adapters, 1):
            self.session.sequences.close(0)
            self.session.load(slot, adapter)
            self.alone.append(self.session.adapted(self.texts[slot], slot))
            self.session.unload(slot)
        self.session.sequences.close(0)
        for slot, adapter in enumerate(self.adapters, 1):
            self.session.load(slot, adapter)

    def check(self, slots: list[int], rows: int, halved: bool = False) -> None:
        """Have some slots' texts in one step, and see that each has the bits that it has alone."""
        spans = [
            self.session.sequences.span(number, 0, rows, rows)._replace(adapter=slot)
            for number, slot in enumerate(slots)
        ]
        got = self.session.run(spans, [token for slot in slots for token in self.texts[slot][:rows]], halved)
        expected = np.concatenate([self.alone[slot][:rows] for slot in slots])
        for number in range(len(slots)):
            self.session.sequences.close(number)
        np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Company]:
    made = Company(tmp_path_factory.mktemp("company"))
    with made.session:
        yield made


def test_sixteen_adapters_in_one_step(company: Company) -> None:
    assert len({logits.tobytes() for logits in company.alone}) == SLOTS + 1
    company.check([*range(SLOTS + 1)], rows=1)
    company.check([*range(SLOTS + 1)], rows=3)
    company.check([*range(SLOTS + 1)], rows=3, halved=True)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None)
@given(slots=st.lists(st.integers(0, SLOTS), min_size=1, max_size=20), rows=st.integers(1, 3), halved=st.booleans())
def test_any_company_changes_no_bit(company: Company, slots: list[int], rows: int, halved: bool) -> None:
    company.check(slots, rows, halved)


def test_loading_and_unloading_between_steps_changes_nobodys_bits(company: Company) -> None:
    session, text = company.session, company.texts[2]
    first = session.adapted(text[:1], 2)
    session.unload(1)
    session.load(3, company.adapters[7])
    second = session.adapted(text[1:2], 2, position=1)
    session.load(1, company.adapters[4])
    session.load(3, company.adapters[2])
    third = session.adapted(text[2:], 2, position=2)
    session.load(1, company.adapters[0])
    session.sequences.close(0)
    got = np.concatenate([first, second, third])
    np.testing.assert_array_equal(got.view(np.int32), company.alone[2].view(np.int32))
    company.check([*range(SLOTS + 1)], rows=2)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("quantisation", ["fp32", "int8"])
def test_slots_change_no_bit_of_what_has_no_adapter(engine: str, quantisation: str, tmp_path: Path) -> None:
    """Nor does one of rank 0, or of zeros."""
    case = golden_case("llama-mqa") if quantisation == "fp32" else COMPANY
    shares = uneven_shares(units(case.model, quantisation, 32), 3)
    with LocalSession(case.folder, ENGINES[engine], shares, tmp_path / "plain", quantisation) as plain:
        expected = plain.step(case.tokens, 0)
    some = random_adapter(tmp_path / "adapter", case.model, seed=6)
    zeros = Adapter("", {name: AdapterProduct(own.down, 0 * own.up) for name, own in some.products.items()})
    nothing = Adapter(
        "", {name: AdapterProduct(own.down[:0], own.up[:, :0].copy()) for name, own in some.products.items()}
    )
    with AdaptedSession(case.folder, ENGINES[engine], shares, tmp_path / "slots", quantisation, slots=3) as session:
        for slot, adapter in enumerate((some, zeros, nothing), 1):
            session.load(slot, adapter)
        for slot in (0, 2, 3):
            got = session.adapted(case.tokens, slot)
            np.testing.assert_array_equal(got.view(np.int32), expected.view(np.int32))
            session.sequences.close(0)


@pytest.mark.parametrize("engine", ENGINES)
def test_what_fits_no_slot_is_refused(engine: str, tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=7)
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with AdaptedSession(case.folder, ENGINES[engine], shares, tmp_path / "ranks", slots=2) as session:
        for slot in (0, 3):
            with pytest.raises(EngineError, match=f"no slot {slot} for an adapter; it has 2"):
                session.load(slot, adapter)
            with pytest.raises(EngineError, match=f"no slot {slot}"):
                session.unload(slot)
        (rank,) = session.engines
        span = session.sequences.span(0, 0, 1)._replace(adapter=1)
        hidden = np.zeros((1, case.model.hidden), np.float32)
        with pytest.raises(EngineError, match="has no adapter in slot 1"):
            rank.step(hidden, [span])
        for slot in (-1, 3):
            with pytest.raises(EngineError, match=f"in slot {slot} was asked for; there are 2 slots"):
                rank.step(hidden, [span._replace(adapter=slot)])
        session.load(1, adapter)
        expected = session.adapted(case.tokens, 1)
        part, product = next(iter(adapter.products.items()))
        with pytest.raises(EngineError, match="does not multiply with here"):
            rank.prepare_adapter({part: product})  # type: ignore[attr-defined]
        part = next(iter(session.declared[0].adapted))
        with pytest.raises(EngineError, match=r"should be .* and is float32"):
            rank.prepare_adapter({part: AdapterProduct(product.down[:, 1:].copy(), product.up)})  # type: ignore[attr-defined]
        session.sequences.close(0)
        np.testing.assert_array_equal(session.adapted(case.tokens, 1), expected)
        session.unload(1)
        session.unload(1)
        with pytest.raises(EngineError, match="has no adapter in slot 1"):
            rank.step(hidden, [span])


def test_an_engine_that_cannot_compute_with_adapters_refuses(tmp_path: Path) -> None:
    assert [abilities(each).takes_adapters for each in ("tensorrt", "cuda", *ENGINES)] == [False, True, True, True]
    shares = uneven_shares(units(COMPANY.model, "fp32", 32), 1)
    with pytest.raises(
        EngineError, match=r"engine 'tensorrt' cannot compute with adapters; .* use engine 'onnxruntime', or .* 'cuda'"
    ):
        AdaptedSession(COMPANY.folder, TensorRTEngine, shares, tmp_path)
