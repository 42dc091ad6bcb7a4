"""A token's transfers between the host and the GPU: two for each sum, of which a rank alone has none, and a fixed
number for the token itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.gate import Gate, reference_answers
from motley.plugins.engine import Collectives, EngineOptions, RankGraph
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, golden_case, uneven_shares

OF_A_TOKEN = 1
"""Arrays that go up for a token besides sums: one has its embedding, the slot of its keys, two rotary tables, and its
position. Another has the slots of its sequence, when that gets a block."""


class Traffic:
    """What goes between the host and the GPU, while it is watched. What is bound before that is not seen.

    Attributes:
        up: arrays that went to the GPU.
        down: arrays that came from there, copied or as results of a run; to read them is to wait for the GPU.
        bound: sessions that were bound.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.forget()
        copy, bind, run = ort.copy_tensors, ort.InferenceSession.io_binding, ort.InferenceSession.run_with_iobinding

        def counted_copy(of: Sequence[ort.OrtValue], to: Sequence[ort.OrtValue], stream: Any = None) -> None:
            self.up += sum(value.device_name() != "cpu" for value in to)
            self.down += sum(value.device_name() != "cpu" for value in of)
            copy(of, to, stream)

        def counted_binding(session: ort.InferenceSession) -> ort.IOBinding:
            self.bound += 1
            return bind(session)

        def counted_run(session: ort.InferenceSession, binding: ort.IOBinding, options: Any = None) -> None:
            self.down += sum(value.device_name() == "cpu" for value in binding.get_outputs())
            run(session, binding, options)

        patch.setattr(ort, "copy_tensors", counted_copy)
        patch.setattr(ort.InferenceSession, "run_with_iobinding", counted_run)
        patch.setattr(ort.InferenceSession, "io_binding", counted_binding)

    def forget(self) -> None:
        """Count anew."""
        self.up = self.down = self.bound = 0


def test_a_rank_alone_is_examined_and_sums_nothing_afterwards(tmp_path: Path) -> None:
    """The gate gives back what is no sum, so it must be asked for each; what follows needs none."""
    case = golden_case("llama-mha")
    asked: list[Gate] = []

    def examined(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> WebGpuEngine:
        gate = Gate(graph, collectives)
        engine = WebGpuEngine(graph, gate, options)
        gate.open(engine, reference_answers(graph, 0, 1, ReferenceEngine))
        asked.append(gate)
        return engine

    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with LocalSession(case.folder, examined, shares, tmp_path) as session:
        got = np.concatenate([session.step([token], at) for at, token in enumerate(case.tokens[:6])])
    assert asked
    assert np.abs(got - case.logits[:6]).max() < 1e-4


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_transfers_for_each_sum_and_nothing_is_bound_again(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = golden_case("llama-mha")
    shares = uneven_shares(units(case.model, "fp32", 32), ranks)
    traffic = Traffic(monkeypatch)
    with LocalSession(case.folder, WebGpuEngine, shares, tmp_path) as session:
        for position in range(2):
            session.step(case.tokens[position : position + 1], position)
        traffic.forget()
        tokens = 5
        for position in range(2, 2 + tokens):
            session.step(case.tokens[position : position + 1], position)
    layers = len(session.graphs[0].caches) * tokens
    terms = 3 * layers if ranks == 2 else 0  # the second rank has nothing of an MLP
    sums = 4 * layers if ranks == 2 else 0
    assert traffic.bound == 0
    assert traffic.down == terms + tokens  # and logits, which the first rank has
    assert traffic.up == sums + OF_A_TOKEN * tokens * ranks


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_a_token_past_a_window_takes_no_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first position that is seen changes with each token, and what goes up only with each block."""
    case = golden_case(name)
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    traffic = Traffic(monkeypatch)
    with LocalSession(case.folder, WebGpuEngine, shares, tmp_path) as session:
        longest, tokens = max(each.window for each in case.attentions), session.graphs[0].blocks.tokens
        went_up = []
        for position in range(longest + 2 * tokens):
            traffic.forget()
            session.step(case.tokens[:1], position)
            went_up.append(traffic.up)
    past = went_up[longest:]
    assert past.count(OF_A_TOKEN) > len(past) - 2 * len(past) // tokens - 2
