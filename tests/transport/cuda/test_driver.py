"""What can be known of the real driver without a GPU: its functions are called as declared, errors are clear."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys

import pytest

from motley.transport.cuda import driver as module
from motley.transport.cuda.driver import CudaDriver, Driver
from motley.transport.cuda.errors import CudaError


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
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
