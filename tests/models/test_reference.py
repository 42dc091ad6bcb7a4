"""The reference engine against transformers' logits, at any split; and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.plugins.engine import F32, EngineError, EngineOptions, load_engine
from motley.plugins.reference.engine import FIRST_CAPACITY, ReferenceEngine
from motley.plugins.reference.operators import OPERATORS
from tests.models.cases import Case, LocalSession, golden_case, golden_cases, others_soak, uneven_shares, whole_share
from tests.models.local_group import LocalGroup

TOLERANCE = 1e-4
"""Of the largest logit, between ours in float32 and transformers' in float64."""
FLOAT64: Mapping[str, str] = {"dtype": "float64"}

every_case = pytest.mark.parametrize("case", golden_cases(), ids=str)


def session(
    case: Case, folder: Path, ranks: int = 1, quantisation: str = "fp32", extra: Mapping[str, str] | None = None
) -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    options = EngineOptions(extra=extra or {})
    return LocalSession(case.folder, ReferenceEngine, shares, folder, quantisation, options=options)


def error(got: F32, expected: F32) -> float:
    """The largest difference, relative to the largest logit."""
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@every_case
def test_float64_on_one_rank(case: Case, tmp_path: Path) -> None:
    with session(case, tmp_path, extra=FLOAT64) as ranks:
        ranks.open_slot()
        assert error(ranks.step(case.tokens[:-1], 0), case.logits) < 5e-6  # what transformers rounds to float32


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@every_case
def test_any_split_gives_the_same_logits_and_text(case: Case, count: int, tmp_path: Path) -> None:
    """A prefill, a decode step and the rest at once: the best token of every row of the answer is the next token."""
    steps = ((0, case.prompt), (case.prompt, case.prompt + 1), (case.prompt + 1, len(case.tokens) - 1))
    with session(case, tmp_path, count) as ranks:
        ranks.open_slot()
        logits = np.concatenate([ranks.step(case.tokens[start:stop], start) for start, stop in steps])
    assert error(logits, case.logits) < TOLERANCE
    assert logits[case.prompt - 1 :].argmax(axis=1).tolist() == case.tokens[case.prompt :]


@every_case
def test_ranks_that_have_nothing_only_take_part(case: Case, tmp_path: Path) -> None:
    """First (where it adds the biases) and last."""
    cut = units(case.model, "fp32", 32)
    whole = whole_share(cut)
    before = Share(1, range(0), range(0), range(0))
    after = Share(1, *(range(own.stop, own.stop) for own in (whole.attention, whole.mlp, whole.vocabulary)))
    with LocalSession(case.folder, ReferenceEngine, [before, whole, after], tmp_path) as ranks:
        ranks.open_slot()
        assert error(ranks.step(case.tokens[:20], 0), case.logits[:20]) < TOLERANCE


def test_splits_include_empty_shares_and_repeated_kv_heads() -> None:
    """The splits above are as odd as they claim to be."""
    shares = [share for case in golden_cases() for share in uneven_shares(units(case.model, "fp32", 32), 8)]
    assert any(not share.attention and share.mlp for share in shares)
    assert any(share.attention and not share.mlp for share in shares)
    assert any(not share.vocabulary for share in shares)
    assert any(share.attention_split > 1 and share.attention.start % share.attention_split for share in shares)


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("case", others_soak(case for case in golden_cases() if case.model.hidden % 16 == 0), ids=str)
def test_quantised_values_do_not_depend_on_the_split(case: Case, quantisation: str, tmp_path: Path) -> None:
    """Against the float64 forward pass of the same quantised weights; against unquantised ones, loosely.

    Matrices as small and as random as these suffer far more from quantisation than a trained model's, and rows meet
    other experts.
    """
    with session(case, tmp_path / "one", 1, quantisation, FLOAT64) as one:
        one.open_slot()
        exact = one.step(case.tokens[:-1], 0)
    for count in (3, 8):
        with session(case, tmp_path / str(count), count, quantisation) as ranks:
            ranks.open_slot()
            assert error(ranks.step(case.tokens[:-1], 0), exact) < TOLERANCE
    distance = np.linalg.norm(exact - case.logits) / np.linalg.norm(case.logits)
    assert distance < ({"int8": 0.2, "int4": 1.0} if case.model.experts else {"int8": 0.05, "int4": 0.7})[quantisation]


@pytest.mark.parametrize("chunks", [[1] * 30, [7, 1, 16, 6], [29, 1]])
@pytest.mark.parametrize("case", others_soak(golden_cases()), ids=str)
def test_chunks_give_what_the_whole_gives(case: Case, chunks: list[int], tmp_path: Path) -> None:
    with session(case, tmp_path, 2) as ranks:
        ranks.open_slot()
        position = 0
        pieces = []
        for chunk in chunks:
            pieces.append(ranks.step(case.tokens[position : position + chunk], position))
            position += chunk
        assert error(np.concatenate(pieces), case.logits[:30]) < TOLERANCE


def test_only_the_rows_asked_for(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    with session(case, tmp_path, 2) as ranks:
        ranks.open_slot()
        assert ranks.step(case.tokens[:10], 0, rows=[]).shape == (0, case.model.vocabulary)
        assert error(ranks.step(case.tokens[10:20], 10, rows=[9, 0, 4]), case.logits[[19, 10, 14]]) < TOLERANCE


def test_slots_are_apart_and_can_be_rewound(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    with session(case, tmp_path) as ranks:
        ranks.open_slot(0)
        ranks.open_slot(5)
        ranks.step(case.tokens[:20], 0, slot=0)
        ranks.step(case.tokens[20:40], 0, slot=5)
        ranks.step(case.tokens[5:10], 20, slot=0)  # a wrong guess, taken back:
        assert error(ranks.step(case.tokens[20:25], 20, slot=0), case.logits[20:25]) < TOLERANCE
        with pytest.raises(EngineError, match="positions 26 to 27 do not fit slot 0: it holds 25 tokens"):
            ranks.step(case.tokens[:1], 26, slot=0)


@pytest.mark.parametrize("case", [case for case in golden_cases() if any(case.windows)], ids=str)
def test_a_window_ends_exactly_where_it_should(case: Case, tmp_path: Path) -> None:
    """In one windowed layer, a row sees `window` positions: with the one before them changed it is the same."""
    window = max(case.windows)
    first = case.windows.index(window)
    with session(case, tmp_path, extra=FLOAT64) as ranks:
        ranks.open_slot()
        ranks.step(case.tokens[:20], 0, rows=[])
        engine = ranks.engines[0]
        assert isinstance(engine, ReferenceEngine)
        caches = engine._slots[0].caches
        plain = ranks.step(case.tokens[20:21], 20)
        for layer, seen in enumerate(case.windows):
            for kind in ("key", "value"):
                caches[f"{kind}_cache.{layer}"] = caches[f"{kind}_cache.{layer}"].copy()
                if seen:
                    caches[f"{kind}_cache.{layer}"][:, :, : 21 - seen] = 1e3
        engine._slots[0].caches = caches
        assert np.array_equal(ranks.step(case.tokens[20:21], 20), plain)
        caches[f"value_cache.{first}"][:, :, 21 - window] = 1e3
        engine._slots[0].caches = caches
        assert not np.array_equal(ranks.step(case.tokens[20:21], 20), plain)


def test_the_cache_grows_to_the_context_and_no_further(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    context = case.model.context
    assert context > FIRST_CAPACITY
    with session(case, tmp_path) as ranks:
        ranks.open_slot()
        tokens = (case.tokens * 3)[:context]
        for position in range(0, context, 32):
            ranks.step(tokens[position : position + 32], position, rows=[])
        with pytest.raises(EngineError, match="it holds 128 tokens of at most 128"):
            ranks.step(tokens[:1], context)


def test_wrong_calls_are_named(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    with session(case, tmp_path) as ranks:
        with pytest.raises(EngineError, match="slot 0 is not open"):
            ranks.step(case.tokens[:1], 0)
        with pytest.raises(EngineError, match="slot 3 is not open"):
            ranks.close_slot(3)
        ranks.open_slot()
        with pytest.raises(EngineError, match="slot 0 is open already"):
            ranks.open_slot()
        with pytest.raises(EngineError, match=r"f32\[1..256, 60\], not f32\[0, 60\]"):
            ranks.step([], 0)
        with pytest.raises(EngineError, match="the step has 2 rows"):
            ranks.step(case.tokens[:2], 0, rows=[2])


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"dtype": "float16"}, "'float16'"), ({"speed": "high"}, "no option speed; it has: dtype, device")],
)
def test_wrong_options_are_named(extra: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=message):
        session(golden_case("llama-biases-odd-sizes"), tmp_path, extra=extra)


def test_what_it_cannot_execute_is_named_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPERATORS, "Swish")
    with pytest.raises(EngineError, match=r"no operator \.Swish \(layers\.0\.mlp"):
        session(golden_case("llama-biases-odd-sizes"), tmp_path)


def test_a_group_of_another_size_is_refused(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    with session(case, tmp_path, 2) as ranks:
        graph = ranks.graphs[0]
        with pytest.raises(EngineError, match=r"among 3 ranks"):
            ReferenceEngine(graph, LocalGroup(3).member(0), EngineOptions())


def test_it_is_installed_as_an_engine() -> None:
    assert load_engine("reference") is ReferenceEngine


def test_the_whole_model_is_one_share() -> None:
    case = golden_case("llama-biases-odd-sizes")
    assert uneven_shares(units(case.model, "fp32", 32), 1) == [whole_share(units(case.model, "fp32", 32))]
