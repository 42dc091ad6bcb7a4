"""Layers run one by one are the model; and the drift of one over ranks is what its arithmetic says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type

import motley.cli
from motley.bench.measurements.accuracy.drift import (
    FLOAT64,
    FP16,
    Drift,
    LayerDrift,
    interpret,
    layer_graph,
    measure_drift,
    on_disk,
)
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import EMBEDDING, Model
from motley.daemon.models.description.operations.rows import Linear, Norm, Scale, SoftCap
from motley.daemon.models.files import open_model
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import Source
from tests.models.cases import Case, dense_cases, expert_cases, golden_case, uneven_shares
from tests.models.test_stored import gptq_kind, make
from tests.models.to_gguf import to_gguf

Residual = npt.NDArray[np.floating[Any]]

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
LAYER = LayerDrift(
    layer=0,
    fp32_error=1e-7,
    fp32_max_error=1e-6,
    fp32_float64_error=2e-7,
    fp16_error=float("inf"),
    fp16_max_error=float("inf"),
    fp16_float64_error=float("inf"),
    max_activation=3.0,
    rms_activation=0.5,
)


def head(model: Model, source: Source, residual: Residual) -> Residual:
    """The logits of a residual, by the book."""
    last, *rest = model.head
    scale = 1.0
    if isinstance(rest[0], Scale):
        scale = rest.pop(0).by
    product, *rest = rest
    assert isinstance(last, Norm)
    assert isinstance(product, Linear)
    hidden = range(model.hidden)
    gain, bias = np.ones(model.hidden), np.zeros(model.hidden)
    if last.gain:
        gain = source.read(Piece(last.gain.name, hidden)).astype(np.float64) + last.offset
    if last.gain and last.gain.bias:
        bias = source.read(Piece(last.gain.bias, hidden)).astype(np.float64)
    table = source.read(Piece(product.ws[0].name, range(model.vocabulary), hidden)).astype(np.float64)
    if last.centred:
        residual = residual - residual.mean(axis=1, keepdims=True)
    mean_square = np.mean(residual**2, axis=1, keepdims=True)
    logits = scale * (residual / np.sqrt(mean_square + last.epsilon) * gain + bias) @ table.T
    for each in rest:
        assert isinstance(each, SoftCap)
        logits = each.cap * np.tanh(logits / each.cap)
    return logits


def is_recurrent(case: Case) -> bool:
    return any(layer.recurrences for layer in case.model.layers)


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(
    "case", [case for case in dense_cases() if not (is_recurrent(case) or case.model.whole)], ids=str
)
def test_layer_after_layer_is_the_whole_model(case: Case, ranks: int) -> None:
    """Windows, biases, norms of heads, repeated KV heads and empty shares included, against transformers in float64."""
    shares = uneven_shares(units(case.model, "fp32", 0), ranks)
    with open_model(case.folder) as opened:
        residual: Residual = opened.source.rows(EMBEDDING, case.tokens[:-1])
        for layer in range(len(case.model.layers)):
            declared = [layer_graph(case.model, shares, rank, layer) for rank in range(ranks)]
            with on_disk(opened.source, declared) as graphs:
                residual = interpret(graphs, residual, FLOAT64)
        logits = head(case.model, opened.source, residual)
    assert np.abs(logits - case.logits).max() / np.abs(case.logits).max() < 5e-6  # transformers' are rounded to float32


def test_half_precision_is_rounded_after_every_operator() -> None:
    case = dense_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 0), 2)
    with open_model(case.folder) as opened:
        embedded = opened.source.rows(EMBEDDING, case.tokens[:8])
        with on_disk(opened.source, [layer_graph(case.model, shares, rank, 0) for rank in range(2)]) as graphs:
            half, exact = interpret(graphs, embedded, FP16), interpret(graphs, embedded, FLOAT64)
    assert np.array_equal(half, half.astype(np.float16))
    error = np.abs(half - exact).mean() / np.abs(exact).max()
    assert 1e-6 < error < 1e-2


@pytest.mark.parametrize("ranks", [2, 3])
def test_drift_of_a_trained_model(ranks: int) -> None:
    seen: list[tuple[int, int]] = []
    drift = measure_drift(BUNDLED, ranks, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(7)]
    assert [layer.layer for layer in drift.layers] == list(range(6))
    for layer in drift.layers:
        assert 0 < layer.fp32_error < layer.fp32_max_error < 1e-5
        assert 0 < layer.fp32_float64_error < 1e-6
        assert 1e-5 < layer.fp16_error < layer.fp16_max_error < 1e-1
        assert 1e-5 < layer.fp16_float64_error < 1e-2
        assert layer.rms_activation < layer.max_activation
    assert drift.layers[-1].fp32_error < 2.7e-7


@pytest.mark.parametrize("case", [expert_cases()[0], next(filter(is_recurrent, dense_cases()))], ids=str)
def test_experts_and_recurrent_states_are_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match=f"without experts or recurrent states only; this one is {case.model.family}"):
        measure_drift(case.folder, 2)


def test_layers_that_cannot_be_apart_are_refused() -> None:
    with pytest.raises(ConfigError, match="layers of this model read more than the residual"):
        measure_drift(golden_case("gemma4-given-rows").folder, 2)


def test_drift_of_a_gguf_file(tmp_path: Path) -> None:
    """The same weights, in another file."""
    file = to_gguf(BUNDLED, tmp_path / "m.gguf", lambda name: Type.F16)
    for layer, same in zip(measure_drift(file, 2).layers, measure_drift(BUNDLED, 2).layers, strict=True):
        assert layer.fp16_error == pytest.approx(same.fp16_error, rel=1e-6)
        assert layer.max_activation == pytest.approx(same.max_activation, rel=1e-6)


def test_drift_of_a_packed_model(tmp_path: Path) -> None:
    """A GPTQ folder has the drift of the floats that its codes stand for."""
    packed, twin = make(gptq_kind("gptq", 4, 32, 1), tmp_path)
    for layer, same in zip(measure_drift(packed, 2).layers, measure_drift(twin, 2).layers, strict=True):
        assert layer.fp32_error == pytest.approx(same.fp32_error, rel=1e-3)
        assert layer.max_activation == pytest.approx(same.max_activation, rel=1e-6)


def test_one_rank_does_not_drift() -> None:
    layers = measure_drift(BUNDLED, 1).layers
    assert all(layer.fp32_error == layer.fp16_error == 0 < layer.fp32_float64_error for layer in layers)


def test_what_is_printed() -> None:
    said = Drift("model", 2, [replace(LAYER, fp16_error=1e-4), replace(LAYER, layer=1)]).as_json()
    assert set(said) == {"layers", "final_fp32_error", "final_fp16_error"}
    assert [layer["layer"] for layer in said["layers"]] == [0, 1]
    assert said["layers"][0]["fp16_error"] == 1e-4
    assert said["final_fp32_error"] == 1e-7
    assert said["final_fp16_error"] is None  # JSON has no infinity
