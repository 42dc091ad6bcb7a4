"""``cuda.bindings.driver`` without a driver: its types and constants, and functions that answer what a test wants."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest

NO_VALUE = ("cuEventQuery",)
"""Functions that give nothing but success; where nobody looks, they may as well give 1."""


class Bindings:
    """Every function succeeds and gives 1, unless there is another answer for it.

    Attributes:
        answers: by function, what it gives; the name of an error of CUDA's, which it fails with; or an exception.
        called: the functions that were called, in order.
    """

    def __init__(self, **answers: Any) -> None:
        self._real = pytest.importorskip("cuda.bindings.driver")
        self.called: list[str] = []
        self._host = ctypes.create_string_buffer(1 << 20)
        attributes = self._real.CUdevice_attribute
        self.answers: dict[str, Any] = {
            "cuDriverGetVersion": 13000,
            "cuDeviceGetName": b"A GPU\0",
            "cuMemGetInfo": (1_000, 8_000),
            "cuMemHostAlloc": ctypes.addressof(self._host),
            "cuDeviceGetAttribute": {
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 8,
                attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 6,
            },
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        if name == "cuGetErrorString":
            return self._text
        is_function = name.startswith("cu") and name[2].isupper()
        return partial(self._answer, name) if is_function else real

    def _answer(self, name: str, *given: Any) -> tuple[Any, ...]:
        self.called.append(name)
        answer = self.answers.get(name, 1)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            values = () if name in NO_VALUE else (0,)
            return getattr(self._real.CUresult, f"CUDA_ERROR_{answer}"), *values
        if isinstance(answer, dict):
            answer = answer[given[0]]
        if name in NO_VALUE:
            return (self._real.CUresult.CUDA_SUCCESS,)
        return self._real.CUresult.CUDA_SUCCESS, *(answer if isinstance(answer, tuple) else (answer,))

    def _text(self, result: Any) -> tuple[Any, bytes]:
        return self._real.CUresult.CUDA_SUCCESS, result.name.removeprefix("CUDA_ERROR_").lower().encode()
