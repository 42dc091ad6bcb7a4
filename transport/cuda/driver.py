"""CUDA's driver, as far as streams need it: all calls of CUDA are here.

`Driver` is the contract, `CudaDriver` fulfils it by CuPy. Streams, events and functions are handles that only the
driver looks into; addresses are integers, on the device or of pinned host memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from motley.protocol.installing import how_to_install

from .compiler import Capability, check_capability, compile_kernels
from .early import EARLY, LaunchConfig
from .errors import CudaError, DeviceLost, OutOfDeviceMemory
from .library import driver_library

DRIVERS = {12: 525, 13: 580}
"""The oldest driver that serves CuPy's packages for this major version of CUDA, as NVIDIA numbers them on Linux."""
SPINNING_SINCE = (13, 2)
"""The version of CUDA from which on a driver has `cuLaunchHostFunc_v2`."""
EARLY_SINCE, EARLY_CAPABILITY = (12, 4), (9, 0)
"""The version of CUDA from which on a driver records kernels that begin early, and the first GPUs that have them."""
OUT_OF_MEMORY, NO_DEVICE, NOT_READY = 2, 100, 600
SPINNING = 1  # CU_HOST_TASK_SPINWAIT
START_ANEW = "start the session anew; if that fails too, restart the machine, or use engine 'onnxruntime' on it"
LOST: Mapping[int, str] = {
    4: START_ANEW,  # deinitialised
    46: "see what else has the GPU for itself, or restart the machine",
    214: "its memory has failed: restart the machine; if that happens again, the card is broken",
    220: START_ANEW,  # uncorrectable error of NVLink
    226: START_ANEW,  # contained
    700: START_ANEW,  # illegal address
    702: "a display was kept waiting: raise that limit (on Windows TdrDelay), or use another GPU",
    709: START_ANEW,  # the context is destroyed
    714: START_ANEW,  # hardware stack error
    715: START_ANEW,  # illegal instruction
    716: START_ANEW,  # misaligned address
    717: START_ANEW,  # invalid address space
    718: START_ANEW,  # invalid program counter
    719: START_ANEW,  # launch failed
    911: START_ANEW,  # error of another device
    999: START_ANEW,  # unknown
}
"""The errors after which a GPU does nothing more for this process, by CUDA's number, and what to do."""
OTHER_CODE = (200, 209, 222)
"""Invalid image, no binary for this GPU, unsupported PTX: the driver does not take what the compiler made."""

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

    def compile(self, modules: Collection[tuple[Path, ...]]) -> None:
        """Compile the source files of several modules, side by side, so that no kernel's first use waits for that."""
        ...

    def function(self, sources: tuple[Path, ...], name: str) -> Handle:
        """A kernel of these source files, compiled and loaded on first use."""
        ...

    def launch(
        self,
        function: Handle,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        stream: Handle,
        *,
        early: bool = False,
    ) -> None:
        """Run a kernel.

        Args:
            arguments: values of ctypes, of the kernel's types.
            early: it may begin before the kernel behind which it is submitted is done, where the GPU can do that: it
                calls `wait_for_previous` (device.cuh) before it touches what other kernels read or write.
        """
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


class Libraries(NamedTuple):
    """What CUDA is called by."""

    cupy: Any
    """``cupy.cuda``."""
    bindings: Any
    """``cuda.bindings.driver``, for what CuPy lacks, or does without letting go of the interpreter's lock: whoever
    holds that while the driver makes it wait keeps the host steps from running that it waits for."""
    library: Any
    """The driver's library itself: cuda-bindings frees a host function at its first call, a graph calls it again."""


class CudaDriver:
    """`Driver` on one NVIDIA GPU, in its primary context, which all of CuPy uses.

    It belongs to the thread that makes it; another one calls `attach` first.
    """

    def __init__(self, device: int = 0) -> None:
        """
        Raises:
            CudaError: no driver, one that is too old, no such GPU, or one that kernels cannot be compiled for.
        """
        self._cupy, self._bindings, self._library = libraries = _load()
        self._runtime = self._cupy.runtime
        self._version, self.capability = _find(libraries, device)
        self.number = device
        check_capability(self.capability)
        knows = self._version >= EARLY_SINCE and hasattr(self._library, "cuLaunchKernelEx")
        self._begins_early = knows and self.capability >= EARLY_CAPABILITY
        self._functions: dict[tuple[tuple[Path, ...], str], Any] = {}
        self._modules: dict[tuple[Path, ...], Any] = {}
        self.attach()

    @property
    def version(self) -> tuple[int, int]:
        """The newest version of CUDA that the driver supports."""
        return self._version

    @property
    def name(self) -> str:
        """The name of the GPU that its maker gave it."""
        return str(self._call(self._runtime.getDeviceProperties, self.number)["name"].decode())

    def attach(self) -> None:
        self._call(self._runtime.setDevice, self.number)

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes on the device."""
        free, total = self._call(self._runtime.memGetInfo)
        return int(free), int(total)

    def close(self) -> None:
        """Unload the kernels. The context stays, as long as the process."""
        self._functions.clear()
        self._modules.clear()

    def create_stream(self) -> Handle:
        return self._call(self._runtime.streamCreateWithFlags, self._runtime.streamNonBlocking)

    def destroy_stream(self, stream: Handle) -> None:
        self._call(self._runtime.streamDestroy, stream)

    def create_event(self) -> Handle:
        return self._call(self._runtime.eventCreateWithFlags, self._runtime.eventDisableTiming)

    def destroy_event(self, event: Handle) -> None:
        self._call(self._runtime.eventDestroy, event)

    def record(self, event: Handle, stream: Handle) -> None:
        self._call(self._bindings.cuEventRecord, event, stream)

    def wait(self, stream: Handle, event: Handle) -> None:
        self._call(self._runtime.streamWaitEvent, stream, event)

    def reached(self, event: Handle) -> bool:
        (result,) = self._bindings.cuEventQuery(event)
        if result != NOT_READY:
            self._check("cuEventQuery", result)
        return bool(result != NOT_READY)

    def allocate(self, nbytes: int) -> int:
        try:
            return int(self._call(self._runtime.malloc, nbytes))
        except OutOfDeviceMemory as error:
            free, total = self.memory()
            raise OutOfDeviceMemory(
                f"{self.name} is out of memory: {nbytes} bytes are needed, {free} of {total} are free; give this node "
                "a smaller share, or close what else uses the GPU"
            ) from error

    def free(self, address: int) -> None:
        self._call(self._runtime.free, address)

    def allocate_pinned(self, nbytes: int) -> Pinned:
        try:
            address = int(self._call(self._runtime.hostAlloc, nbytes, self._runtime.hostAllocMapped))
        except OutOfDeviceMemory as error:
            raise OutOfDeviceMemory(
                f"this machine has no {nbytes} bytes of memory that {self.name} can reach; close what else uses memory"
            ) from error
        host = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        host[:] = 0
        return Pinned(host, address)  # where addresses are of 64 bits, the device's are the host's

    def free_pinned(self, pinned: Pinned) -> None:
        self._call(self._runtime.freeHost, pinned.host.ctypes.data)

    def copy(self, target: int, source: int, nbytes: int, stream: Handle) -> None:
        self._call(self._runtime.memcpyAsync, target, source, nbytes, self._runtime.memcpyDefault, stream)

    def compile(self, modules: Collection[tuple[Path, ...]]) -> None:
        with ThreadPoolExecutor() as threads:
            for _ in threads.map(partial(compile_kernels, capability=self.capability), modules):
                pass

    def function(self, sources: tuple[Path, ...], name: str) -> Handle:
        function = self._functions.get((sources, name))
        if function is None:
            module = self._modules.get(sources)
            if module is None:
                module = self._cupy.Module()
                self._call(module.load, compile_kernels(sources, self.capability))
                self._modules[sources] = module
            function = self._functions[sources, name] = self._call(module.get_function, name)
        return function

    def launch(
        self,
        function: Handle,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        stream: Handle,
        *,
        early: bool = False,
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        if early and self._begins_early:
            config = LaunchConfig(blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.pointer(EARLY), 1)
            given = ctypes.byref(config), ctypes.c_void_p(function.ptr), addresses, None
            self._check("cuLaunchKernelEx", self._library.cuLaunchKernelEx(*given))
            return
        where, launch = ctypes.addressof(addresses), self._cupy.driver.launchKernel
        self._call(launch, function.ptr, blocks, 1, 1, threads, 1, 1, 0, stream, where, 0)

    def launch_host(self, stream: Handle, function: int, data: int, *, spinning: bool) -> None:
        arguments = [ctypes.c_void_p(each) for each in (stream, function, data)]
        if not spinning:
            self._check("cuLaunchHostFunc", self._library.cuLaunchHostFunc(*arguments))
        elif self.version < SPINNING_SINCE or not hasattr(self._library, "cuLaunchHostFunc_v2"):
            needed = _dotted(SPINNING_SINCE)
            raise CudaError(f"spinning host functions need CUDA {needed}, the driver knows {_dotted(self.version)}")
        else:
            self._check("cuLaunchHostFunc_v2", self._library.cuLaunchHostFunc_v2(*arguments, ctypes.c_uint(SPINNING)))

    def write_value(self, stream: Handle, address: int, value: int) -> None:
        flags = self._bindings.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._call(self._bindings.cuStreamWriteValue32, stream, address, value, int(flags))

    def wait_value(self, stream: Handle, address: int, value: int) -> None:
        flags = self._bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call(self._bindings.cuStreamWaitValue32, stream, address, value, int(flags))

    def begin_capture(self, stream: Handle) -> None:
        # Relaxed, as is CuPy's default: what is captured may be loaded, and memory allocated, meanwhile.
        self._call(self._runtime.streamBeginCapture, stream)

    def end_capture(self, stream: Handle) -> Handle:
        recorded = self._call(self._runtime.streamEndCapture, stream)
        try:
            return self._call(self._runtime.graphInstantiate, recorded)
        finally:
            self._call(self._runtime.graphDestroy, recorded)

    def is_capturing(self, stream: Handle) -> bool:
        return bool(self._call(self._runtime.streamIsCapturing, stream))

    def launch_graph(self, graph: Handle, stream: Handle) -> None:
        self._call(self._runtime.graphLaunch, graph, stream)

    def destroy_graph(self, graph: Handle) -> None:
        self._call(self._runtime.graphExecDestroy, graph)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function of CuPy's returns, or of cuda-bindings (those that are called return nothing)."""
        try:
            answer = function(*arguments)
        except RuntimeError as error:  # of which CuPy's errors are kinds
            raise _failure(function.__name__, error) from error
        if isinstance(answer, tuple) and len(answer) == 1:
            self._check(function.__name__, answer[0])
        return answer

    def _check(self, name: str, result: int) -> None:
        if int(result):
            raise _failure(name, self._runtime.CUDARuntimeError(int(result)))


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
    runtime = _load().cupy.runtime
    try:
        number = runtime.deviceGetByPCIBusId(pci_address)
        count = runtime.deviceGetAttribute(runtime.cudaDevAttrMultiProcessorCount, number)
    except RuntimeError as error:
        raise _failure("deviceGetByPCIBusId", error) from error
    return Place(int(number), int(count))


def check_gpu() -> None:
    """Make sure that `CudaDriver` would find a GPU, and that kernels can be compiled for it; makes no context there.

    Raises:
        CudaError: as `CudaDriver` and `compile_kernels`.
    """
    _, capability = _find(_load(), 0)
    check_capability(capability)


def _find(libraries: Libraries, device: int) -> tuple[tuple[int, int], Capability]:
    """The driver's version of CUDA, and a GPU's compute capability."""
    runtime = libraries.cupy.runtime
    known, major = runtime.driverGetVersion(), runtime.runtimeGetVersion() // 1000
    if not known:
        raise CudaError(
            f"there is no NVIDIA driver on this machine: install one ({DRIVERS[major]} or newer), or use engine "
            "'onnxruntime'"
        )
    version = known // 1000, known % 1000 // 10
    if version < (major, 0):
        older = f", or have the extra gpu12 in place of gpu: {how_to_install('gpu12')}" if version >= (12, 0) else ""
        raise CudaError(
            f"the NVIDIA driver knows CUDA {_dotted(version)}, the packages here need {major}.0: install driver "
            f"{DRIVERS[major]} or newer{older}"
        )
    try:
        count = runtime.getDeviceCount()
    except RuntimeError as error:
        if getattr(error, "status", 0) == NO_DEVICE:
            said = "the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES set?); use engine 'onnxruntime'"
            raise CudaError(said) from error
        raise CudaError(
            f"the NVIDIA driver does not start ({error}): install it anew, or restart the machine"
        ) from error
    if not 0 <= device < count:
        raise CudaError(f"there is no GPU {device}: the NVIDIA driver shows {count} (is CUDA_VISIBLE_DEVICES set?)")
    return version, Capability(*divmod(int(libraries.cupy.Device(device).compute_capability), 10))


def _failure(name: str, error: RuntimeError) -> CudaError:
    """What to raise for an error of CuPy's, or for that of cuda-bindings that the driver lacks a function."""
    code = getattr(error, "status", None)
    if code is None:
        return CudaError(f"the NVIDIA driver cannot do {name} ({error}): install the newest one")
    if code == OUT_OF_MEMORY:
        return OutOfDeviceMemory(f"{name} failed: {error}")
    if code in LOST:
        return DeviceLost(f"the GPU is lost ({name}: {error}): {LOST[code]}")
    if code in OTHER_CODE:
        anew = f"install the newest NVIDIA driver, and the extra gpu anew: {how_to_install('gpu')}"
        return CudaError(f"{name} failed: {error}; {anew}")
    return CudaError(f"{name} failed: {error}")


def _load() -> Libraries:
    try:
        import cupy.cuda
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaError(f"GPUs need a package that is missing ({error}): {how_to_install('gpu')}") from error
    return Libraries(cupy.cuda, driver, driver_library())


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
