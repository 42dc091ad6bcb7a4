"""The TensorRT engine's own part, without a GPU: what it submits, in which order, and where it lets things lie.

The device is host memory and a host stream; in TensorRT's place stands a runtime with the same calls, which executes
the parts by ONNX Runtime. Nothing here says that an engine of TensorRT computes the same: that takes a GPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from motley.daemon.models.config import ConfigError
from motley.daemon.models.units import units
from motley.plugins.cupy import ReferenceEngine
from motley.plugins.engine import EngineError, EngineFactory, EngineOptions
from motley.plugins.mapped_share import MappedShare
from motley.plugins.tensorrt_builds import Library
from motley.plugins.tensorrt_lowering import Part
from motley.transport.streams import HostStream
from tests.models.cases import Case, LocalSession, dense_cases, uneven_shares, whole_share
from tests.models.local_group import LocalGroup, LocalMember
from tests.plugins.lowered_engine import for_onnxruntime, with_data
from tests.plugins.test_tensorrt_lowering import FORMS, FP16_TOLERANCE, FP32_TOLERANCE, error

tensorrt = pytest.importorskip("motley.plugins.tensorrt", reason="needs motley.transport.cuda")
host_driver = pytest.importorskip("tests.transport.cuda.host_driver", reason="no device made of host streams")
host_step = pytest.importorskip("motley.transport.cuda.host_step")

CASES = [case for case in dense_cases() if case.folder.name in ("llama-mha", "qwen3-biases-some-windows")]


class Device(host_driver.HostDriver):  # type: ignore[misc, name-defined]
    capability = (8, 9)
    streams: dict[int, Any] = {}  # noqa: RUF012

    def create_stream(self) -> Any:
        stream = super().create_stream()
        self.streams[id(stream)] = stream
        return stream

    def close(self) -> None:
        assert self.live == 0


class Context:
    """`IExecutionContext`, as far as it is used."""

    def __init__(self, part: Part, session: ort.InferenceSession) -> None:
        self._part = part
        self._session = session
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = 0

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return True

    def set_device_memory(self, address: int, nbytes: int) -> None:
        self._scratch = address

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address - host_driver.DEVICE
        return True

    def execute_async_v3(self, stream: int) -> bool:
        assert self._scratch
        shapes, addresses = dict(self._shapes), dict(self._addresses)

        def run() -> None:
            graph = self._part.proto.graph
            read = {}
            for value in graph.input:
                dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
                shape = shapes[value.name]
                lying = ctypes.string_at(addresses[value.name], int(np.prod(shape)) * dtype.itemsize)
                read[value.name] = np.frombuffer(lying, dtype).reshape(shape)
            names = [value.name for value in graph.output]
            for name, made in zip(names, self._session.run(names, read), strict=True):
                ctypes.memmove(addresses[name], np.ascontiguousarray(made).ctypes.data, made.nbytes)

        Device.streams[stream].submit(run, self._part.name)
        return True


class Plans:
    """`PlanFolder`, with plans that are engines already."""

    def __init__(self, *_: Any) -> None:
        pass

    def plan(self, part: Part, share: MappedShare) -> Any:
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        model = for_onnxruntime(with_data(part, share)).SerializeToString()
        session = ort.InferenceSession(model, settings)
        return SimpleNamespace(
            create_execution_context=lambda strategy: Context(part, session),
            get_device_memory_size_for_profile_v2=lambda profile: 256,
        )


class Member(LocalMember):
    """Also the part of a `Communicator` that an `AllReduce` looks at: the ranks exchange whole sums."""

    wire_format = None

    def forecast(self, *_: Any) -> Any:
        return SimpleNamespace(schedule=SimpleNamespace(algorithm=None))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> EngineFactory:
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: plan)
    module: Any = SimpleNamespace(
        Runtime=lambda log: runtime, ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0)
    )
    monkeypatch.setattr(tensorrt, "open_library", lambda: Library(module, "onnxruntime", ort.__version__))
    monkeypatch.setattr(tensorrt, "messages", lambda: None)
    monkeypatch.setattr(tensorrt, "PlanFolder", Plans)
    monkeypatch.setattr(tensorrt, "CudaDriver", Device)
    monkeypatch.setattr(tensorrt, "measure_host_steps", lambda driver: {host_step.HostStep.FUNCTION: 0.0})
    monkeypatch.setattr(LocalGroup, "member", lambda group, rank: Member(group, rank))
    # A stream's handle is a number to TensorRT.
    monkeypatch.setattr(HostStream, "__int__", lambda stream: id(stream), raising=False)
    factory: EngineFactory = tensorrt.TensorRTEngine
    return factory


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_of_two_slots(case: Case, form: str, ranks: int, without_gpu: EngineFactory, tmp_path: Path) -> None:
    """Chunks, single tokens, steps without logits, tokens skipped, and slots that take turns: as the reference does."""
    quantisation, extra = FORMS[form]
    try:
        shares = uneven_shares(units(case.config, quantisation, 32), ranks)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    results = []
    for factory, settings in ((ReferenceEngine, {}), (without_gpu, extra)):
        options = EngineOptions(extra=settings, max_rows=8)
        folder = tmp_path / factory.__name__
        with LocalSession(case.folder, factory, shares, folder, quantisation, options=options) as session:
            session.open_slot(0)
            session.open_slot(1)
            tokens = case.tokens
            got = [session.step(tokens[:4], 0), session.step(tokens[4:9], 4)]
            session.step(tokens[3:6], 0, rows=[], slot=1)
            got += [session.step([token], 9 + index) for index, token in enumerate(tokens[9:12])]
            got += [session.step([7], 3, slot=1), session.step([tokens[12]], 12)]
            got += [session.step(tokens[13:16], 13, rows=[2]), session.step([tokens[15]], 15)]
            session._everywhere(lambda engine: engine.skip(1, 9))
            got += [session.step([5], 9, slot=1)]
            session.close_slot(1)
            got += [session.step([tokens[16]], 16)]
            results.append(np.concatenate(got))
    assert error(results[1], results[0]) < (FP16_TOLERANCE if form == "fp16" else FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(extra={"tpyo": "1"}), r"no settings called \['tpyo'\]; it has: weights"),
        (EngineOptions(extra={"weights": "fp8"}), "weights is fp16 or left out, not 'fp8'"),
        (EngineOptions(exact=True), "cannot keep exact=true; use engine 'onnxruntime'"),
    ],
)
def test_settings_are_refused(options: EngineOptions, words: str, tmp_path: Path) -> None:
    case = CASES[0]
    shares = [whole_share(units(case.config, "fp32", 32))]
    with pytest.raises(EngineError, match=words):
        LocalSession(case.folder, tensorrt.TensorRTEngine, shares, tmp_path, options=options)


def test_a_machine_without_a_driver_is_told_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    try:
        driver.cuInit(0)
    except Exception:  # the library is looked for at the first call
        pass
    else:
        pytest.skip("this machine has an NVIDIA driver")
    case = CASES[0]
    shares = [whole_share(units(case.config, "fp32", 32))]
    with pytest.raises(EngineError, match=r"engine 'tensorrt': there is no NVIDIA driver .*engine 'onnxruntime'"):
        LocalSession(case.folder, tensorrt.TensorRTEngine, shares, tmp_path)
