"""What can be known of the real driver without a GPU: its functions are called as declared, errors are clear."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from motley.transport.cuda import driver as module
from motley.transport.cuda.driver import LOST, CudaDriver, Driver
from motley.transport.cuda.errors import CudaError, DeviceLost, OutOfDeviceMemory
from motley.transport.cuda.reduction import SOURCES
from tests.transport.cuda.bindings import Bindings


def has_driver() -> bool:
    try:
        CudaDriver().close()
    except CudaError as error:
        return not str(error).startswith("there is no NVIDIA driver")
    return True


def test_every_function_takes_what_it_is_given() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    called = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "_call" and isinstance(node.args[0], ast.Constant):
                called[str(node.args[0].value)] = len(node.args) - 1
            elif node.func.attr.startswith("cu") and node.func.attr[2].isupper():
                called[node.func.attr] = len(node.args)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_call":
            match node.args:
                case [_, ast.Constant(value=name), *given]:
                    called[str(name)] = len(given)
    assert len(called) > 25
    for name, given in called.items():
        signature = re.match(rf"{name}\((.*)\)\n", getattr(cuda, name).__doc__)
        assert signature, name
        assert len([part for part in signature[1].split(", ") if part]) == given, f"{name}({signature[1]})"


def test_every_constant_is_there() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    source = inspect.getsource(module).replace("kind.", "_cuda.CUdevice_attribute.")
    names = set(re.findall(r"(?:_cuda|driver)\.(CU\w+(?:\.CU\w+)?)", source))
    assert len(names) > 8
    for name in names:
        held = cuda
        for part in name.split("."):
            held = getattr(held, part)


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


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaDriver]:
    def open_driver(**answers: Any) -> CudaDriver:
        monkeypatch.setattr(module, "_load", lambda: Bindings(**answers))
        return CudaDriver()

    return open_driver


def capability(major: int, minor: int) -> dict[str, Any]:
    kind = pytest.importorskip("cuda.bindings.driver").CUdevice_attribute
    return {
        "cuDeviceGetAttribute": {
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: major,
            kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: minor,
        }
    }


def test_a_driver_older_than_the_packages_is_refused(opened: Callable[..., CudaDriver]) -> None:
    with pytest.raises(CudaError, match=r"knows CUDA 12\.8, Motley needs 13\.0: install driver 580 or newer"):
        opened(cuDriverGetVersion=12080)
    driver = opened(cuMemcpyAsync=RuntimeError('Function "cuMemcpyAsync" not found'))
    with pytest.raises(CudaError, match=r"cannot do cuMemcpyAsync \(Function .* not found\): install driver 580"):
        driver.copy(0, 0, 4, None)
    for code in ("UNSUPPORTED_PTX_VERSION", "NO_BINARY_FOR_GPU", "INVALID_IMAGE"):
        driver = opened(cuModuleLoadData=code)
        with pytest.raises(CudaError, match=r"cuModuleLoadData failed: .*; install the newest NVIDIA driver"):
            driver.function(SOURCES, "sum_fp32_float32")


def test_a_gpu_that_kernels_cannot_be_compiled_for_is_refused_at_once(opened: Callable[..., CudaDriver]) -> None:
    with pytest.raises(CudaError, match=r"capability 6\.1 is too old: 7\.5 \(Turing\) or newer .* 'onnxruntime'"):
        opened(**capability(6, 1))
    with pytest.raises(CudaError, match=r"does not know GPUs of compute capability 99\.0: install a newer one"):
        opened(**capability(99, 0))
    assert opened(**capability(12, 9)).capability == (12, 9)  # newer than any, but of a kind that is known


def test_too_little_memory_says_what_is_needed_and_free(opened: Callable[..., CudaDriver]) -> None:
    driver = opened(cuMemAlloc="OUT_OF_MEMORY", cuMemHostAlloc="OUT_OF_MEMORY")
    with pytest.raises(OutOfDeviceMemory, match=r"A GPU is out of memory: 5000 bytes are needed, 1000 of 8000 are fr"):
        driver.allocate(5000)
    with pytest.raises(OutOfDeviceMemory, match="this machine has no 5000 bytes of memory that A GPU can reach"):
        driver.allocate_pinned(5000)


@pytest.mark.parametrize("code", LOST)
def test_a_device_that_is_lost_says_so_and_what_to_do(opened: Callable[..., CudaDriver], code: str) -> None:
    driver = opened(cuEventQuery=code, cuLaunchKernel=code, cuMemFree=code)
    for call in (
        lambda: driver.reached(None),
        lambda: driver.launch(None, 1, 1, [], None),
        lambda: driver.free(1),
    ):
        with pytest.raises(DeviceLost, match=r"the GPU is lost \(cu\w+: .*\): \w+") as caught:
            call()
        assert LOST[code] in str(caught.value)


def test_what_is_not_ready_or_refused_is_no_loss(opened: Callable[..., CudaDriver]) -> None:
    driver = opened(cuEventQuery="NOT_READY", cuStreamBeginCapture="NOT_SUPPORTED")
    assert not driver.reached(None)
    with pytest.raises(CudaError, match="cuStreamBeginCapture failed: not_supported") as caught:
        driver.begin_capture(None)
    assert not isinstance(caught.value, DeviceLost)
