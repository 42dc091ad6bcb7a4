"""The reference engine against transformers' logits, at any split; and what it refuses."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.plugins.engine import F32, EngineError, EngineOptions, Span
from motley.plugins.installed import load_engine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.reference.operators import OPERATORS
from tests.models.cases import (
    BLOCKS,
    KINDS,
    TELLING,
    Case,
    LocalSession,
    golden_case,
    golden_cases,
    others_soak,
    splits,
    uneven_shares,
    whole_share,
)
from tests.models.local_group import LocalGroup
from tests.models.nearness import error

TOLERANCE = 1e-4
"""Of the largest logit, between ours in float32 and transformers' in float64."""
FLOAT64: Mapping[str, str] = {"dtype": "float64"}


def session(
    case: Case, folder: Path, ranks: int = 1, quantisation: str = "fp32", extra: Mapping[str, str] | None = None
) -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    options = EngineOptions(extra=extra or {})
    return LocalSession(case.folder, ReferenceEngine, shares, folder, quantisation, options=options)


@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_float64_on_one_rank(case: Case, tmp_path: Path) -> None:
    with session(case, tmp_path, extra=FLOAT64) as ranks:
        rounded = (
            3e-5 if case.recurrent else 5e-6
        )  # what transformers rounds to float32; recurrences it computes in that
        assert error(ranks.step(case.tokens[:-1], 0), case.logits) < rounded


@pytest.mark.parametrize(("case", "count"), splits(0), ids=str)
def test_any_split_gives_the_same_logits_and_text(case: Case, count: int, tmp_path: Path) -> None:
    """A prefill, a decode step and the rest at once: the best token of every row of the answer is the next token."""
    steps = ((0, case.prompt), (case.prompt, case.prompt + 1), (case.prompt + 1, len(case.tokens) - 1))
    with session(case, tmp_path, count) as ranks:
        logits = np.concatenate([ranks.step(case.tokens[start:stop], start) for start, stop in steps])
    assert error(logits, case.logits) < TOLERANCE
    assert logits[case.prompt - 1 :].argmax(axis=1).tolist() == case.tokens[case.prompt :]


@pytest.mark.parametrize("case", others_soak(golden_cases(), TELLING | KINDS), ids=str)
def test_ranks_that_have_nothing_only_take_part(case: Case, tmp_path: Path) -> None:
    """First (where it adds the biases) and last."""
    cut = units(case.model, "fp32", 32)
    whole = whole_share(cut)
    before = Share(1, range(0), range(0), range(0))
    after = Share(1, *(range(own.stop, own.stop) for own in (whole.attention, whole.mlp, whole.vocabulary)))
    with LocalSession(case.folder, ReferenceEngine, [before, whole, after], tmp_path) as ranks:
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
        exact = one.step(case.tokens[:-1], 0)
    for count in (3, 8):
        with session(case, tmp_path / str(count), count, quantisation) as ranks:
            assert error(ranks.step(case.tokens[:-1], 0), exact) < TOLERANCE
    distance = np.linalg.norm(exact - case.logits) / np.linalg.norm(case.logits)
    assert distance < ({"int8": 0.25, "int4": 1.0} if case.model.experts else {"int8": 0.05, "int4": 0.7})[quantisation]


@pytest.mark.parametrize(
    ("case", "chunks"), others_soak(product(golden_cases(), [[1] * 30, [7, 1, 16, 6], [29, 1]])), ids=str
)
def test_chunks_give_what_the_whole_gives(case: Case, chunks: list[int], tmp_path: Path) -> None:
    with session(case, tmp_path, 2) as ranks:
        position = 0
        pieces = []
        for chunk in chunks:
            pieces.append(ranks.step(case.tokens[position : position + chunk], position))
            position += chunk
        assert error(np.concatenate(pieces), case.logits[:30]) < TOLERANCE


def test_only_the_rows_asked_for(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    with session(case, tmp_path, 2) as ranks:
        assert ranks.step(case.tokens[:10], 0, wanted=0).shape == (0, case.model.vocabulary)
        assert error(ranks.step(case.tokens[10:20], 10, wanted=3), case.logits[17:20]) < TOLERANCE


def test_sequences_are_apart_and_can_be_rewound(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    with session(case, tmp_path) as ranks:
        ranks.step(case.tokens[:20], 0, sequence=0)
        ranks.step(case.tokens[20:40], 0, sequence=5)
        ranks.step(case.tokens[5:10], 20, sequence=0)  # a wrong guess, taken back:
        assert error(ranks.step(case.tokens[20:25], 20, sequence=0), case.logits[20:25]) < TOLERANCE


@pytest.mark.parametrize("case", others_soak(golden_cases()), ids=str)
def test_sequences_of_one_step_are_as_if_alone(case: Case, tmp_path: Path) -> None:
    """A chunk of a prompt, a single token, and a prompt's beginning."""
    with session(case, tmp_path, 2) as ranks:
        ranks.step(case.tokens[:9], 0, wanted=0, sequence=0)
        ranks.step(case.tokens[:20], 0, wanted=0, sequence=1)
        places = ((0, 9, 17), (1, 20, 21), (2, 0, 5))
        spans = [ranks.sequences.span(number, start, stop - start, stop - start) for number, start, stop in places]
        logits = ranks.run(spans, [token for _, start, stop in places for token in case.tokens[start:stop]])
    expected = np.concatenate([case.logits[start:stop] for _, start, stop in places])
    assert error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("case", [case for case in golden_cases() if any(case.windows)], ids=str)
def test_a_window_ends_exactly_where_it_should(case: Case, tmp_path: Path) -> None:
    """In one windowed layer, a row sees `window` positions: with the one before them changed it is the same. Of chunks
    it sees its own."""
    window = max(case.windows)
    first = case.attentions[case.windows.index(window)].layer
    attends = ((number, layer.attention) for number, layer in enumerate(case.model.layers))
    chunked = {number for number, attend in attends if attend is not None and attend.chunked}
    with session(case, tmp_path, extra=FLOAT64) as ranks:
        ranks.step(case.tokens[:20], 0, wanted=0)
        engine = ranks.engines[0]
        assert isinstance(engine, ReferenceEngine)
        table = ranks.sequences.tables[0]

        def spoil(kind: str, layer: int, position: int) -> None:
            """Have the caches hold something else of a token."""
            block, place = divmod(position, BLOCKS.tokens)
            engine._caches[f"{kind}_cache.{layer}"]._numbers[table[block], :, place] = 1e3

        def last() -> F32:
            """The logits of a token that recurrent states do not take, as if it were guessed."""
            return ranks.run([ranks.sequences.span(0, 20, 1, 1)._replace(guesses=1)], case.tokens[20:21])

        plain = last()
        for layer, seen in {attend.layer: attend.window for attend in case.attentions}.items():
            for position in range(20 // seen * seen if layer in chunked else 21 - seen if seen else 0):
                spoil("key", layer, position)
                spoil("value", layer, position)
        assert np.array_equal(last(), plain)
        spoil("value", first, 20 // window * window if first in chunked else 21 - window)
        assert not np.array_equal(last(), plain)


def test_a_sequence_is_as_long_as_the_context_and_no_longer(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    context = case.model.context
    with session(case, tmp_path) as ranks:
        tokens = (case.tokens * 3)[:context]
        for position in range(0, context, 32):
            ranks.step(tokens[position : position + 32], position, wanted=0)
        with pytest.raises(EngineError, match=r"positions 128 to 129 do not fit .* in a context of 128"):
            ranks.step(tokens[:1], context)


def test_wrong_calls_are_named(tmp_path: Path) -> None:
    case = golden_case("llama-biases-odd-sizes")
    one = Span(np.array([0], np.int32), 0, 1)
    with session(case, tmp_path) as ranks:
        for spans, tokens, message in (
            ([one], [], r"f32\[1..256, 60\], not f32\[0, 60\]"),
            ([], [1], "1 to 256 spans, not 0"),
            ([one], [1, 2], "the spans have 1 rows, the step has 2"),
            ([one._replace(wanted=2)], [1], "logits of 2 rows were asked for; the span has 1"),
            ([one._replace(position=8)], [1], "positions 8 to 9 do not fit a sequence with 1 blocks of 8 tokens"),
            ([one._replace(position=-1)], [1], "positions -1 to 0 do not fit"),
            ([one._replace(rows=0), one], [1], "positions 0 to 0 do not fit"),
        ):
            with pytest.raises(EngineError, match=message):
                ranks.run(spans, tokens)


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
