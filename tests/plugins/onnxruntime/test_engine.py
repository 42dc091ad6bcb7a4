"""The ONNX Runtime engine: transformers' logits at any split in fp32, stated bounds when quantised, and its limits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import motley.cli
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import Model, expected_shapes
from motley.daemon.models.description.operations.experts import Route
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.reading import read_model
from motley.plugins.engine import F32, CacheBlocks, EngineError, EngineFactory, EngineOptions, Span
from motley.plugins.installed import load_engine
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.onnxruntime.experts import BoundMixture, _LocalExpert
from motley.plugins.onnxruntime.sessions import Threads, Workshop
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.segments import Segment
from tests.models.cases import (
    Case,
    LocalSession,
    golden_case,
    golden_cases,
    others_soak,
    splits,
    uneven_shares,
    whole_share,
)
from tests.models.nearness import error
from tests.pairs import pairwise

FP32_TOLERANCE = 1e-4
"""Of the largest logit, between ours and transformers' in float64."""
QUANTISED_TOLERANCE = 0.05
"""Relative RMS, between the runtime, which quantises activations to int8 per block, and float64 with equal weights.

Tiny random models have few blocks for rounding to average out over.
"""
EXPERTS_TOLERANCE = 0.1
"""The same where that rounding sends a few rows to other experts, of all but the tenth of rows that are off most."""
RECURRENT_FACTOR = 3
"""Recurrent states keep what rounding did to earlier rows."""
GROUPS_TOLERANCE = 0.4
"""The same where experts are in groups: a row that goes to another group meets other experts altogether; and where
positions are chosen: a row may see others."""
BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"

PLAIN = golden_case("llama-mha")
ONE = Span(np.array([0], np.int32), position=0, rows=1)


def session(
    case: Case,
    folder: Path,
    ranks: int = 1,
    *,
    factory: EngineFactory = OnnxRuntimeEngine,
    quantisation: str = "fp32",
    options: EngineOptions | None = None,
) -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    return LocalSession(case.folder, factory, shares, folder, quantisation, options=options)


def assert_near(case: Case, got: F32, expected: F32) -> None:
    """Of a quantised model, logits f32[T, V] are near those in float64, by the norm of rows."""
    routes = [each.routing for each in case.model.operations if isinstance(each, Route)]
    off = np.sort(np.linalg.norm(got - expected, axis=1))
    tolerance = QUANTISED_TOLERANCE
    if case.chooses or any(routing.groups_kept < routing.groups for routing in routes):
        tolerance = GROUPS_TOLERANCE
    elif routes:
        tolerance = EXPERTS_TOLERANCE
        off = off[: len(off) * 9 // 10]
    if case.recurrent and tolerance < GROUPS_TOLERANCE:
        tolerance *= RECURRENT_FACTOR
    assert np.linalg.norm(off) < tolerance * np.linalg.norm(expected)


def greedy(ranks: LocalSession, prompt: list[int], count: int) -> list[int]:
    """The prompt and `count` tokens after it, decoded one by one."""
    tokens = list(prompt)
    logits = ranks.step(tokens, 0, wanted=1)
    for _ in range(count - 1):
        tokens.append(int(logits[0].argmax()))
        logits = ranks.decode([0], tokens[-1:], [len(tokens) - 1])
    tokens.append(int(logits[0].argmax()))
    ranks.sequences.close(0)
    return tokens


@pytest.mark.parametrize(("case", "count"), splits(1), ids=str)
def test_any_split_gives_the_same_logits_and_text(case: Case, count: int, tmp_path: Path) -> None:
    with session(case, tmp_path, count) as ranks:
        assert error(ranks.step(case.tokens[:-1], 0), case.logits) < FP32_TOLERANCE
        ranks.sequences.close(0)
        assert greedy(ranks, case.tokens[: case.prompt], len(case.tokens) - case.prompt) == case.tokens


@pytest.mark.parametrize(
    ("case", "quantisation", "count"), others_soak(pairwise(golden_cases(), ["int8", "int4"], [2, 3, 8])), ids=str
)
def test_quantised_against_float64_at_any_split(case: Case, quantisation: str, count: int, tmp_path: Path) -> None:
    try:
        units(case.model, quantisation, 32)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    float64 = EngineOptions(extra={"dtype": "float64"})
    with session(case, tmp_path / "64", factory=ReferenceEngine, quantisation=quantisation, options=float64) as ranks:
        expected = ranks.step(case.tokens[:-1], 0)
    tokens, alone = case.tokens[:-1], 8  # many in one step, and some by themselves
    for size in (1, count):
        with session(case, tmp_path / str(size), size, quantisation=quantisation) as ranks:
            logits = [ranks.step(tokens[:-alone], 0)]
            logits += [ranks.decode([0], [tokens[at]], [at]) for at in range(len(tokens) - alone, len(tokens))]
            assert_near(case, np.concatenate(logits), expected)


@pytest.mark.parametrize("name", ["deepseek-v32", "hy-v4", "minimax-m3"])
def test_what_rows_see_depends_on_no_chunk_no_company_and_no_guess(name: str, tmp_path: Path) -> None:
    """To the bit, where positions are chosen and matrices are quantised; prefixes are those of another sequence."""
    case = golden_case(name)
    tokens = case.tokens[:-1]
    with session(case, tmp_path, quantisation="int8") as ranks:
        whole = ranks.step(tokens, 0)
        cuts = [0, 7, 23, 24, 25, 41, len(tokens)]
        pieces = [ranks.step(tokens[start:stop], start, sequence=1) for start, stop in itertools.pairwise(cuts)]
        assert np.array_equal(np.concatenate(pieces), whole)
        ranks.sequences.close(1)
        ranks.step(tokens[:30], 0, sequence=1)
        spans = [
            ranks.sequences.span(number, at, stop - at, stop - at) for number, at, stop in ((1, 30, 44), (2, 0, 40))
        ]
        beside = ranks.run(spans, [*tokens[30:44], *tokens[:40]])
        assert np.array_equal(beside, np.concatenate([whole[30:44], whole[:40]]))
        ranks.sequences.tables[3] = ranks.sequences.tables[1][:3]
        ranks.step(tokens[:9], 24, sequence=3)  # guesses that are wrong
        assert np.array_equal(ranks.step(tokens[24:28], 24, sequence=3), whole[24:28])
        assert np.array_equal(ranks.step(tokens[28:], 28, sequence=3), whole[28:])


def test_a_step_whose_rows_see_everything_makes_nothing_to_choose_by(tmp_path: Path) -> None:
    """But index keys, which later rows will need."""
    case = golden_case("deepseek-v32")
    with session(case, tmp_path, quantisation="int8") as ranks:
        engine = ranks.engines[0]
        assert isinstance(engine, OnnxRuntimeEngine)
        made = {name.split(".", 2)[2] for name in engine._for_choices if name.startswith("layers.0.")}
        assert {"attention.index.q", "attention.index.weights"} <= made
        assert not any(name.startswith(("attention.index.k", "attention.q_latent")) for name in made)
        ranks.step(case.tokens[:24], 0)
        assert not engine._choosing
        ranks.step(case.tokens[24:25], 24)
        assert engine._choosing


@pytest.mark.parametrize("case", others_soak(golden_cases()), ids=str)
def test_chunks_give_what_the_whole_prompt_gives(case: Case, tmp_path: Path) -> None:
    with session(case, tmp_path) as ranks:
        whole = ranks.step(case.tokens[:-1], 0)
        for start, stop in ((0, 1), (1, 8), (8, 9), (9, len(case.tokens) - 1)):
            got = ranks.step(case.tokens[start:stop], start, sequence=1)
            assert error(got, whole[start:stop]) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("case", "quantisation", "exact", "count"),
    others_soak(
        (case, *way)
        for case in golden_cases()
        for way in [("fp32", False, 1), ("fp32", True, 3), ("int4", True, 2), ("int8", False, 2), ("int4", False, 3)]
    ),
    ids=str,
)
def test_sequences_decoded_together_get_what_each_gets_alone(
    case: Case, quantisation: str, exact: bool, count: int, tmp_path: Path
) -> None:
    """Of different lengths, in changing company: the same bits where rows do not depend on each other."""
    try:
        cut = units(case.model, quantisation, 32, exact=exact)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    lengths = (3, 9, 5)
    company = [(0, 1, 2), (2, 0), (1,), (0, 1, 2), (2, 1)]
    options = EngineOptions(exact=exact)
    shares = uneven_shares(cut, count)
    with LocalSession(
        case.folder, OnnxRuntimeEngine, shares, tmp_path, quantisation, options=options, exact=exact
    ) as ranks:
        for number, length in enumerate(lengths):
            for own in (number, number + 10):
                ranks.step(case.tokens[:length], 0, wanted=0, sequence=own)
        at = list(lengths)
        for numbers in company:
            tokens = [case.tokens[at[number]] for number in numbers]
            positions = [at[number] for number in numbers]
            together = ranks.decode(numbers, tokens, positions)
            for row, number, token, position in zip(together, numbers, tokens, positions, strict=True):
                alone = ranks.decode([number + 10], [token], [position])[0]
                if exact or quantisation != "fp32":
                    np.testing.assert_array_equal(row, alone)
                else:
                    assert error(row, alone) < FP32_TOLERANCE
                at[number] += 1


def test_where_blocks_lie_and_how_long_they_are_leaves_no_trace(tmp_path: Path) -> None:
    """A prompt's two chunks and decoded tokens: in blocks one after another, backwards and shuffled."""
    context = 131
    tokens = [index * 37 % 1024 for index in range(context)]
    shares = [whole_share(units(read_model(BUNDLED), "int8", 32))]
    expected: list[F32] = []
    for size in (1, 5, 32, context):
        blocks = CacheBlocks(ceil(context / size) + 3, size)
        with LocalSession(BUNDLED, OnnxRuntimeEngine, shares, tmp_path / str(size), "int8", blocks=blocks) as ranks:
            numbers = np.arange(blocks.count, dtype=np.int32)
            for table in (numbers, numbers[::-1].copy(), np.random.default_rng(0).permutation(numbers)):
                got = []
                for start, stop in ((0, 70), (70, 128), (128, 129), (129, 130), (130, 131)):
                    got.append(ranks.run([Span(table, start, stop - start, stop - start)], tokens[start:stop]))
                expected = expected or got
                for one, other in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("exact", [False, True])
def test_what_others_have_left_in_a_sequence_s_blocks_does_not_show(exact: bool, tmp_path: Path) -> None:
    """Longer sequences, and one whose values are no numbers."""
    case = PLAIN
    shares = uneven_shares(units(case.model, "fp32", 32, exact=exact), 2)
    options = EngineOptions(exact=exact)
    with LocalSession(case.folder, OnnxRuntimeEngine, shares, tmp_path, options=options, exact=exact) as ranks:
        fresh = ranks.step(case.tokens[:20], 0, sequence=0)
        table = ranks.sequences.tables[0]
        ranks.step(case.tokens[40:60], 0)
        ranks.step(case.tokens[:20], 20)
        ranks.sequences.close(0)
        for engine in ranks.engines:
            assert isinstance(engine, OnnxRuntimeEngine)
            for blocks in engine._blocks.values():
                blocks[table[2:]] = np.nan  # of which the last has a token of the 20
        ranks.sequences.tables[1] = table
        np.testing.assert_array_equal(ranks.step(case.tokens[:20], 0, sequence=1), fresh)


@pytest.mark.parametrize("factory", [OnnxRuntimeEngine, ReferenceEngine])
def test_sequences_of_one_step_have_rotary_tables_of_their_own(factory: EngineFactory, tmp_path: Path) -> None:
    """Of prompts longer than what an embedding was made for, for which it is stretched, and shorter ones."""
    case = golden_case("phi3-longrope")
    shares = [whole_share(units(case.model, "int8", 32))]
    with LocalSession(case.folder, factory, shares, tmp_path, "int8") as ranks:
        assert [ranks.graphs[0].same_tables(prompt) for prompt in (32, 33, 41)] == [0, 33, 33]
        places = ((40, 33, 41), (20, 20, 21), (36, 0, 30), (20, 5, 19))

        def span(sequence: int, start: int, stop: int, prompt: int) -> Span:
            return ranks.sequences.span(sequence, start, stop - start, stop - start)._replace(prompt=prompt)

        def alone(sequence: int, start: int, stop: int, prompt: int) -> F32:
            return ranks.run([span(sequence, start, stop, prompt)], case.tokens[start:stop])

        expected = [alone(10 + at, 0, stop, prompt)[start:] for at, (prompt, start, stop) in enumerate(places)]
        other = [alone(20 + at, 0, stop, 60 - prompt)[start:] for at, (prompt, start, stop) in enumerate(places)]
        for at, (prompt, start, _) in enumerate(places):
            if start:
                alone(at, 0, start, prompt)
        tokens = [token for _, start, stop in places for token in case.tokens[start:stop]]
        spans = [span(at, start, stop, prompt) for at, (prompt, start, stop) in enumerate(places)]
        together = np.split(ranks.run(spans, tokens), np.cumsum([span.rows for span in spans])[:-1])
        for got, right, wrong in zip(together, expected, other, strict=True):
            assert error(got, right) < FP32_TOLERANCE < error(wrong, right)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("family", "heads", "head_dim"), [("llama", 8, 16), ("qwen3", 8, 16), ("llama", 2, 16), ("llama", 4, 8)]
)
def test_decoded_tokens_of_every_kind_of_head(
    family: str, heads: int, head_dim: int, ranks: int, tmp_path: Path
) -> None:
    """Heads in groups, alone, with normalised queries, and of a width that the runtime has no kernel for."""
    settings = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": 64,
        "max_position_embeddings": 512,
    }
    config = random_model(tmp_path, settings)
    length, decoded = 132, 8
    tokens = [index * 37 % 64 for index in range(length)]
    whole = units(config, "fp32", 32)
    float64 = EngineOptions(extra={"dtype": "float64"})
    with LocalSession(tmp_path, ReferenceEngine, [whole_share(whole)], tmp_path / "64", options=float64) as reference:
        expected = reference.step(tokens, 0)[-decoded:]
    with LocalSession(tmp_path, OnnxRuntimeEngine, uneven_shares(whole, ranks), tmp_path / "32") as session:
        session.step(tokens[:-decoded], 0, wanted=0)
        for position, row in enumerate(expected, length - decoded):
            assert error(session.decode([0], [tokens[position]], [position])[0], row) < FP32_TOLERANCE


def random_model(folder: Path, settings: dict[str, Any]) -> Model:
    """Write a model folder with random weights."""
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = read_model(folder)
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, 0.3, shape) for name, shape in expected_shapes(config).items()}
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, folder / "model.safetensors")
    return config


def test_a_window_and_a_stretched_rope_beyond_4096_positions(tmp_path: Path) -> None:
    """A prompt in chunks, its first tokens left behind by the first layer's window: float64's last rows."""
    settings: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
        "use_sliding_window": True,
        "sliding_window": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    chunk, length = 512, 5000

    def last_rows(window: int, factory: EngineFactory, **extra: str) -> F32:
        model = tmp_path / f"{factory.__name__} {window}"
        model.mkdir()
        config = random_model(model, settings | {"sliding_window": window})
        tokens = np.random.default_rng(0).integers(0, 64, length).tolist()
        shares = [whole_share(units(config, "fp32", 32))]
        options = EngineOptions(max_rows=chunk, extra=extra)
        blocks = CacheBlocks(ceil(length / 64), 64)
        with LocalSession(model, factory, shares, model, options=options, context=length, blocks=blocks) as ranks:
            for position in range(0, length - 8, chunk):
                ranks.step(tokens[position : min(position + chunk, length - 8)], position, wanted=0)
            return ranks.step(tokens[-8:], length - 8)

    got = last_rows(4096, OnnxRuntimeEngine)
    assert error(got, last_rows(4096, ReferenceEngine, dtype="float64")) < FP32_TOLERANCE
    assert error(got, last_rows(length, OnnxRuntimeEngine)) > 10 * FP32_TOLERANCE


def test_heads_that_are_no_multiple_of_16(tmp_path: Path) -> None:
    """The attention kernel does not take them: the function's body must be what the reference computes."""
    settings = {
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = read_model(tmp_path)
    attend = config.layers[0].attention
    assert attend is not None
    assert attend.heads.size == 24
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, 0.3, shape) for name, shape in expected_shapes(config).items()}
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, tmp_path / "model.safetensors")
    rows = []
    for factory in (OnnxRuntimeEngine, ReferenceEngine):
        shares = [whole_share(units(config, "fp32", 32))]
        with LocalSession(tmp_path, factory, shares, tmp_path / factory.__name__) as ranks:
            rows.append(ranks.step(list(range(20)), 0))
    assert error(*rows) < FP32_TOLERANCE


def test_a_token_runs_only_the_experts_that_it_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in golden_cases() if str(case) == "qwen2-moe")
    experts = case.model.experts
    assert experts
    chosen = experts.chosen.axis.size
    ran: list[object] = []
    run = _LocalExpert.__call__

    def note(expert: _LocalExpert, x: F32) -> F32:
        ran.append(expert)
        return run(expert, x)

    monkeypatch.setattr(_LocalExpert, "__call__", note)
    with session(case, tmp_path) as ranks:
        ranks.decode([0], case.tokens[:1], [0])
        assert len(ran) == chosen * len(case.model.expert_layers)
        assert len(set(map(id, ran))) == len(ran)


def test_one_call_computes_the_experts_of_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of experts that are computed one by one, as those of many rows are, and those of adapters."""
    case = next(case for case in golden_cases() if str(case) == "gpt-oss")

    def steps(folder: Path) -> list[F32]:
        with session(case, folder, 2, quantisation="int4") as ranks:
            return [ranks.step(case.tokens[:7], 0), *(ranks.step([token], 7 + i) for i, token in enumerate((5, 6, 7)))]

    with monkeypatch.context() as patch:
        patch.setattr(BoundMixture, "together", lambda _: None)
        apart = steps(tmp_path / "apart")
    monkeypatch.setattr(BoundMixture, "add", lambda _: pytest.fail("an expert is computed by itself"))
    for got, wanted in zip(steps(tmp_path / "together"), apart, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(("quantisation", "block"), [("fp32", 32), ("int8", 32), ("int4", 32), ("int4", 128)])
def test_experts_give_the_same_bits_in_chunks_of_any_size(quantisation: str, block: int, tmp_path: Path) -> None:
    """Rows that have an expert for themselves in one chunk, and others beside them in another."""
    settings = {
        "model_type": "qwen2_moe",
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    config = random_model(tmp_path, settings)
    tokens = [index * 37 % 64 for index in range(55)]
    shares = uneven_shares(units(config, quantisation, block), 2)
    with LocalSession(tmp_path, OnnxRuntimeEngine, shares, tmp_path, quantisation, block) as ranks:
        whole = ranks.step(tokens, 0)
        np.testing.assert_array_equal(ranks.step(tokens, 0, sequence=1, halved=True), whole)
        for start, stop in ((0, 6), (6, 22), (22, 24), (24, 55)):
            got = ranks.step(tokens[start:stop], start, sequence=2)
            np.testing.assert_array_equal(got, whole[start:stop])


def test_sequences_do_not_see_each_other_and_can_go_back(tmp_path: Path) -> None:
    case = golden_cases()[0]
    with session(case, tmp_path, 2) as ranks:
        for position, token in enumerate(case.tokens[:6]):
            ranks.step([token], position, sequence=0)
            ranks.step([case.tokens[position + 6]], position, sequence=1)
        assert error(ranks.step(case.tokens[6:7], 6, sequence=0), case.logits[6:7]) < FP32_TOLERANCE
        assert error(ranks.step(case.tokens[3:5], 3, sequence=0), case.logits[3:5]) < FP32_TOLERANCE


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda ranks: ranks.step([1] * 5, 0), "a step takes f32.1..4, "),
        (lambda ranks: ranks.step([1], 8), "positions 8 to 9 do not fit .* in a context of 8"),
        (lambda ranks: ranks.run([], [1]), "1 to 4 spans, not 0"),
        (lambda ranks: ranks.run([ONE] * 5, [1] * 4), "1 to 4 spans, not 5"),
        (lambda ranks: ranks.run([ONE, ONE], [1]), "the spans have 2 rows, the step has 1"),
        (lambda ranks: ranks.run([ONE._replace(wanted=2)], [1]), "logits of 2 rows were asked for; the span has 1"),
        (lambda ranks: ranks.run([ONE._replace(position=4)], [1]), "a sequence with 1 blocks of 4 tokens"),
        (lambda ranks: ranks.run([ONE._replace(blocks=np.array([2], np.int32))], [1]), "failed in a step: .*blocks"),
    ],
)
def test_misuse_is_named(misuse: Callable[[LocalSession], object], words: str, tmp_path: Path) -> None:
    case = golden_cases()[0]
    shares = [whole_share(units(case.model, "fp32", 32))]
    given: dict[str, Any] = {"options": EngineOptions(max_rows=4), "context": 8, "blocks": CacheBlocks(2, 4)}
    with LocalSession(case.folder, OnnxRuntimeEngine, shares, tmp_path, **given) as ranks:
        ranks.sequences.tables[0] = [1, 0, 1]
        with pytest.raises(EngineError, match=words):
            misuse(ranks)


def test_exact_steps_are_taken_whole(tmp_path: Path) -> None:
    shares = [whole_share(units(PLAIN.model, "fp32", 32, exact=True))]
    options = EngineOptions(exact=True)
    with (
        LocalSession(PLAIN.folder, OnnxRuntimeEngine, shares, tmp_path, options=options, exact=True) as ranks,
        pytest.raises(EngineError, match="takes no step in halves with exact=true"),
    ):
        ranks.step(PLAIN.tokens[:40], 0, halved=True)


def test_unknown_settings_and_engines_are_refused(tmp_path: Path) -> None:
    case = golden_cases()[0]
    with pytest.raises(EngineError, match="has no option tpyo; it has: none"):
        session(case, tmp_path, options=EngineOptions(extra={"tpyo": "1"}))
    with pytest.raises(EngineError, match="'abacus'; installed: cuda, onnxruntime, onnxruntime-cuda, "):
        load_engine("abacus")


def test_another_number_of_threads_in_the_same_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.plugins.onnxruntime.sessions._pool", [3])
    for threads in (1, 2):
        with pytest.raises(EngineError, match=f"cannot have threads={threads} in a process where .* threads=3"):
            session(golden_cases()[0], tmp_path / str(threads), options=EngineOptions(threads=threads))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "hunyuan-dense", "granite"])
def test_a_layer_needs_no_session_of_the_runtime(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of heads, and what a residual is multiplied by, are kernels of ours: a session takes longer."""
    opened: list[set[str]] = []
    make = Workshop._open

    def noted(self: Workshop, segment: Segment) -> Any:
        opened.append({node.op_type for node in segment.nodes})
        return make(self, segment)

    monkeypatch.setattr(Workshop, "_open", noted)
    with session(golden_case(name), tmp_path, quantisation="int4"):
        # What scales embeddings, the last sum, the rows that get logits, and what scales these.
        assert all(operations <= {"Mul", "Add", "Gather", "Tanh"} for operations in opened)
        assert len(opened) <= 4


@pytest.mark.parametrize(("quantisation", "multiplies"), [("int4", False), ("int8", False), ("fp32", True)])
def test_the_runtime_has_threads_where_it_multiplies(
    quantisation: str, multiplies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []

    def threads(count: int, multiplies: bool) -> Threads:
        said.append(multiplies)
        return Threads(count, multiplies)

    monkeypatch.setattr("motley.plugins.onnxruntime.engine.Threads", threads)
    with session(PLAIN, tmp_path, quantisation=quantisation):
        assert said == [multiplies]


def test_threads_of_products_alone_need_no_pool_of_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr("onnxruntime.set_global_thread_pool_sizes", lambda intra, inter: sizes.append(intra))
    pool: list[int] = []
    monkeypatch.setattr("motley.plugins.onnxruntime.sessions._pool", pool)
    for count, multiplies, shares in ((2, False, False), (3, True, False)):  # the first decides
        threads = Threads(count, multiplies)
        assert threads.shares_pool is shares
        threads.close()
    assert not sizes
    pool.clear()
    threads = Threads(2, multiplies=True)
    assert threads.shares_pool
    threads.close()
    assert sizes == [2]


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        (RuntimeError("6 : RUNTIME_EXCEPTION : std::bad_alloc"), MemoryError, "bad_alloc"),
        (RuntimeError("BFCArena: Failed to allocate memory for requested buffer"), MemoryError, "Failed to allocate"),
        (MemoryError("std::bad_alloc"), MemoryError, "bad_alloc"),
        (RuntimeError("no such kernel"), EngineError, "the part of the graph from 'layers.0.*' on: no such kernel"),
    ],
)
def test_a_session_that_cannot_be_made_is_named(
    said: Exception, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise said

    monkeypatch.setattr("onnxruntime.InferenceSession", refuse)
    with pytest.raises(error, match=words):
        session(PLAIN, tmp_path)
