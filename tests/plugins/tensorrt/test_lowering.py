"""The graph as TensorRT gets it computes what the reference does: run by ONNX Runtime, at any split, in every form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.keys import ConfigError
from motley.plugins.engine import F32, CacheBlocks, EngineError, EngineFactory, EngineOptions
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.lowering import RESIDUAL, Constant, lower, segments, whole
from tests.models.cases import Case, LocalSession, uneven_shares, whole_share
from tests.models.nearness import error
from tests.models.test_stored import KINDS, Kind, make
from tests.plugins.known_cases import REFUSED, known_cases, refused_cases
from tests.plugins.onnxruntime.lowered_engine import LoweredEngine

FP32_TOLERANCE = 1e-4
"""Of the largest logit."""
FP16_TOLERANCE = 0.01
"""ONNX Runtime rounds the products to FP16 before the cast."""

FORMS = ("fp32", "fp16", "int8", "int4")

every_case = pytest.mark.parametrize("case", known_cases(), ids=str)
every_form = pytest.mark.parametrize("form", FORMS)


def logits(case: Case, folder: Path, factory: EngineFactory, ranks: int, quantisation: str, **extra: str) -> F32:
    """Of a prompt in two chunks, and of single tokens after it."""
    try:
        cut = units(case.model, quantisation, 32)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    options = EngineOptions(extra=extra)
    shares = uneven_shares(cut, ranks)
    blocks = CacheBlocks(1, case.model.context)
    with LocalSession(case.folder, factory, shares, folder, quantisation, options=options, blocks=blocks) as session:
        chunks = [session.step(case.tokens[:4], 0), session.step(case.tokens[4:9], 4)]
        chunks += [session.step([token], 9 + index) for index, token in enumerate(case.tokens[9:14])]
        return np.concatenate(chunks)


@every_form
@every_case
def test_segments_compute_what_the_reference_does(case: Case, form: str, tmp_path: Path) -> None:
    expected = logits(case, tmp_path / "64", ReferenceEngine, 1, form, dtype="float64")
    tolerance = FP16_TOLERANCE if form == "fp16" else FP32_TOLERANCE
    for ranks in (1, 2, 3):
        got = logits(case, tmp_path / str(ranks), LoweredEngine, ranks, form)
        assert error(got, expected) < tolerance


@pytest.mark.parametrize("ranks", [1, 2, 3])
@every_case
def test_the_whole_graph_in_one_part_does_too(case: Case, ranks: int, tmp_path: Path) -> None:
    """Its collectives are taken for what they are between ranks; of one rank they change nothing."""
    got = logits(case, tmp_path, LoweredEngine, ranks, "fp32", cut="whole")
    assert error(got, case.logits[:14]) < FP32_TOLERANCE


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.config["quant_method"] in ("awq", "gptq")], ids=str)
def test_zero_points_of_blocks(kind: Kind, tmp_path: Path) -> None:
    packed, _ = make(kind, tmp_path)
    results = []
    for factory, ranks in ((ReferenceEngine, 1), (LoweredEngine, 1), (LoweredEngine, 3)):
        with open_model(packed) as opened:
            shares = uneven_shares(units(opened.model, "stored", 32, opened.stored), ranks)
            blocks = CacheBlocks(1, opened.model.context)
        folder = tmp_path / f"{factory.__name__} {ranks}"
        with LocalSession(packed, factory, shares, folder, "stored", blocks=blocks) as session:
            results.append(session.step([5, 9, 40, 2, 61], 0))
    expected, *got = results
    for each in got:
        assert error(each, expected) < FP32_TOLERANCE


@pytest.mark.parametrize(("form", "most"), [("fp32", 1.01), ("fp16", 1.01), ("int8", 1.41), ("int4", 1.02)])
def test_constants_stay_narrow(form: str, most: float, tmp_path: Path) -> None:
    """Bytes, of those in the share: int8 has two more scales for each block (of 16 here)."""
    case = known_cases()[-1]
    shares = [whole_share(units(case.model, form, 32))]
    with LocalSession(case.folder, ReferenceEngine, shares, tmp_path, form) as session:
        graph = session.graphs[0]
    stored = sum(
        int(entry.value)
        for tensor in graph.proto.graph.initializer
        for entry in tensor.external_data
        if entry.key == "length"
    )
    lowered = lower(graph)
    assert sum(_bytes(constant) for constant in lowered.constants.values()) < most * stored
    parts = sum(_bytes(each) for part in segments(lowered) for each in part.constants.values())
    assert parts < most * stored + 1000


def _bytes(constant: Constant) -> float:
    widths = {TensorProto.INT4: 0.5, TensorProto.FLOAT16: 2, TensorProto.FLOAT: 4, TensorProto.INT64: 8}
    return float(np.prod(constant.shape)) * widths[constant.kind]


def test_a_rank_without_vocabulary_keeps_its_last_collective(tmp_path: Path) -> None:
    """TensorRT removes what no output needs, and the other ranks would wait for it."""
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with LocalSession(case.folder, ReferenceEngine, shares, tmp_path) as session:
        parts = [whole(lower(graph)) for graph in session.graphs]
    assert [len(share.vocabulary) > 0 for share in shares] == [True, False]
    outputs = [[value.name for value in part.proto.graph.output] for part in parts]
    assert "logits" in outputs[0]
    assert RESIDUAL not in outputs[0]
    assert RESIDUAL in outputs[1]
    assert [sum(node.op_type == "DistCollective" for node in part.proto.graph.node) for part in parts] == [
        2 * len(case.model.layers)
    ] * 2


@pytest.mark.parametrize("case", refused_cases(), ids=str)
def test_other_models_are_refused_by_name(case: Case, tmp_path: Path) -> None:
    with (
        LocalSession(case.folder, ReferenceEngine, [whole_share(units(case.model, "fp32", 32))], tmp_path) as session,
        pytest.raises(EngineError, match=f"engine 'tensorrt' does not know .*{REFUSED[case.folder.name]}"),
    ):
        lower(session.graphs[0])
