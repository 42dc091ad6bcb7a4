"""Runs that are captured give what runs that are not give, whatever their inputs hold when they are repeated."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import NodeProto, helper, numpy_helper

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.gate import Gate, GateError, reference_answers
from motley.plugins.engine import Collectives, EngineOptions, RankGraph
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, Place, carry_out, declared, upload
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from motley.plugins.onnxruntime_gpu.providers import WEBGPU
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, golden_case, uneven_shares

VALUES = (1, 2, 3)


def added(gpu: Gpu, last: list[NodeProto]) -> ort.InferenceSession:
    """(x f32[2, 4], y f32[2, 4]) -> z: what some nodes make of their sum."""
    ends = [declared(name, np.float32, [2, 4]) for name in ("x", "y")]
    shape = numpy_helper.from_array(np.array([8]), "shape")
    nodes = [helper.make_node("Add", ["x", "y"], ["sum"]), *last]
    return gpu.session(nodes, ends, [declared("z", np.float32)], [shape], captured=True)


def test_one_session_is_captured_once_for_each_binding() -> None:
    gpu = Gpu(WEBGPU)
    session = added(gpu, [helper.make_node("Neg", ["sum"], ["z"])])
    x, ten, *z = (gpu.mirror(np.full((2, 4), number, np.float32)) for number in (1, 10, 0, 0))
    runs = [
        gpu.bind(session, {"x": x.there, "y": other.there}, {"z": place.there}, captured=True)
        for other, place in zip((x, ten), z, strict=True)
    ]
    for value in VALUES:
        x.host[:] = value
        carry_out([[upload([x]), *runs, gpu.download(z)]])
        assert [place.host[0, 0] for place in z] == [-2 * value, -10 - value]


def test_a_change_of_shape_at_the_end_is_not_captured() -> None:
    """The provider makes it by a copy, which would not be repeated."""
    gpu = Gpu(WEBGPU)
    session = added(gpu, [helper.make_node("Reshape", ["sum", "shape"], ["z"])])
    x, z = gpu.mirror(np.zeros((2, 4), np.float32)), gpu.mirror(np.zeros(8, np.float32))
    run = gpu.bind(session, {"x": x.there, "y": x.there}, {"z": z.there}, captured=True)
    for value in VALUES:
        x.host[:] = value
        carry_out([[upload([x]), run, gpu.download([z])]])
        assert z.host[0] == 2 * value


def test_other_threads_run_while_what_is_new_to_the_driver_is_waited_for() -> None:
    """It may compile for seconds, in which others must hear that this process is alive."""
    gpu, width, order = Gpu(WEBGPU), 256, list[str]()
    ends = [declared(name, np.float32, [width, width]) for name in ("x", "y")]
    names = ["x", *(f"made.{number}" for number in range(7)), "y"]
    nodes = [helper.make_node("MatMul", [one, "x"], [other]) for one, other in pairwise(names)]
    x, y = (gpu.mirror(np.zeros((width, width), np.float32)) for _ in range(2))
    run = gpu.bind(gpu.session(nodes, ends[:1], ends[1:], captured=True), {"x": x.there}, {"y": y.there}, captured=True)
    submitted = threading.Event()

    def other() -> None:
        submitted.wait()
        order.append("another thread")

    thread, interval = threading.Thread(target=other), sys.getswitchinterval()
    thread.start()
    sys.setswitchinterval(60)  # so only who waits lets others run
    try:
        carry_out([[upload([x]), run, submitted.set, gpu.download([y]), partial(order.append, "copied")]])
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    assert order == ["another thread", "copied"]


def test_what_nobody_runs_any_more_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go: list[int] = []
    release = ort.InferenceSession.release_captured_graph

    def seen(session: ort.InferenceSession, graph: int) -> None:
        let_go.append(graph)
        release(session, graph)

    monkeypatch.setattr(ort.InferenceSession, "release_captured_graph", seen)
    gpu = Gpu(WEBGPU)
    session = added(gpu, [helper.make_node("Neg", ["sum"], ["z"])])
    x, z = (gpu.mirror(np.ones((2, 4), np.float32)) for _ in range(2))
    for _ in range(2):
        run = gpu.bind(session, {"x": x.there, "y": x.there}, {"z": z.there}, captured=True)
        carry_out([[run, gpu.download([z])]])
        assert z.host[0, 0] == -2
        del run
        gc.collect()
    carry_out([])
    assert len(let_go) == 2
    assert len(set(let_go)) == 2


def test_a_driver_that_repeats_attention_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that repeats nothing, say: the result stays that of the token before."""
    bind = Gpu.bind

    def once(
        gpu: Gpu,
        session: ort.InferenceSession,
        inputs: Mapping[str, ort.OrtValue],
        outputs: Mapping[str, Place],
        captured: bool = False,
    ) -> Action:
        run = bind(gpu, session, inputs, outputs, captured)
        if not captured or [*outputs] != ["y"]:
            return run
        runs = iter([run])
        return lambda: next(runs, lambda: None)()

    def examined(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> WebGpuEngine:
        gate = Gate(graph, collectives)
        engine = WebGpuEngine(graph, gate, options)
        gate.open(engine, reference_answers(graph, 0, 1, ReferenceEngine))
        return engine

    monkeypatch.setattr(Gpu, "bind", once)
    case = golden_case("llama-mha")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with pytest.raises(GateError):
        LocalSession(case.folder, examined, shares, tmp_path)
