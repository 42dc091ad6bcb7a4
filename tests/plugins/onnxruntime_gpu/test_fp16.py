"""Products in FP16, by a driver that has it, which is opened in processes of their own."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnxruntime import OrtHardwareDeviceType

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.gate import Gate, reference_answers
from motley.plugins.engine import Collectives, EngineError, EngineOptions, RankGraph
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.onnxruntime_gpu.device import find_devices
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from motley.plugins.onnxruntime_gpu.fp16 import ACTIVATIONS, with_products_in_fp16
from motley.plugins.onnxruntime_gpu.lowering import lowered_for
from motley.plugins.onnxruntime_gpu.providers import WEBGPU
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.segments import Mixture, cut_into_segments
from tests.models.cases import BLOCKS, LocalSession, golden_case, uneven_shares
from tests.plugins.onnxruntime_gpu.processes import said_in_fp16
from tests.plugins.onnxruntime_gpu.test_engine import logits_of

CLOSE_IN_FP16 = 0.02
"""How far logits may be off, in parts of the largest one."""
ALIKE = 1e-3
"""How far they may be off, as a part of their norm, from those of an engine that keeps its caches alike."""
GATE = {"Add", "Clip", "Min", "Mul", "QuickGelu", "Split"}
"""The operators of a gate of gpt-oss."""
FP16 = EngineOptions(extra={ACTIVATIONS: "fp16"})


def examined(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> WebGpuEngine:
    """An engine that has passed its exam as that of a rank does, and computes in FP16."""
    gate = Gate(graph, collectives)
    engine = WebGpuEngine(graph, gate, FP16)
    gate.open(engine, reference_answers(graph, collectives.rank, collectives.size, ReferenceEngine))
    return engine


def error(name: str, quantisation: str, ranks: int) -> float:
    """How far logits of a golden model are off, of which every other rank is on a processor."""
    case = golden_case(name)
    engines = [examined if rank % 2 == 0 else OnnxRuntimeEngine for rank in range(ranks)]
    with tempfile.TemporaryDirectory() as folder:
        got = logits_of(case, engines, ranks, quantisation, Path(folder) / "gpu")
        expected = logits_of(case, ReferenceEngine, 1, quantisation, Path(folder) / "reference")
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "quantisation", "ranks"),
    [
        ("gemma3", "fp32", 1),
        pytest.param("qwen3", "int4", 2, marks=pytest.mark.soak),  # at every commit laguna's products are of int4
        ("laguna", "int4", 3),
    ],
)
def test_golden_models_pass_the_gate_and_are_close(name: str, quantisation: str, ranks: int) -> None:
    """Of the last one, too, whose experts are chosen by a router."""
    off = said_in_fp16(__name__, "error", name, quantisation, ranks)
    assert 1e-4 < off < CLOSE_IN_FP16, "less would be FP32"


def cache_errors(name: str, ranks: int) -> tuple[float, float]:
    """How far logits of a golden model with caches in FP16 are off: from the reference's with such caches, and from
    those with caches in FP32."""
    case = golden_case(name)
    with tempfile.TemporaryDirectory() as folder:
        got = logits_of(case, WebGpuEngine, ranks, "fp32", Path(folder) / "gpu", "fp16")
        fp16, fp32 = (
            logits_of(case, ReferenceEngine, 1, "fp32", Path(folder) / each, each) for each in ("fp16", "fp32")
        )
    return tuple(float(np.linalg.norm(got - each) / np.linalg.norm(each)) for each in (fp16, fp32))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param("llama-mqa", 1, marks=pytest.mark.soak),  # at every commit gemma2 has such layers, too
        ("mistral-window", 2),
        ("gemma2", 1),
        ("gpt-oss", 1),
    ],
)
def test_caches_in_fp16_are_rounded_as_the_reference_s_are(name: str, ranks: int) -> None:
    """Also those with a window, with soft caps and with sinks."""
    alike, apart = said_in_fp16(__name__, "cache_errors", name, ranks)
    assert alike < ALIKE
    assert apart > 3 * alike, "else they would be FP32"


def test_a_gpu_without_it_keeps_no_caches_in_it(tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with pytest.raises(EngineError, match="cannot compute in fp16 on this GPU"):
        LocalSession(case.folder, WebGpuEngine, shares, tmp_path, blocks=replace(BLOCKS, format="fp16"))


def test_products_and_gates_are_in_fp16_and_no_more(tmp_path: Path) -> None:
    """No norm, nothing that turns or is summed; and no router, whose products are of plain floats here."""
    case = golden_case("gpt-oss")
    shares = uneven_shares(units(case.model, "int8", 32), 1)
    with LocalSession(case.folder, WebGpuEngine, shares, tmp_path, "int8") as session:
        lowered = lowered_for(WEBGPU, session.graphs[0].proto)
    segments = cut_into_segments(lowered.nodes, lowered.initializers, ["logits"])
    parts = [(segment.nodes, segment.outputs) for segment in segments]
    experts = [each for segment in segments if isinstance(segment.then, Mixture) for each in segment.then.experts]
    parts += [(expert.node, [output.name for output in expert.output]) for expert in experts]
    kinds: dict[bool, set[str]] = {True: set(), False: set()}
    for nodes, outputs in parts:
        for node in with_products_in_fp16(nodes, outputs, lowered.initializers):
            kinds[node.output[0].endswith(".fp16")].add(node.op_type)
    assert kinds[True] == {"Cast", "MatMulNBits", *GATE}
    assert "MatMulNBits" not in kinds[False]
    assert "Gemm" in kinds[False]


def test_a_gpu_without_it_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)

    def refused(activations: str, folder: str) -> str:
        options = EngineOptions(extra={ACTIVATIONS: activations})
        with pytest.raises(EngineError) as raised:
            LocalSession(case.folder, WebGpuEngine, shares, tmp_path / folder, options=options)
        return str(raised.value)

    said = refused("fp16", "lacking")
    assert "cannot compute in fp16 on this GPU" in said
    if find_devices(WEBGPU)[0].device.type == OrtHardwareDeviceType.CPU:
        assert "(a driver in software)" in said
        assert said.endswith("use Mesa's driver, which has it")
    assert "shader-f16" in refused("fp16", "named")
    assert "is fp32 or fp16, not 'bf16'" in refused("bf16", "unknown")
