"""CuPy, cuda-bindings and the driver's library without a driver: functions that answer what a test wants."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from motley.transport.cuda.driver import Libraries


class Fails(NamedTuple):
    """An answer: the error of CUDA's with this number."""

    code: int


class StandIn:
    """Every function that the real packages have succeeds and gives 1, unless there is another answer for it.

    Attributes:
        answers: by function, what it gives, or `Fails`, or an exception that it raises.
        called: the functions that were called, with what.
        libraries: what a driver calls.
    """

    def __init__(self, *, capability: str = "86", **answers: Any) -> None:
        cupy = pytest.importorskip("cupy").cuda
        self._bindings = pytest.importorskip("cuda.bindings.driver")
        self._error = cupy.runtime.CUDARuntimeError
        self._host = ctypes.create_string_buffer(1 << 20)
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {
            "driverGetVersion": 13000,
            "runtimeGetVersion": 13020,
            "getDeviceProperties": {"name": b"A GPU"},
            "memGetInfo": (1_000, 8_000),
            "get_function": SimpleNamespace(ptr=9),
            "hostAlloc": ctypes.addressof(self._host),
            **answers,
        }
        stand_in = SimpleNamespace(
            runtime=Part(cupy.runtime, self._of_cupy),
            driver=Part(cupy.driver, self._of_cupy),
            Module=lambda: Part(cupy.Module, self._of_cupy),
            Device=lambda number: SimpleNamespace(compute_capability=capability),
        )
        functions = SimpleNamespace(cuLaunchHostFunc=print, cuLaunchHostFunc_v2=print, cuLaunchKernelEx=print)
        bindings = Part(self._bindings, self._of_bindings)
        self.libraries = Libraries(stand_in, bindings, Part(functions, self._of_library))

    def _answer(self, name: str, given: tuple[Any, ...]) -> Any:
        self.called.append((name, given))
        answer = self.answers.get(name, 1)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _of_cupy(self, name: str, given: tuple[Any, ...]) -> Any:
        answer = self._answer(name, given)
        if isinstance(answer, Fails):
            raise self._error(answer.code)
        return answer

    def _of_bindings(self, name: str, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._bindings.CUresult(self._of_library(name, given)),)

    def _of_library(self, name: str, given: tuple[Any, ...]) -> int:
        answer = self._answer(name, given)
        return answer.code if isinstance(answer, Fails) else 0


class Part:
    """The functions of one module are answered, all else is the real one's."""

    def __init__(self, real: Any, answer: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self._real = real
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if not callable(real) or isinstance(real, type):
            return real

        def function(*given: Any) -> Any:
            return self._answer(name, given)

        function.__name__ = name
        return function
