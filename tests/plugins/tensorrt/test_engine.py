"""The TensorRT engine's own part, without a GPU: what it submits, in which order, and where it lets things lie.

The device is host memory and a host stream; in TensorRT's place stands a runtime with the same calls, which executes
the parts by ONNX Runtime, and calls the real NCCL library for sums inside them. Nothing here says that an engine of
TensorRT computes the same: that takes a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.gate import Gate, reference_answers
from motley.plugins import nccl
from motley.plugins.engine import F32, CacheBlocks, EngineError, EngineFactory, EngineMemoryError, EngineOptions, Span
from motley.plugins.installed import abilities
from motley.plugins.mapped_share import MappedShare
from motley.plugins.nccl.library import NAME
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.segments import Reduction
from motley.plugins.tensorrt.builds import Library
from motley.plugins.tensorrt.lowering import Part
from motley.transport.errors import PeerLost
from tests.models.cases import Case, LocalSession, staged_shares, uneven_shares, whole_share
from tests.models.local_group import LocalGroup, LocalMember
from tests.pairs import pairwise
from tests.plugins.known_cases import known_cases
from tests.plugins.onnxruntime.lowered_engine import cut_at_sums, for_onnxruntime, with_data
from tests.plugins.tensorrt.test_lowering import FORMS, FP16_TOLERANCE, FP32_TOLERANCE, error
from tests.transport.host_stream import HostStream

tensorrt = pytest.importorskip("motley.plugins.tensorrt.engine", reason="needs motley.transport.cuda")
host_driver = pytest.importorskip("tests.transport.cuda.host_driver", reason="no device made of host streams")
host_step = pytest.importorskip("motley.transport.cuda.host_step")

CASES = [case for case in known_cases() if case.folder.name in ("llama-mha", "qwen3-biases-some-windows")]
FLOAT32, SUM = 7, 0
"""NCCL's."""
BLOCKS = 2
STALE = b"a plan that the runtime does not take"
ENGINES = [tensorrt.TensorRTEngine, tensorrt.WholeTensorRTEngine]
STEPS = pairwise(CASES, FORMS, [1, 2, 3], [False, True])


class Device(host_driver.HostDriver):  # type: ignore[misc, name-defined]
    """Streams are also known by their numbers, as NCCL's callers give them."""

    capability = (8, 9)
    streams: dict[int, Any] = {}  # noqa: RUF012

    def create_stream(self) -> Any:
        stream = super().create_stream()
        self.streams[id(stream)] = stream
        return stream

    def record(self, event: Any, stream: Any) -> None:
        super().record(event, self.streams.get(stream, stream))

    def is_capturing(self, stream: Any) -> bool:
        return bool(super().is_capturing(self.streams.get(stream, stream)))

    def submit(self, stream: Any, *work: Any) -> None:
        super().submit(self.streams.get(stream, stream), *work)

    def close(self) -> None:
        assert self.live == 0


class Context:
    """`IExecutionContext`, as far as it is used. Scratch memory is where sums inside are taken."""

    def __init__(self, parts: Sequence[Part], sessions: Sequence[ort.InferenceSession]) -> None:
        """`parts`: one, or the parts of a whole graph between its sums."""
        self._parts = parts
        self._sessions = sessions
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = 0
        self._communicator = ctypes.c_void_p()

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        return True

    def set_communicator(self, capsule: Any) -> bool:
        """As TensorRT does it: sums go through a communicator of its own, for all ranks in their order."""
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        parent, rank = ctypes.c_void_p(pointer(capsule, b"ncclComm_t")), ctypes.c_int()
        library = ctypes.CDLL(NAME)  # whatever has that name in this process
        assert library.ncclCommUserRank(parent, ctypes.byref(rank)) == 0
        assert library.ncclCommSplit(parent, 0, rank, ctypes.byref(self._communicator), None) == 0
        return True

    def __del__(self) -> None:
        if self._communicator:
            assert ctypes.CDLL(NAME).ncclCommDestroy(self._communicator) == 0

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
        held: dict[str, np.ndarray[Any, Any]] = {}
        """What stands in no memory of the engine's, while this runs."""
        for part, session in zip(self._parts, self._sessions, strict=True):
            self._submit(part, session, dict(self._shapes), dict(self._addresses), held, stream)
            if len(self._parts) > 1 and isinstance(part.segment.then, Reduction):
                self._sum(part.segment.then, held, stream)
        return True

    def _submit(
        self,
        part: Part,
        session: ort.InferenceSession,
        shapes: dict[str, tuple[int, ...]],
        addresses: dict[str, int],
        held: dict[str, np.ndarray[Any, Any]],
        stream: int,
    ) -> None:
        def read(name: str, kind: int) -> np.ndarray[Any, Any]:
            if name in held:
                return held[name]
            dtype = helper.tensor_dtype_to_np_dtype(kind)
            lying = ctypes.string_at(addresses[name], int(np.prod(shapes[name])) * dtype.itemsize)
            return np.frombuffer(lying, dtype).reshape(shapes[name])

        def run() -> None:
            graph = part.proto.graph
            names = [value.name for value in graph.output]
            given = {value.name: read(value.name, value.type.tensor_type.elem_type) for value in graph.input}
            for name, made in zip(names, session.run(names, given), strict=True):
                if name in addresses:
                    ctypes.memmove(addresses[name], np.ascontiguousarray(made).ctypes.data, made.nbytes)
                else:
                    held[name] = made

        Device.streams[stream].submit(run, part.name)

    def _sum(self, sum_: Reduction, held: dict[str, np.ndarray[Any, Any]], stream: int) -> None:
        """As TensorRT does it: the call comes back before anything has run."""
        scratch, count = self._scratch - host_driver.DEVICE, int(np.prod(self._shapes["hidden"]))

        def give() -> None:
            operand = np.ascontiguousarray(held[sum_.partial])
            assert operand.size == count
            ctypes.memmove(scratch, operand.ctypes.data, operand.nbytes)

        def take() -> None:
            total = np.frombuffer(ctypes.string_at(scratch, 4 * count), np.float32)
            held[sum_.reduced] = total.reshape(held[sum_.partial].shape)

        Device.streams[stream].submit(give, "the sum's operand")
        place = ctypes.c_void_p(self._scratch)
        result = ctypes.CDLL(NAME).ncclAllReduce(
            place, place, ctypes.c_size_t(count), FLOAT32, SUM, self._communicator, ctypes.c_void_p(stream)
        )
        assert result == 0
        Device.streams[stream].submit(take, "the sum")


class Plans:
    """`PlanFolder`, with plans that are engines already."""

    def __init__(self, _file: Path, _library: Library, _parts: Sequence[Part], rows: Sequence[int], _: Any) -> None:
        self._most_rows = rows[-1]

    def plan(self, part: Part, share: MappedShare) -> Any:
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        parts, scratch = [part], 256
        if any(node.op_type == "DistCollective" for node in part.proto.graph.node):
            (hidden,) = (value for value in part.proto.graph.input if value.name == "hidden")
            width = hidden.type.tensor_type.shape.dim[1].dim_value
            parts, scratch = cut_at_sums(part, width), 4 * self._most_rows * width
        models = [for_onnxruntime(with_data(each, share)).SerializeToString() for each in parts]
        sessions = [ort.InferenceSession(model, settings) for model in models]
        return SimpleNamespace(
            create_execution_context=lambda strategy: Context(parts, sessions),
            get_device_memory_size_for_profile_v2=lambda profile: scratch,
        )


class Member(LocalMember):
    """Also the part of a `Communicator` that an `AllReduce` looks at: the ranks exchange whole sums."""

    wire_format = None

    def forecast(self, *_: Any) -> Any:
        return SimpleNamespace(schedule=SimpleNamespace(algorithm=None))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl.install(host="127.0.0.1")  # as the tests of NCCL that may share this process
    runtime = SimpleNamespace(deserialize_cuda_engine=lambda plan: None if plan is STALE else plan)
    module: Any = SimpleNamespace(
        Runtime=lambda log: runtime, ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=0)
    )
    monkeypatch.setattr(tensorrt, "open_library", lambda: Library(module, "onnxruntime", ort.__version__))
    log = SimpleNamespace(take_errors=lambda: "made for another driver")
    monkeypatch.setattr(tensorrt, "messages", lambda: log)
    monkeypatch.setattr(tensorrt, "PlanFolder", Plans)
    monkeypatch.setattr(tensorrt, "CudaDriver", Device)
    monkeypatch.setattr(tensorrt, "measure_host_steps", lambda driver: {host_step.HostStep.FUNCTION: 0.0})
    monkeypatch.setattr(LocalGroup, "member", lambda group, rank: Member(group, rank))
    # A stream's handle is a number to TensorRT.
    monkeypatch.setattr(HostStream, "__int__", lambda stream: id(stream), raising=False)


def open_session(
    case: Case,
    factory: EngineFactory | Sequence[EngineFactory],
    shares: Sequence[Share],
    folder: Path,
    form: str = "fp32",
    rows: int = 8,
    **settings: Any,
) -> LocalSession:
    """A session whose caches have `BLOCKS` blocks, each of a whole sequence; steps have at most so many rows."""
    context = settings.get("context", case.model.context)
    options = EngineOptions(max_rows=rows)
    blocks = CacheBlocks(BLOCKS, context)
    return LocalSession(case.folder, factory, shares, folder, form, options=options, blocks=blocks, **settings)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(("case", "form", "ranks", "whole"), STEPS, ids=str)
def test_steps_of_sequences_that_take_turns(case: Case, form: str, ranks: int, whole: bool, tmp_path: Path) -> None:
    """Chunks, single tokens, steps without logits, a block that another sequence had: as the reference does."""
    try:
        shares = uneven_shares(units(case.model, form, 32), ranks)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    results = []
    for engine in (ReferenceEngine, tensorrt.WholeTensorRTEngine if whole else tensorrt.TensorRTEngine):
        with open_session(case, engine, shares, tmp_path / str(len(results)), form) as session:
            tokens = case.tokens
            got = [session.step(tokens[:4], 0), session.step(tokens[4:9], 4)]
            session.step(tokens[3:6], 0, wanted=0, sequence=1)
            got += [session.step([token], 9 + index) for index, token in enumerate(tokens[9:12])]
            got += [session.step([7], 3, sequence=1), session.step([tokens[12]], 12)]
            got += [session.step(tokens[13:16], 13, wanted=1), session.step([tokens[15]], 15)]
            session.sequences.close(1)
            got += [session.step([5, 6], 0, sequence=2), session.step([tokens[16]], 16)]
            results.append(np.concatenate(got))
    assert error(results[1], results[0]) < (FP16_TOLERANCE if form == "fp16" else FP32_TOLERANCE)


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(("ranks", "capability"), [(1, (8, 9)), (2, (7, 5))])
def test_where_tensorrt_cannot_sum_inside_there_is_an_engine_per_segment(
    ranks: int,
    capability: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Device, "capability", capability)
    case = CASES[0]
    shares = uneven_shares(units(case.model, "fp32", 32), ranks)
    with open_session(case, tensorrt.WholeTensorRTEngine, shares, tmp_path) as session:
        assert session.step(case.tokens[:4], 0).size
    assert "'tensorrt-whole' runs as 'tensorrt' does, with an engine per segment: TensorRT sums inside" in caplog.text


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("factory", ENGINES)
def test_stages_hand_on_residuals_of_all_rows(factory: EngineFactory, tmp_path: Path) -> None:
    case = CASES[0]
    count = len(case.model.layers)
    shares = staged_shares(units(case.model, "fp32", 32), [(range(1), 2), (range(1, count), 1)])
    with open_session(case, factory, shares, tmp_path) as session:
        got = np.concatenate([session.step(case.tokens[:5], 0, wanted=1), session.step(case.tokens[5:6], 5)])
    assert error(got, case.logits[4:6]) < FP32_TOLERANCE


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("factory", ENGINES)
def test_a_rank_is_examined_alone(factory: EngineFactory, tmp_path: Path) -> None:
    """Neither opening the engine nor its exam waits for the other ranks."""
    case = CASES[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with open_session(case, ReferenceEngine, shares, tmp_path) as session:
        for rank, graph in enumerate(session.graphs):
            gate = Gate(graph, LocalGroup(2).member(rank))
            with closing(factory(graph, gate, EngineOptions(max_rows=64))) as engine:
                gate.open(engine, reference_answers(graph, rank, 2, ReferenceEngine))


@pytest.mark.usefixtures("without_gpu")
def test_a_plan_that_the_runtime_refuses_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = CASES[0]
    shares = [whole_share(units(case.model, "fp32", 32))]
    build = Plans.plan
    rebuilt: list[str] = []

    def build_again(plans: Plans, part: Part, share: MappedShare) -> Any:
        rebuilt.append(part.name)
        return build(plans, part, share)

    monkeypatch.setattr(Plans, "plan", lambda plans, part, share: STALE)
    monkeypatch.setattr(Plans, "rebuilt", build_again, raising=False)
    with open_session(case, tensorrt.TensorRTEngine, shares, tmp_path / "1") as session:
        assert session.step(case.tokens[:4], 0).size
    assert len(rebuilt) == 2 * len(case.model.layers) + 2

    monkeypatch.setattr(Plans, "rebuilt", lambda plans, part, share: STALE)
    with pytest.raises(EngineError, match="cannot load segment-000: made for another driver"):
        open_session(case, tensorrt.TensorRTEngine, shares, tmp_path / "2")


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("factory", ENGINES)
def test_sums_beside_those_of_another_engine(factory: EngineFactory, tmp_path: Path) -> None:
    """A step in two micro-chunks has two sums for one, on every rank."""
    case = CASES[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    tokens = [token % 50 for token in range(40)]
    results = []
    for engines in ([ReferenceEngine] * 2, [OnnxRuntimeEngine, factory]):
        folder = tmp_path / str(len(results))
        with open_session(case, engines, shares, folder, rows=40, context=64) as session:
            results.append(session.step(tokens, 0, halved=True))
    assert error(results[1], results[0]) < FP32_TOLERANCE


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("factory", ENGINES)
def test_a_lost_rank_is_told_by_the_step(
    factory: EngineFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the transport's own error, and sums after the one that fails are not begun."""
    case = CASES[0]
    begun: list[list[tuple[int, ...]]] = [[], []]

    def all_reduce(member: Member, buffer: np.ndarray[Any, Any]) -> None:
        begun[member.rank].append(buffer.shape)
        if len(begun[member.rank]) == 3:
            raise PeerLost(1 - member.rank, "its machine is gone")

    monkeypatch.setattr(Member, "all_reduce", all_reduce)
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with open_session(case, factory, shares, tmp_path) as session, pytest.raises(PeerLost, match="machine is gone"):
        session.step([1, 2], 0)
    assert begun == [[(2, case.model.hidden)] * 3] * 2
    assert len(begun[0]) < 2 * len(case.model.layers)


@pytest.mark.usefixtures("without_gpu")
def test_each_sequence_has_the_rotary_tables_of_its_prompt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where more prompts take turns than have their tables on the device; a prompt's are uploaded once if not."""
    case = CASES[0]
    shares = [whole_share(units(case.model, "fp32", 32))]

    def declare(*of: Any, **more: Any) -> Declared:
        declared = build_rank_graph(*of, **more)

        @cache
        def turned_by(prompt: int) -> Mapping[str, F32]:
            return {name: np.roll(table, prompt, axis=0) for name, table in declared.constants(0).items()}

        return replace(declared, constants=turned_by, same_tables=lambda prompt: prompt)

    uploaded: list[int] = []
    upload = tensorrt.TensorRTEngine._upload

    def count(engine: Any, values: F32, place: Any) -> None:
        uploaded.append(place.address)
        upload(engine, values, place)

    monkeypatch.setattr(tensorrt.TensorRTEngine, "_upload", count)
    results = []
    for factory in (ReferenceEngine, tensorrt.TensorRTEngine):
        with open_session(case, factory, shares, tmp_path / str(len(results)), declare=declare) as session:
            own = [Span(np.array([0], np.int32), 0, 4, 4, prompt) for prompt in (1, 2, 3, 1, 1, 2, 3, 4, 5, 1, 6, 2)]
            results.append(np.concatenate([session.run([span], case.tokens[:4]) for span in own]))
    assert error(results[1], results[0]) < FP32_TOLERANCE
    assert len(uploaded) == 2 * len([0, 1, 2, 3, 4, 5, 1, 6, 2])
    assert len(set(uploaded)) == 2 * tensorrt.STRETCHED


@pytest.mark.usefixtures("without_gpu")
def test_all_memory_is_allocated_when_the_engine_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Steps of any sequence take no more, and an engine that would have too little does not open."""
    case = CASES[0]
    shares = [whole_share(units(case.model, "fp32", 32))]
    with open_session(case, tensorrt.TensorRTEngine, shares, tmp_path / "1") as session:
        driver = session.engines[0]._driver
        held = sum(map(len, driver._memory.values()))
        (graph,) = session.graphs
        caches = sum(2 * 4 * BLOCKS * graph.context * spec.heads * spec.head_dim for spec in graph.caches)
        assert held > caches
        for sequence in range(BLOCKS):
            session.step(case.tokens[:5], 0, sequence=sequence)
            session.step(case.tokens[5:6], 5, sequence=sequence)
        assert sum(map(len, driver._memory.values())) == held

    class Small(Device):
        def __init__(self) -> None:
            super().__init__(memory=caches - 1)

    monkeypatch.setattr(tensorrt, "CudaDriver", Small)
    with pytest.raises(EngineMemoryError, match="'tensorrt' has too little memory on its GPU"):
        open_session(case, tensorrt.TensorRTEngine, shares, tmp_path / "2")


def test_blocks_must_be_whole_caches(tmp_path: Path) -> None:
    case = CASES[0]
    shares = [whole_share(units(case.model, "fp32", 32))]
    assert abilities("tensorrt").has_whole_caches
    assert abilities("tensorrt-whole").has_whole_caches
    with pytest.raises(EngineError, match=f"blocks of 8 tokens were asked for, in a context of {case.model.context}"):
        LocalSession(case.folder, tensorrt.TensorRTEngine, shares, tmp_path, blocks=CacheBlocks(9, 8))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(extra={"tpyo": "1"}), "has no option tpyo; it has: none"),
        (EngineOptions(exact=True), "cannot keep exact=true; use engine 'onnxruntime'"),
    ],
)
def test_settings_are_refused(options: EngineOptions, words: str, tmp_path: Path) -> None:
    case = CASES[0]
    shares = [whole_share(units(case.model, "fp32", 32))]
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
    shares = [whole_share(units(case.model, "fp32", 32))]
    with pytest.raises(EngineError, match=r"engine 'tensorrt': there is no NVIDIA driver .*engine 'onnxruntime'"):
        open_session(case, tensorrt.TensorRTEngine, shares, tmp_path)
