"""CUDA's driver, as far as streams need it: all calls of CUDA are here.

`Driver` is the contract, `CudaDriver` fulfils it by ``cuda-bindings``. Streams, events and functions are handles that
only the driver looks into; addresses are integers, on the device or of pinned host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .compiler import Capability, check_capability, compile_kernels
from .errors import CudaError, DeviceLost, OutOfDeviceMemory

OLDEST_DRIVER = (13, 0)
"""The version of CUDA that a driver must know: that of the packages in motley[gpu]."""
SPINNING_SINCE = (13, 2)
"""`cuLaunchHostFunc_v2`."""
START_ANEW = "start the session anew; if that fails too, restart the machine, or use engine 'onnxruntime' on it"
LOST: Mapping[str, str] = {
    "CONTAINED": START_ANEW,
    "CONTEXT_IS_DESTROYED": START_ANEW,
    "DEINITIALIZED": START_ANEW,
    "DEVICE_UNAVAILABLE": "see what else has the GPU for itself, or restart the machine",
    "ECC_UNCORRECTABLE": "its memory has failed: restart the machine; if that happens again, the card is broken",
    "EXTERNAL_DEVICE": START_ANEW,
    "HARDWARE_STACK_ERROR": START_ANEW,
    "ILLEGAL_ADDRESS": START_ANEW,
    "ILLEGAL_INSTRUCTION": START_ANEW,
    "INVALID_ADDRESS_SPACE": START_ANEW,
    "INVALID_PC": START_ANEW,
    "LAUNCH_FAILED": START_ANEW,
    "LAUNCH_TIMEOUT": "a display was kept waiting: raise that limit (on Windows TdrDelay), or use another GPU",
    "MISALIGNED_ADDRESS": START_ANEW,
    "NVLINK_UNCORRECTABLE": START_ANEW,
    "UNKNOWN": START_ANEW,
}
"""The errors after which a GPU does nothing more for this process, and what to do."""
OTHER_CODE = ("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION")
"""The driver does not take what the compiler made."""

Handle = Any


class Pinned(NamedTuple):
    """Host memory that the device reads and writes where it lies, zeroed."""

    host: npt.NDArray[np.uint8]
    device: int
    """Its address on the device; for copies, the address on the host will do."""


class Driver(Protocol):
    """One GPU. Every call raises `CudaError`; those that name a stream only submit to it, and do not wait."""

    @property
    def number(self) -> int:
        """The number of the GPU, as CUDA counts them."""
        ...

    def attach(self) -> None:
        """Make this GPU the calling thread's."""
        ...

    def create_stream(self) -> Handle:
        """A new stream, which waits for no other."""
        ...

    def destroy_stream(self, stream: Handle) -> None:
        """Give back a stream; what was submitted to it still runs."""
        ...

    def create_event(self) -> Handle:
        """A new event, not recorded yet."""
        ...

    def destroy_event(self, event: Handle) -> None:
        """Give back an event; streams that wait for it still do."""
        ...

    def record(self, event: Handle, stream: Handle) -> None:
        """Make `event` stand for this place in `stream`."""
        ...

    def wait(self, stream: Handle, event: Handle) -> None:
        """Hold the stream back until the latest recording of `event` submitted before this call is reached."""
        ...

    def reached(self, event: Handle) -> bool:
        """Whether the latest recording is reached. Also tells, by raising, of any failure on the device before it."""
        ...

    def allocate(self, nbytes: int) -> int:
        """Memory on the device, aligned to 256 bytes."""
        ...

    def free(self, address: int) -> None:
        """Give back what `allocate` gave."""
        ...

    def allocate_pinned(self, nbytes: int) -> Pinned:
        """Memory on the host that copies and the device can use."""
        ...

    def free_pinned(self, pinned: Pinned) -> None:
        """Give back what `allocate_pinned` gave; waits for the device."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        """Between device memory and pinned host memory, or on the device."""
        ...

    def function(self, sources: tuple[Path, ...], name: str) -> Handle:
        """A kernel of these source files, compiled and loaded on first use."""
        ...

    def launch(self, function: Handle, blocks: int, threads: int, arguments: Sequence[Any], stream: Handle) -> None:
        """`arguments`: values of ctypes, of the kernel's types."""
        ...

    def launch_host(self, stream: Handle, function: int, data: int, *, spinning: bool) -> None:
        """Have a thread of the driver call the C function at address `function` with the pointer `data`.

        `spinning`: that thread spins until it is called, instead of being woken.
        """
        ...

    def write_value(self, stream: Handle, address: int, value: int) -> None:
        """Write a u32, behind everything that the stream wrote before; `address` is the device's."""
        ...

    def wait_value(self, stream: Handle, address: int, value: int) -> None:
        """Hold the stream back until the u32 at `address` has come to `value`, around: i32(it - value) >= 0."""
        ...

    def begin_capture(self, stream: Handle) -> None:
        """Begin to record what is submitted to `stream`, without running it."""
        ...

    def end_capture(self, stream: Handle) -> Handle:
        """What was recorded, as a graph that can be launched; the stream runs again, also if this fails."""
        ...

    def is_capturing(self, stream: Handle) -> bool:
        """Whether anybody is recording this stream."""
        ...

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        """Run all of a graph at this place in the stream."""
        ...

    def destroy_graph(self, graph: Handle) -> None:
        """Give back a graph, whose last run must be over."""
        ...


class CudaDriver:
    """`Driver` on one NVIDIA GPU, in its primary context, which CuPy uses too.

    It belongs to the thread that makes it; another one calls `attach` first.
    """

    def __init__(self, device: int = 0) -> None:
        """
        Raises:
            CudaError: no driver, one that is too old, no such GPU, or one that kernels cannot be compiled for.
        """
        self._cuda = _load()
        self._version, self._device, self.capability = _find(self._cuda, device)
        self.number = device
        check_capability(self.capability)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._modules: dict[tuple[Path, ...], Any] = {}
        self._functions: dict[tuple[tuple[Path, ...], str], Any] = {}
        self.attach()

    @property
    def version(self) -> tuple[int, int]:
        """The newest version of CUDA that the driver supports."""
        return self._version

    @property
    def name(self) -> str:
        """The name of the GPU that its maker gave it."""
        return str(self._call("cuDeviceGetName", 256, self._device).decode().rstrip("\0"))

    def attach(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes on the device."""
        result, free, total = self._cuda.cuMemGetInfo()
        self._check("cuMemGetInfo", result)
        return int(free), int(total)

    def close(self) -> None:
        """Unload the kernels and release the context."""
        for module in self._modules.values():
            self._call("cuModuleUnload", module)
        self._modules.clear()
        self._functions.clear()
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def create_stream(self) -> Handle:
        return self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def destroy_stream(self, stream: Handle) -> None:
        self._call("cuStreamDestroy", stream)

    def create_event(self) -> Handle:
        return self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def destroy_event(self, event: Handle) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: Handle, stream: Handle) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, stream: Handle, event: Handle) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def reached(self, event: Handle) -> bool:
        (result,) = self._cuda.cuEventQuery(event)
        if result == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    def allocate(self, nbytes: int) -> int:
        result, address = self._cuda.cuMemAlloc(nbytes)
        if result == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.memory()
            raise OutOfDeviceMemory(
                f"{self.name} is out of memory: {nbytes} bytes are needed, {free} of {total} are free; give this node "
                "a smaller share, or close what else uses the GPU"
            )
        self._check("cuMemAlloc", result)
        return int(address)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def allocate_pinned(self, nbytes: int) -> Pinned:
        flags = self._cuda.CU_MEMHOSTALLOC_PORTABLE | self._cuda.CU_MEMHOSTALLOC_DEVICEMAP
        result, pinned = self._cuda.cuMemHostAlloc(nbytes, flags)
        if result == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfDeviceMemory(
                f"this machine has no {nbytes} bytes of memory that {self.name} can reach; close what else uses memory"
            )
        self._check("cuMemHostAlloc", result)
        address = int(pinned)
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        host[:] = 0
        return Pinned(host, int(self._call("cuMemHostGetDevicePointer", address, 0)))

    def free_pinned(self, pinned: Pinned) -> None:
        self._call("cuMemFreeHost", pinned.host.ctypes.data)

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def function(self, sources: tuple[Path, ...], name: str) -> Handle:
        function = self._functions.get((sources, name))
        if function is None:
            module = self._modules.get(sources)
            if module is None:
                module = self._modules[sources] = self._call(
                    "cuModuleLoadData", compile_kernels(sources, self.capability)
                )
            function = self._functions[sources, name] = self._call("cuModuleGetFunction", module, name.encode())
        return function

    def launch(self, function: Handle, blocks: int, threads: int, arguments: Sequence[Any], stream: Handle) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(addresses), 0)

    def launch_host(self, stream: Handle, function: int, data: int, *, spinning: bool) -> None:
        if not spinning:
            self._call("cuLaunchHostFunc", stream, function, data)
        elif self.version < SPINNING_SINCE or not hasattr(self._cuda, "cuLaunchHostFunc_v2"):
            needed = _dotted(SPINNING_SINCE)
            raise CudaError(f"spinning host functions need CUDA {needed}, the driver knows {_dotted(self.version)}")
        else:
            mode = self._cuda.CUhostTaskSyncMode.CU_HOST_TASK_SPINWAIT
            self._call("cuLaunchHostFunc_v2", stream, function, data, int(mode))

    def write_value(self, stream: Handle, address: int, value: int) -> None:
        flags = self._cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._call("cuStreamWriteValue32", stream, address, value, int(flags))

    def wait_value(self, stream: Handle, address: int, value: int) -> None:
        flags = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call("cuStreamWaitValue32", stream, address, value, int(flags))

    def begin_capture(self, stream: Handle) -> None:
        # Relaxed: what is captured may be loaded, and memory allocated, meanwhile.
        self._call("cuStreamBeginCapture", stream, self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)

    def end_capture(self, stream: Handle) -> Handle:
        recorded = self._call("cuStreamEndCapture", stream)
        try:
            return self._call("cuGraphInstantiate", recorded, 0)
        finally:
            self._call("cuGraphDestroy", recorded)

    def is_capturing(self, stream: Handle) -> bool:
        status = self._call("cuStreamIsCapturing", stream)
        return bool(status != self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: Handle) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> Any:
        return _call(self._cuda, name, *arguments)

    def _check(self, name: str, result: Any) -> None:
        _check(self._cuda, name, result)


class Place(NamedTuple):
    """A GPU among those that CUDA shows."""

    number: int
    """As CUDA counts them: engines take number 0."""
    multiprocessors: int


def place_of(pci_address: str) -> Place:
    """The GPU at a place on the PCI bus (``0000:01:00.0``); makes no context there.

    Raises:
        CudaError: no driver, or one that does not show this GPU.
    """
    cuda = _load()
    device = _call(cuda, "cuDeviceGetByPCIBusId", pci_address.encode())
    kind = cuda.CUdevice_attribute
    count = _call(cuda, "cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device)
    return Place(int(device), int(count))


def check_gpu() -> None:
    """Make sure that `CudaDriver` would find a GPU, and that kernels can be compiled for it; makes no context there.

    Raises:
        CudaError: as `CudaDriver` and `compile_kernels`.
    """
    _, _, capability = _find(_load(), 0)
    check_capability(capability)


def _find(cuda: Any, device: int) -> tuple[tuple[int, int], Any, Capability]:
    """The driver's version of CUDA, and a GPU: its handle and its compute capability."""
    known = _call(cuda, "cuDriverGetVersion")
    version = known // 1000, known % 1000 // 10
    if version < OLDEST_DRIVER:
        raise CudaError(
            f"the NVIDIA driver knows CUDA {_dotted(version)}, Motley needs {_dotted(OLDEST_DRIVER)}: "
            "install driver 580 or newer"
        )
    count = _call(cuda, "cuDeviceGetCount")
    if not 0 <= device < count:
        raise CudaError(f"there is no GPU {device}: the NVIDIA driver shows {count} (is CUDA_VISIBLE_DEVICES set?)")
    handle = _call(cuda, "cuDeviceGet", device)
    kind = cuda.CUdevice_attribute
    capability = Capability(
        _call(cuda, "cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, handle),
        _call(cuda, "cuDeviceGetAttribute", kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, handle),
    )
    return version, handle, capability


def _call(cuda: Any, name: str, *arguments: Any) -> Any:
    """What a function of the driver returns beside its result, if that is success."""
    try:
        result, *values = getattr(cuda, name)(*arguments)
    except RuntimeError as error:  # a function that this driver lacks
        raise CudaError(f"the NVIDIA driver cannot do {name} ({error}): install driver 580 or newer") from error
    _check(cuda, name, result)
    return values[0] if values else None


def _check(cuda: Any, name: str, result: Any) -> None:
    if result == cuda.CUresult.CUDA_SUCCESS:
        return
    _, text = cuda.cuGetErrorString(result)
    said, code = (text or result.name.encode()).decode(), result.name.removeprefix("CUDA_ERROR_")
    if code in LOST:
        raise DeviceLost(f"the GPU is lost ({name}: {said}): {LOST[code]}")
    if code in OTHER_CODE:
        raise CudaError(f"{name} failed: {said}; install the newest NVIDIA driver, and motley[gpu] anew")
    raise CudaError(f"{name} failed: {said}")


def _load() -> Any:
    """Load the driver's library and initialise it."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(f"GPUs need a package that is missing ({error}); install motley[gpu]") from error
    try:
        (result,) = driver.cuInit(0)
    except Exception as error:  # the library is looked for at the first call, and its absence has a type of its own
        raise CudaError(
            "there is no NVIDIA driver on this machine: install one (580 or newer), or use engine 'onnxruntime'"
        ) from error
    if result == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise CudaError("the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES set?); use engine 'onnxruntime'")
    if result != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"the NVIDIA driver does not start ({result.name}): install it anew, or restart the machine")
    return driver


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
