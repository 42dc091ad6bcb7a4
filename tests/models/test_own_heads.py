"""Heads that predict a token further ahead: what they compute, what the model hands them, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe, read_model
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.plugins.engine import F32, EngineFactory
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.adapters.adapted import AdaptedSession, random_adapter
from tests.models.cases import LocalSession, golden_case, uneven_shares, whole_share
from tests.models.own_heads import HEADS, Ahead, ahead_by_the_book, head_of, tensors_of, write
from tests.models.test_embeddings import STATES
from tests.models.to_gguf import to_gguf

declare = partial(build_rank_graph, hands=True)


class HeadSession(LocalSession):
    """A head on one rank; its rows enter beside the embeddings."""

    given: F32

    def rows(self, spans: Any, tokens: Any) -> F32:
        return np.concatenate([super().rows(spans, tokens), self.given], axis=1)


@pytest.mark.parametrize("engine", [ReferenceEngine, OnnxRuntimeEngine])
@pytest.mark.parametrize("ahead", HEADS, ids=str)
def test_a_head_computes_what_is_written_of_it(ahead: Ahead, engine: EngineFactory, tmp_path: Path) -> None:
    """In pieces, and again from the middle with other rows, as where the model's rows come after the head's own."""
    head, tokens = head_of(ahead), ahead.case.tokens[1:13]
    given = np.random.default_rng(1).normal(size=(len(tokens), ahead.case.model.hidden)).astype(np.float32)
    logits, handed = ahead_by_the_book(ahead, head, given.astype(np.float64), tokens, tmp_path / "longer")
    folder = write(tmp_path / "model", ahead.case, tensors_of(ahead.case) | head)
    with open_model(folder, ahead=True) as opened:
        shares = [whole_share(units(opened.model, "fp32", 32))]
        with HeadSession(opened, engine, shares, tmp_path / "share", declare=declare) as session:
            got = []
            for begin, end, rows in ((0, 7, given), (7, 9, given[::-1]), (7, 8, given), (8, len(tokens), given)):
                session.given = rows[begin:end]
                got.append(session.step(tokens[begin:end], begin))
    made = np.concatenate([got[0], *got[2:]])
    expected = np.concatenate([logits, handed], axis=1)
    for own, other in zip(np.split(made, [logits.shape[1]], axis=1), (logits, handed), strict=True):
        assert np.abs(own - other).max() < 1e-4 * np.abs(other).max()
    assert not np.allclose(got[1][0], expected[7], atol=0.1), "rows matter"


@pytest.mark.parametrize("engine", [ReferenceEngine, OnnxRuntimeEngine])
@pytest.mark.parametrize("name", ["qwen3-next", "gemma3-softcaps"])
def test_a_rank_hands_what_the_model_has_made(name: str, engine: EngineFactory, tmp_path: Path) -> None:
    """Behind its own logits, which are the same, be they capped; also a rank that has no words."""
    case, states = golden_case(name), STATES[name]
    shares = uneven_shares(units(case.model, "fp32", 32), 3)
    assert [bool(share.vocabulary) for share in shares] == [True, False, True]
    with LocalSession(case.folder, engine, shares, tmp_path, declare=declare) as ranks:
        got = np.concatenate([ranks.step(case.tokens[:20], 0), ranks.step(case.tokens[20:-1], 20)])
        ends = np.cumsum([graph.vocabulary for graph in ranks.graphs])
    logits, handed = [], []
    for own in np.split(got, ends[:-1], axis=1):
        logits.append(own[:, : -case.model.hidden])
        handed.append(own[:, -case.model.hidden :])
        assert np.array_equal(handed[0], handed[-1])
    assert np.abs(np.concatenate(logits, axis=1) - case.logits).max() < 1e-4 * np.abs(case.logits).max()
    assert np.abs(handed[0] - states[:-1]).max() < 1e-4 * np.abs(states).max()


@pytest.mark.parametrize("name", ["llama-mha", "gemma3-softcaps"])
def test_what_is_handed_changes_no_bit_of_quantised_logits(name: str, tmp_path: Path) -> None:
    """Where products are the engine's own kernels, logits cross into what puts the row behind them."""
    case, hidden = golden_case(name), golden_case(name).model.hidden
    shares = uneven_shares(units(case.model, "int8", 32), 3)
    got = []
    for how in ({}, {"hands": True}, {"embeds": True}):
        folder, made = tmp_path / "-".join(["plain", *how]), partial(build_rank_graph, **how)
        with LocalSession(case.folder, OnnxRuntimeEngine, shares, folder, "int8", declare=made) as ranks:
            prompt = ranks.step(case.tokens[:20], 0)
            rows = np.concatenate([prompt, *(ranks.step([case.tokens[at]], at) for at in range(20, 24))])
            got.append(np.split(rows, np.cumsum([graph.vocabulary for graph in ranks.graphs])[:-1], axis=1))
    for plain, both, row in zip(*got, strict=True):
        assert np.array_equal(both, np.concatenate([plain, row], axis=1))
        assert row.shape[1] == hidden


@pytest.mark.parametrize("quantisation", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["llama-mqa", "gemma3-softcaps"])
def test_what_is_handed_changes_no_bit_of_logits_with_an_adapter(name: str, quantisation: str, tmp_path: Path) -> None:
    """Of the head, too, which is then no longer the last product."""
    case = golden_case(name)
    adapter = random_adapter(tmp_path / "adapter", case.model, seed=8, head=True)
    shares = [whole_share(units(case.model, quantisation, 32))]
    got = []
    for hands in (False, True):
        folder = tmp_path / str(hands)
        with AdaptedSession(case.folder, OnnxRuntimeEngine, shares, folder, quantisation, hands=hands) as session:
            session.load(1, adapter)
            got.append([session.adapted(case.tokens, slot) for slot in (0, 1)])
    for plain, both in zip(*got, strict=True):
        assert np.array_equal(both[:, : case.model.vocabulary], plain)
    assert not np.allclose(*got[0])
    assert not np.allclose(got[1][0][:, case.model.vocabulary :], got[1][1][:, case.model.vocabulary :])


@pytest.mark.parametrize("ahead", [HEADS[0], HEADS[3]], ids=str)
def test_files_without_the_head_that_their_config_tells_of_are_refused(ahead: Ahead, tmp_path: Path) -> None:
    """The model itself runs."""
    folder = write(tmp_path / "model", ahead.case, tensors_of(ahead.case))
    with open_model(folder):
        pass
    lacks = rf"these files lack the head that predicts tokens further ahead(?s:.*){ahead.module('token')}.weight"
    with pytest.raises(CheckpointError, match=lacks), open_model(folder, ahead=True):
        pass


def test_tensors_of_a_head_that_nobody_has_a_use_for_are_refused(tmp_path: Path) -> None:
    """Copies of the model's own table and matrix are not read, as published files have them; others of a second head,
    or of its layer, would make it another head."""
    ahead = HEADS[0]
    module, tensors = ahead.module("layer"), tensors_of(ahead.case) | head_of(ahead)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    tensors |= {f"{module}.{copy}.weight": tensors[f"{whole}.weight"] for copy, whole in copies.items()}
    with open_model(write(tmp_path / "copies", ahead.case, tensors), ahead=True):
        pass
    some = tensors["model.norm.weight"]
    more = tensors | {f"model.layers.{ahead.number + 1}.enorm.weight": some}
    folder = write(tmp_path / "second", ahead.case, more)
    for head in (False, True):
        with pytest.raises(CheckpointError, match=r"layers.3.enorm.weight"), open_model(folder, ahead=head):
            pass
    biased = tensors | {f"{module}.self_attn.o_proj.bias": some}
    with (
        pytest.raises(CheckpointError, match=r"layers.2.self_attn.o_proj.bias' is in a layer of the model"),
        open_model(write(tmp_path / "biased", ahead.case, biased), ahead=True),
    ):
        pass


@pytest.mark.parametrize("count", [0, 2])
def test_none_and_several_heads_are_refused_by_their_number(count: int) -> None:
    for ahead, key in ((HEADS[1], "num_nextn_predict_layers"), (HEADS[4], "mtp_num_hidden_layers")):
        keys = Keys.load(ahead.case.folder / "config.json")
        keys.values[key] = count
        describe(keys)
        with pytest.raises(ConfigError, match=f"{key} = {count} is not supported; supported: 1, where the model's own"):
            describe(keys, ahead=True)


def test_no_head_is_read_of_other_families_and_of_gguf_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models of type llama no head is read .*, only of deepseek_v3, glm4_moe"):
        read_model(golden_case("llama-mha").folder, ahead=True)
    file = to_gguf(golden_case("glm4-moe").folder, tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"m.gguf: of a GGUF file no head is read"), open_model(file, ahead=True):
        pass


@pytest.mark.parametrize("ahead", HEADS, ids=str)
def test_what_a_head_costs(ahead: Ahead) -> None:
    """One layer, with all of its experts, and a whole matrix of words; embeddings are read from the files."""
    model, head = ahead.case.model, read_model(ahead.case.folder, ahead=True)
    tables = (1 if model.tied else 2) * model.vocabulary * model.hidden
    cost = profile(head, "fp32", 32)
    assert cost.parameters == tables + sum(value.size for value in head_of(ahead).values())
    assert (cost.layers, cost.state_bytes, cost.expert_count) == (1, 0, head.experts.count if head.experts else 0)
    assert cost.vocabulary_unit_bytes * cost.vocabulary_units >= 4 * model.vocabulary * model.hidden
    assert cost.cache_bytes_per_token > 0
