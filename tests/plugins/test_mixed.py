"""Ranks of one model with engines and quantisations of their own: what they compute together, at splits of 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import Units, units
from motley.daemon.models.keys import ConfigError
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import F32, Collectives, EngineFactory, EngineOptions, RankGraph
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import Case, LocalSession, golden_cases, others_soak, uneven_shares
from tests.transport.cuda.host_driver import HostDriver

SAME_WEIGHTS = 0.04
"""Relative RMS, between ranks that quantise activations to int8 per block, and float64 with the very same weights."""
RECURRENT_FACTOR = 4
"""What both of these are multiplied by: recurrent states keep what rounding did to earlier rows."""
EXPERTS = 0.2
"""The same where that rounding sends a few rows to other experts."""
CHOOSING = 2
"""What these are multiplied by where it lets rows see other positions, each rank's heads their own."""
INT8 = 0.05
"""Relative RMS, between ranks of which some hold int8, others floats, and transformers in float64: what rounding the
weights of tiny random models costs. With int4 it is less than what it costs where all hold that."""

SINGLY = 24
"""Tokens of a sequence that is decoded one by one: further than any window of these models. (With experts all are, as
of fewer rows those that go elsewhere weigh more.)"""


def on_host(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
    """The GPU's engine with its kernels compiled for the host."""
    return CudaEngine(graph, collectives, EngineOptions(extra={"host_step": "function"}), HostDriver())


def in_float64(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> ReferenceEngine:
    return ReferenceEngine(graph, collectives, EngineOptions(extra={"dtype": "float64"}))


MIXES: dict[str, list[tuple[EngineFactory, str]]] = {
    "reference fp32, cpu int8": [(ReferenceEngine, "fp32"), (OnnxRuntimeEngine, "int8")],
    "gpu fp16, cpu int8": [(on_host, "fp16"), (OnnxRuntimeEngine, "int8")],
    "cpu int4, gpu int8, reference fp32": [(OnnxRuntimeEngine, "int4"), (on_host, "int8"), (ReferenceEngine, "fp32")],
    "reference fp32, cpu int8, cpu int4": [
        (ReferenceEngine, "fp32"),
        (OnnxRuntimeEngine, "int8"),
        (OnnxRuntimeEngine, "int4"),
    ],
}


def quantisable(case: Case) -> bool:
    try:
        units(case.model, "int8", 32)
    except ConfigError:
        return False
    return True


CASES = [case for case in golden_cases() if quantisable(case)]


def cut_for(case: Case, quantisations: Sequence[str]) -> Units:
    return units(case.model, quantisations[0], 32, beside=quantisations)


def whole_prompt(
    case: Case, engines: Sequence[EngineFactory], shares: Sequence[Share], folder: Path, quantisations: Sequence[str]
) -> F32:
    with LocalSession(case.folder, engines, shares, folder, quantisations) as ranks:
        return ranks.step(case.tokens[:-1], 0)


def distance(got: F32, expected: F32) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("case", "mix"), others_soak(product(CASES, MIXES)), ids=str)
def test_ranks_of_different_kinds_agree_with_float64(case: Case, mix: str, tmp_path: Path) -> None:
    """A prompt, its halves, and single tokens; against the same weights, and against transformers'."""
    engines, quantisations = zip(*MIXES[mix], strict=True)
    cut = cut_for(case, quantisations)
    shares = uneven_shares(cut, len(engines))
    expected = whole_prompt(case, [in_float64] * len(engines), shares, tmp_path / "64", quantisations)
    with LocalSession(case.folder, engines, shares, tmp_path / "mixed", quantisations) as mixed:
        whole = mixed.step(case.tokens[:-1], 0)
        one_by_one = [mixed.step(case.tokens[:5], 0, sequence=1)]
        for position in range(5, len(case.tokens) - 1 if case.model.experts else SINGLY):
            one_by_one.append(mixed.decode([1], case.tokens[position : position + 1], [position]))
        halved = mixed.step(case.tokens[:-1], 0, sequence=1, halved=True)
    factor = RECURRENT_FACTOR if case.recurrent else CHOOSING if case.chooses else 1
    same = SAME_WEIGHTS * factor
    tolerance = EXPERTS * factor if case.model.experts else same
    for got in (whole, np.concatenate(one_by_one), halved):
        assert distance(got, expected[: len(got)]) < tolerance
        assert np.median([distance(*rows) for rows in zip(got, expected, strict=False)]) < same
    if case.model.experts:
        return
    rounding = INT8
    if "int4" in quantisations:
        alone = uneven_shares(units(case.model, "int4", 32), 1)
        rounding = distance(whole_prompt(case, [in_float64], alone, tmp_path / "int4", ["int4"]), case.logits)
    assert distance(whole, case.logits) < rounding
