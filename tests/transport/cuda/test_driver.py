"""What can be known of the real driver without a GPU: its functions are called as declared, errors are clear."""

from __future__ import annotations

import ast
import ctypes
import inspect
import re
import subprocess
import sys
from functools import partial
from threading import Barrier
from typing import Any

import pytest

from motley.transport.cuda import driver as module
from motley.transport.cuda import early as layout
from motley.transport.cuda.compiler import Capability
from motley.transport.cuda.driver import LOST, CudaDriver, Driver
from motley.transport.cuda.errors import CudaError, DeviceLost, OutOfDeviceMemory
from motley.transport.cuda.reduction import SOURCES
from tests.transport.cuda.stand_in import Fails, StandIn


def has_driver() -> bool:
    try:
        CudaDriver().close()
    except CudaError as error:
        return not str(error).startswith("there is no NVIDIA driver")
    return True


def test_every_function_takes_what_it_is_given() -> None:
    """As CuPy and cuda-bindings declare their functions, in the first line of their docstrings."""
    cupy = pytest.importorskip("cupy").cuda
    owners = {"runtime": cupy.runtime, "bindings": pytest.importorskip("cuda.bindings.driver"), "module": cupy.Module}
    called: dict[tuple[str, str], int] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call):
            function, given = node.func, node.args
            if isinstance(function, ast.Attribute) and function.attr == "_call":
                function, *given = node.args
            owner, _, name = ast.unparse(function).rpartition(".")
            if (owner := owner.rpartition(".")[2].removeprefix("_")) in owners:
                called[owner, name] = len(given)
    assert len(called) > 25
    for (owner, name), given_count in called.items():
        function = getattr(owners[owner], name)
        if isinstance(function, type):
            continue
        signature = re.match(rf"(?:Module\.)?{name}\((.*)\)", function.__doc__)
        assert signature, name
        declared = [part for part in signature[1].split(", ") if part and part != "self"]
        needed = [part for part in declared if "=" not in part]
        assert len(needed) <= given_count <= len(declared), f"{name}({signature[1]})"
    launched = re.match(r"launchKernel\((.*)\)", cupy.driver.launchKernel.__doc__)
    assert launched
    on = CudaDriverOn(StandIn())
    on.driver.launch(on.driver.function(SOURCES, "sum_fp32_float32"), 3, 64, [ctypes.c_int(1)], 5)
    given = on.given("launchKernel")
    assert len(launched[1].split(", ")) == len(given)
    assert given[:9] == (9, 3, 1, 1, 64, 1, 1, 0, 5)


def test_every_constant_is_there() -> None:
    cupy, bindings = pytest.importorskip("cupy").cuda, pytest.importorskip("cuda.bindings.driver")
    source = inspect.getsource(module)
    constants = set(re.findall(r"runtime\.((?:stream|event|host|memcpy|cudaDev)[A-Z]\w+)\b(?!\()", source))
    assert {"streamNonBlocking", "hostAllocMapped", "cudaDevAttrMultiProcessorCount"} <= constants
    assert all(hasattr(cupy.runtime, name) for name in constants)
    names = set(re.findall(r"_bindings\.(CU\w+\.CU\w+)", source))
    assert len(names) == 2
    for name in names:
        kind, value = name.split(".")
        assert hasattr(getattr(bindings, kind), value)
    assert bindings.CUhostTaskSyncMode.CU_HOST_TASK_SPINWAIT == module.SPINNING
    result = bindings.CUresult
    assert (result.CUDA_ERROR_OUT_OF_MEMORY, result.CUDA_ERROR_NO_DEVICE) == (module.OUT_OF_MEMORY, module.NO_DEVICE)
    assert result.CUDA_ERROR_NOT_READY == module.NOT_READY
    assert [result(code).name.removeprefix("CUDA_ERROR_") for code in (*LOST, *module.OTHER_CODE)] == [
        *("DEINITIALIZED", "DEVICE_UNAVAILABLE", "ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "CONTAINED"),
        *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "CONTEXT_IS_DESTROYED", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION"),
        *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "EXTERNAL_DEVICE", "UNKNOWN"),
        *("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION"),
    ]


def test_it_has_the_methods_of_the_contract() -> None:
    for name, declared in inspect.getmembers(Driver, inspect.isfunction):
        if not name.startswith("_"):
            assert inspect.signature(getattr(CudaDriver, name)) == inspect.signature(declared), name


@pytest.mark.skipif(has_driver(), reason="there is an NVIDIA driver here")
def test_without_a_driver_it_says_what_to_do() -> None:
    pytest.importorskip("cuda.bindings.driver")
    with pytest.raises(CudaError, match=r"no NVIDIA driver on this machine: install one \(580 or newer\), or use engi"):
        CudaDriver()


def test_nothing_of_cuda_is_imported_before_it_is_used() -> None:
    program = (
        "import sys, motley.transport.cuda.all_reduce, motley.transport.cuda.driver\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('cuda', 'cupy')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


# -- CUDA's errors, as a stand-in for the bindings gives them --------------------------------------------------------


class CudaDriverOn:
    """The real driver class, on what stands for CUDA."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_load", lambda: stand_in.libraries)
            self.driver = CudaDriver()

    def given(self, name: str) -> tuple[Any, ...]:
        return next(given for called, given in self.stand_in.called if called == name)


def refuse(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def opened(**answers: Any) -> CudaDriver:
    return CudaDriverOn(StandIn(**answers)).driver


def test_a_driver_older_than_the_packages_is_refused() -> None:
    with pytest.raises(CudaError, match="there is no NVIDIA driver on this machine: install one"):
        opened(driverGetVersion=0)
    with pytest.raises(CudaError, match=r"knows CUDA 12\.8, the packages here need 13\.0: install driver 580 .*gpu12"):
        opened(driverGetVersion=12080)
    with pytest.raises(CudaError, match=r"CUDA 11\.4, the packages here need 12\.0: install driver 525 or newer$"):
        opened(driverGetVersion=11040, runtimeGetVersion=12090)
    assert opened(driverGetVersion=12020, runtimeGetVersion=12090).version == (12, 2)
    driver = opened(cuStreamWriteValue32=RuntimeError('Function "cuStreamWriteValue32" not found'))
    with pytest.raises(CudaError, match=r"cannot do cuStreamWriteValue32 \(Function .* not found\): install the"):
        driver.write_value(0, 0, 4)
    for code in module.OTHER_CODE:
        driver = opened(load=Fails(code))
        with pytest.raises(CudaError, match=r"load failed: .*; install the newest NVIDIA driver"):
            driver.function(SOURCES, "sum_fp32_float32")


def test_no_gpu_is_told_from_a_driver_that_does_not_start() -> None:
    with pytest.raises(CudaError, match=r"shows no GPU \(is CUDA_VISIBLE_DEVICES set\?\); use engine 'onnxruntime'"):
        opened(getDeviceCount=Fails(module.NO_DEVICE))
    with pytest.raises(CudaError, match=r"does not start \(cudaErrorUnknown: unknown error\): install it anew"):
        opened(getDeviceCount=Fails(999))
    with pytest.raises(CudaError, match="there is no GPU 0: the NVIDIA driver shows 0"):
        opened(getDeviceCount=0)


def test_a_gpu_that_kernels_cannot_be_compiled_for_is_refused_at_once() -> None:
    with pytest.raises(CudaError, match=r"capability 6\.1 is too old: 7\.5 \(Turing\) or newer .* 'onnxruntime'"):
        opened(capability="61")
    with pytest.raises(CudaError, match=r"does not know GPUs of compute capability 99\.0: install a newer one"):
        opened(capability="990")
    assert opened(capability="129").capability == (12, 9)  # newer than any, but of a kind that is known


def test_too_little_memory_says_what_is_needed_and_free() -> None:
    driver = opened(malloc=Fails(module.OUT_OF_MEMORY), hostAlloc=Fails(module.OUT_OF_MEMORY))
    with pytest.raises(OutOfDeviceMemory, match=r"A GPU is out of memory: 5000 bytes are needed, 1000 of 8000 are fr"):
        driver.allocate(5000)
    with pytest.raises(OutOfDeviceMemory, match="this machine has no 5000 bytes of memory that A GPU can reach"):
        driver.allocate_pinned(5000)


@pytest.mark.parametrize("code", LOST)
def test_a_device_that_is_lost_says_so_and_what_to_do(code: int) -> None:
    functions = ("cuEventQuery", "cuEventRecord", "launchKernel", "free", "cuLaunchHostFunc", "cuLaunchHostFunc_v2")
    driver = opened(**dict.fromkeys(functions, Fails(code)), driverGetVersion=13020)
    kernel = driver.function(SOURCES, "sum_fp32_float32")
    for call in (
        lambda: driver.reached(1),
        lambda: driver.record(1, 1),
        lambda: driver.launch(kernel, 1, 1, [], 1),
        lambda: driver.free(1),
        lambda: driver.launch_host(1, 1, 1, spinning=False),
        lambda: driver.launch_host(1, 1, 1, spinning=True),
    ):
        with pytest.raises(DeviceLost, match=r"the GPU is lost \(\w+: .*\): \w+") as caught:
            call()
        assert LOST[code] in str(caught.value)


def test_modules_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    together, compiled = Barrier(2, timeout=10), list[Any]()

    def compile_one(sources: Any, capability: Capability) -> bytes:
        together.wait()
        compiled.append((sources, capability))
        return b""

    monkeypatch.setattr(module, "compile_kernels", compile_one)
    opened(capability="90").compile([SOURCES, SOURCES[:1]])
    assert sorted(compiled, key=str) == sorted([(SOURCES, (9, 0)), (SOURCES[:1], (9, 0))], key=str)
    monkeypatch.setattr(module, "compile_kernels", partial(refuse, CudaError("no NVRTC")))
    with pytest.raises(CudaError, match="no NVRTC"):
        opened(capability="90").compile([SOURCES])


def test_kernels_begin_early_where_gpu_and_driver_let_them() -> None:
    def launched(early: bool, **answers: Any) -> str:
        on = CudaDriverOn(StandIn(**answers))
        on.driver.launch(on.driver.function(SOURCES, "sum_fp32_float32"), 3, 64, [ctypes.c_int(1)], 5, early=early)
        return on.stand_in.called[-1][0]

    assert launched(True, capability="90") == launched(True, capability="120") == "cuLaunchKernelEx"
    assert launched(False, capability="90") == launched(True, capability="89") == "launchKernel"
    assert launched(True, capability="90", driverGetVersion=12030, runtimeGetVersion=12090) == "launchKernel"
    with pytest.raises(DeviceLost, match="the GPU is lost"):
        launched(True, capability="90", cuLaunchKernelEx=Fails(719))


def test_how_a_kernel_begins_early_is_laid_out_as_in_cuda_h() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver")
    early = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert int(early) == layout.EARLY.id
    attribute = bindings.CUlaunchAttribute()
    attribute.id, attribute.value.programmaticStreamSerializationAllowed = early, 1
    size = ctypes.sizeof(layout.LaunchAttribute)
    assert ctypes.string_at(attribute.getPtr(), size) == bytes(layout.EARLY)
    config = bindings.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 3, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 64, 1, 1
    config.hStream, config.numAttrs = 5, 0
    ours = layout.LaunchConfig(3, 1, 1, 64, 1, 1, 0, 5, None, 0)
    assert ctypes.string_at(config.getPtr(), ctypes.sizeof(ours)) == bytes(ours)


def test_what_is_not_ready_or_refused_is_no_loss() -> None:
    driver = opened(cuEventQuery=Fails(module.NOT_READY), streamBeginCapture=Fails(801))
    assert not driver.reached(1)
    assert opened().reached(1)
    with pytest.raises(CudaError, match="streamBeginCapture failed: cudaErrorNotSupported") as caught:
        driver.begin_capture(1)
    assert not isinstance(caught.value, DeviceLost)
    with pytest.raises(CudaError, match=r"spinning host functions need CUDA 13\.2, the driver knows 13\.0"):
        driver.launch_host(1, 1, 1, spinning=True)


def test_a_graph_is_made_of_what_was_recorded_which_is_given_back() -> None:
    on = CudaDriverOn(StandIn(streamEndCapture=7, graphInstantiate=8))
    assert on.driver.end_capture(5) == 8
    assert (on.given("graphInstantiate"), on.given("graphDestroy")) == ((7,), (7,))
    refused = CudaDriverOn(StandIn(streamEndCapture=7, graphInstantiate=Fails(801)))
    with pytest.raises(CudaError, match="graphInstantiate failed"):
        refused.driver.end_capture(5)
    assert refused.given("graphDestroy") == (7,)


def test_a_place_on_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_load", lambda: StandIn(deviceGetByPCIBusId=2, deviceGetAttribute=82).libraries)
    assert module.place_of("0000:01:00.0") == (2, 82)
    monkeypatch.setattr(module, "_load", lambda: StandIn(deviceGetByPCIBusId=Fails(101)).libraries)
    with pytest.raises(CudaError, match="deviceGetByPCIBusId failed: cudaErrorInvalidDevice"):
        module.place_of("0000:01:00.0")
