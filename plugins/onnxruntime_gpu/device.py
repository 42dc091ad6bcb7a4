"""A GPU that one of ONNX Runtime's providers computes on: sessions on it, and arrays in its memory."""

from __future__ import annotations

import importlib
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import count
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.engine import EngineError, EngineLostError, EngineMemoryError
from motley.plugins.onnxruntime.lowering import MICROSOFT
from motley.plugins.onnxruntime_gpu.preference import SOFTWARE, takes_software
from motley.plugins.onnxruntime_gpu.providers import Provider

OPSET = 24
IR_VERSION = 12

Array = npt.NDArray[Any]
Place: TypeAlias = Any
"""Where a value is: an array of the host, or an `ort.OrtValue` in the GPU's memory."""
Action: TypeAlias = Callable[[], None]
"""Computes or copies what it was bound to; `carry_out` calls it."""
CAPTURED_ROWS = 8
"""So many rows at most are worth a capture, which keeps what its run makes on the way: of each layer as much again."""
CHECKED_BYTES = 1 << 20
"""Of arrays of so many bytes a row is read as soon as they are placed: before, WebGPU does not say that it has none."""
VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}
"""Operators whose result the provider copies where it is bound to a place. Copies are no part of a capture."""
_GRAPH = "gpu_graph_id"
"""The setting of a run that tells the runtime which capture it is."""
_NO_GRAPH = "-1"
"""Its value for a run that is no capture."""
_graph_numbers = count(1)
_dropped: deque[tuple[weakref.WeakMethod[Callable[[int], None]], int]] = deque()
"""Captures that nobody runs any more, by what lets go of them; finalisers add to it at any time."""
_one_at_a_time = threading.Lock()
"""WebGPU's provider has one queue of commands for all sessions of a process, which two threads must not use at once."""


@cache
def find_devices(provider: Provider) -> Sequence[ort.OrtEpDevice]:
    """The GPUs that a provider could be given on this machine.

    Raises:
        EngineError: the plugin is missing or cannot be loaded.
    """
    try:
        plugin = importlib.import_module(provider.module)
    except ImportError as error:
        raise EngineError(
            f"engine {provider.engine!r} needs a package that is missing ({error}): {provider.install()}"
        ) from error
    takes_software()
    ort.set_default_logger_severity(3)  # else plugins print warnings for those who write them
    try:
        ort.register_execution_provider_library(provider.engine, plugin.get_library_path())
    except Exception as error:  # the runtime's own classes share no other base
        raise EngineError(
            f"engine {provider.engine!r}: its plugin cannot be loaded ({error}); it needs {provider.driver()}"
        ) from error
    return [each for each in ort.get_ep_devices() if each.ep_name == plugin.get_ep_name()]


class Mirror:
    """An array of the host and one in the GPU's memory, of which each is copied over the other when that is asked for.

    Attributes:
        host: the array of the host.
        there: the one in the GPU's memory.
        here: the array of the host, as the runtime takes it.
    """

    def __init__(self, host: Array, there: ort.OrtValue) -> None:
        self.host = host
        self.there = there
        self.here = ort.OrtValue.ortvalue_from_numpy(host)  # shares its memory


def upload(mirrors: Sequence[Mirror]) -> Action:
    """What copies arrays of the host over those in the GPU's memory."""
    return partial(ort.copy_tensors, [each.here for each in mirrors], [each.there for each in mirrors])


def carry_out(lists: Iterable[Iterable[Action]]) -> None:
    """Carry out lists of actions one after another, while no other thread uses the GPU.

    Raises:
        Exception: whatever the runtime raises.
    """
    with _one_at_a_time:
        while _dropped:
            release, graph = _dropped.popleft()
            if (let_go := release()) is not None:
                let_go(graph)
        for actions in lists:
            for action in actions:
                action()


class Gpu:
    """The GPU that this process computes on by a provider. Its methods may be called by several threads."""

    def __init__(self, provider: Provider) -> None:
        """
        Raises:
            EngineError: there is no plugin, or no GPU that it can use; or what is said of several makes no sense.
        """
        found = find_devices(provider)
        if not found:
            raise EngineError(f"engine {provider.engine!r} finds no GPU on this machine; it needs {provider.driver()}")
        self.provider = provider
        self._device = found[0]
        self._settings = provider.settings()
        self._capturing = weakref.WeakSet[ort.InferenceSession]()
        # An array opens the GPU too, for the whole process, but without the settings: so a session has to come first.
        self._first_rows: dict[np.dtype[Any], ort.InferenceSession] = {}
        try:
            self._first_row = self._first_row_of(np.dtype(np.float32))
        except EngineError as error:
            why = plain(error.__cause__ or error)
            raise EngineError(
                f"engine {provider.engine!r} cannot open a GPU ({why}); it needs {provider.driver()}"
            ) from error

    def session(
        self,
        nodes: Sequence[onnx.NodeProto],
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        initializers: Sequence[TensorProto] = (),
        folder: str = "",
        captured: bool = False,
    ) -> ort.InferenceSession:
        """Make a session for a graph, which must run on the GPU as a whole.

        Args:
            initializers: may lie in a file of `folder`.
            captured: whether runs may be captured, if graph and provider allow it. A run that is being captured
                computes the graph twice, so it must not add to what it reads.

        Raises:
            EngineError: the provider lacks something that the graph has, or the driver does.
            EngineMemoryError: the GPU's memory is too small.
        """
        model = helper.make_model(
            helper.make_graph(nodes, "part", inputs, outputs, initializers),
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
            ir_version=IR_VERSION,
        )
        options = _options(folder)
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        made = {name: node.op_type for node in nodes for name in node.output}
        captured = (
            captured and bool(self.provider.capturing) and VIEWS.isdisjoint(made[output.name] for output in outputs)
        )
        options.enable_mem_pattern = not captured
        options.add_provider_for_devices(
            [self._device], self._settings | ({self.provider.capturing: "1"} if captured else {})
        )
        with _one_at_a_time:
            try:
                session = ort.InferenceSession(model.SerializeToString(), options)
            except Exception as error:  # the runtime's own classes share no other base
                kinds = ", ".join(sorted({node.op_type for node in nodes}))
                missing = self._missing(model, folder) if "fallback to CPU EP" in str(error) else []
                what = f", as its provider lacks {', '.join(missing)}" if missing else ""
                raise self._told(error, f"cannot prepare a part of the graph ({kinds}){what}") from error
        if captured:
            self._capturing.add(session)
        return session

    def download(self, mirrors: Sequence[Mirror]) -> Action:
        """What copies arrays in the GPU's memory over those of the host. It waits for the GPU.

        No other thread of Python runs while it waits, which may be for seconds the first time, when drivers compile:
        then a run is waited for before, meanwhile they do.
        """
        there, here = [each.there for each in mirrors], [each.here for each in mirrors]
        compiles = True

        def copy() -> None:
            nonlocal compiles
            if compiles:
                self._first_row.run(["y"], {"x": np.zeros(1, np.float32)})
                compiles = False
            ort.copy_tensors(there, here)

        return copy

    def check_fp16(self) -> None:
        """Make sure that the GPU computes in FP16.

        Raises:
            EngineError: it does not.
        """
        ends = [declared(name, np.float16, [1]) for name in ("x", "y")]
        session = self.session([helper.make_node("Neg", ["x"], ["y"])], ends[:1], ends[1:])
        try:
            self.run(session, {"x": np.zeros(1, np.float16)})
        except Exception as error:  # the runtime's own classes share no other base
            if "f16" not in str(error):
                raise self._told(error, "cannot compute in fp16") from error
            gpu = self._device.device
            name = gpu.metadata.get("Description") or f"{gpu.vendor}, device {gpu.device_id:#06x}"
            other = "a newer driver"
            if gpu.type == ort.OrtHardwareDeviceType.CPU:
                name, other = "a driver in software", "Mesa's driver, which has it"
            raise EngineError(
                f"engine {self.provider.engine!r} cannot compute in fp16 on this GPU ({name}): it or its driver lacks"
                f" {self.provider.fp16}. Leave out --activations fp16 and --cache-format fp16, or use {other}"
            ) from error

    def captures(self, rows: int) -> bool:
        """Whether runs of so many rows of a step are captured, and repeated from then on."""
        return bool(self.provider.capturing) and rows <= CAPTURED_ROWS

    def empty(self, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> ort.OrtValue:
        """An array in the GPU's memory, of zeros.

        Raises:
            EngineMemoryError: there is no room for it.
        """
        return self.array(np.zeros(shape, dtype))

    def array(self, values: Array) -> ort.OrtValue:
        """A copy of an array in the GPU's memory.

        Raises:
            EngineMemoryError: there is no room for it.
        """
        checked = values.nbytes >= CHECKED_BYTES and values.dtype in (np.float32, np.float16)
        first_row = self._first_row_of(values.dtype) if checked else None
        with _one_at_a_time:
            try:
                made = ort.OrtValue.ortvalue_from_numpy(values, self.provider.memory, 0)
                if first_row:
                    row = np.empty(values.shape[1:], values.dtype)  # to be alive while it is written
                    self.bind(first_row, {"x": made}, {"y": row})()
            except Exception as error:  # the runtime's own classes share no other base
                raise self._told(error, f"cannot place {values.nbytes / 1e9:.2f} GB in one piece") from error
            return made

    def mirror(self, host: Array) -> Mirror:
        """A copy of an array in the GPU's memory, with the array.

        Raises:
            EngineMemoryError: there is no room for it.
        """
        return Mirror(host, self.array(host))

    def run(self, session: ort.InferenceSession, inputs: Mapping[str, Array]) -> list[Array]:
        """Run a session on arrays of the host; its results are there too."""
        with _one_at_a_time:
            results: list[Array] = session.run(None, dict(inputs))
            return results

    def bind(
        self,
        session: ort.InferenceSession,
        inputs: Mapping[str, ort.OrtValue],
        outputs: Mapping[str, Place],
        captured: bool = False,
    ) -> Action:
        """Bind a session to places of its values.

        Args:
            inputs: in the GPU's memory.
            outputs: arrays of the host have their values when a run returns; it does not wait for others. They may be
                the inputs, where the operator that makes them works in place.
            captured: the first run is captured, and the others repeat its commands, if the session allows that and no
                output is an array of the host. A capture keeps what is made on the way in the GPU's memory.

        Returns:
            What runs the session. It keeps no array of the host alive.
        """
        binding = session.io_binding()
        places = outputs.values()
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, value)
        for name, place in outputs.items():
            if isinstance(place, np.ndarray):
                binding.bind_output(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
            else:
                binding.bind_ortvalue_output(name, place)
        if session not in self._capturing:
            return partial(session.run_with_iobinding, binding)
        graph = next(_graph_numbers) if captured and not any(isinstance(each, np.ndarray) for each in places) else None
        options = ort.RunOptions()
        options.add_run_config_entry(_GRAPH, _NO_GRAPH if graph is None else str(graph))
        run = partial(session.run_with_iobinding, binding, options)
        if graph is not None:  # of its own, as a capture repeats what it was bound to
            weakref.finalize(run, _dropped.append, (weakref.WeakMethod(session.release_captured_graph), graph))
        return run

    def _first_row_of(self, dtype: np.dtype[Any]) -> ort.InferenceSession:
        """What reads the first row of an array."""
        if dtype not in self._first_rows:
            x, y = (declared(name, dtype) for name in ("x", "y"))
            first = [numpy_helper.from_array(np.zeros((), np.int64), "first")]
            nodes = [helper.make_node("Gather", ["x", "first"], ["y"])]
            self._first_rows[dtype] = self.session(nodes, [x], [y], first)
        return self._first_rows[dtype]

    def _missing(self, model: onnx.ModelProto, folder: str) -> list[str]:
        """The operators of a graph that the provider leaves to the processor; none if that cannot be told."""
        options = _options(folder)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        options.add_provider_for_devices([self._device], self._settings)
        try:
            parts = ort.InferenceSession(model.SerializeToString(), options).get_provider_graph_assignment_info()
        except Exception:  # as of old runtimes, or for want of memory: what is to be told goes without
            return []
        others = (part.get_nodes() for part in parts if part.ep_name != self._device.ep_name)
        return sorted({node.op_type for nodes in others for node in nodes})

    def _told(self, error: Exception, what: str) -> EngineError:
        """The error to raise for one of the runtime."""
        return told(error, self.provider.engine, what)


def _options(folder: str) -> ort.SessionOptions:
    """Those that all sessions have; weights may lie in a file of `folder`."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # the GPU computes
    if folder:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return options


def declared(name: str, dtype: npt.DTypeLike, shape: Sequence[int | str] | None = None) -> onnx.ValueInfoProto:
    """The declaration of an input or output; None: of any shape."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def told(error: Exception, engine: str, what: str) -> EngineError:
    """The error of an engine to raise for one of the runtime: of the kind of what was lacking."""
    words = plain(error)
    if _LOST.search(words):
        why, then = "was reset, or it was taken away", "see the driver's reason in the system's log"
        if takes_software():
            why, then = f"gave up, which may be one in software ({SOFTWARE} is set)", "use another"
        return EngineLostError(
            f"engine {engine!r} has lost its GPU: its driver {why}. If it happens again, {then}, or use engine"
            f" 'onnxruntime' (it {what}: {words})"
        )
    kind = EngineMemoryError if _LACKS_MEMORY.search(words) else EngineError
    return kind(f"engine {engine!r} {what}: {words}")


class ErrorsTold:
    """A context in which errors of the runtime are raised as those of an engine."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is RuntimeError or (kind and kind.__module__.startswith("onnxruntime")):  # which share no other base
            assert isinstance(error, Exception)
            raise told(error, self._engine, "failed in a step") from error


def plain(error: BaseException) -> str:
    """What an error of the runtime says, without the places in its source that it names."""
    return _PLACES.sub("", str(error)).strip()


_PLACES = re.compile(r"\[ONNXRuntimeError\] : \d+ : \w+ : |/onnxruntime_src/\S+:\d+ .*?(?: was false\. |(?=\[ONNX))")
_LACKS_MEMORY = re.compile("memory|max buffer size|invalid buffer", re.IGNORECASE)
"""How providers say so. WebGPU's logs that there is no room for a buffer, and then fails as the buffer is invalid."""
_LOST = re.compile("device.{0,3} (is|was) lost|DEVICE_LOST", re.IGNORECASE)
"""How WebGPU's says that."""
