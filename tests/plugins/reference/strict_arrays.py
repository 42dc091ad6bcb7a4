"""An array module for tests that is as strict as CuPy is, on a machine without a GPU.

Its arrays are NumPy's inside, and refuse what CuPy's refuse: to meet a NumPy array in an operation, as an index or in
an assignment, and to become one, or a Python number, unasked. What CuPy 14.2 does not have is not here either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from motley.plugins.reference.device import Device

TAKES_HOST_ARRAYS = {"asarray"}
FUNCTIONS = {
    *TAKES_HOST_ARRAYS,
    *("empty", "empty_like", "zeros", "zeros_like", "full", "stack", "concatenate", "split", "repeat", "broadcast_to"),
    *("expand_dims", "take_along_axis", "argsort", "where", "clip", "mean", "square", "sqrt", "exp", "abs", "sign"),
    *("minimum", "maximum", "log", "log1p", "expm1", "tanh", "rint"),
}
"""Those of CuPy that the engine calls; each is in CuPy with the arguments that it is given."""
METHODS = {"copy", "max", "mean", "min", "sum", "reshape", "swapaxes", "transpose", "take", "squeeze", "view", "astype"}
PROPERTIES = {"T"}
OPERATORS = (
    *("add", "sub", "mul", "truediv", "matmul", "and", "or", "eq", "ge", "lt", "le", "gt", "rshift"),
    *("radd", "rsub", "rmul", "rtruediv", "rmatmul", "iadd", "isub", "imul", "itruediv", "neg"),
)


def _inside(value: Any) -> Any:
    """What an operation computes with.

    Raises:
        TypeError: a host array would come into it.
    """
    if isinstance(value, StrictArray):
        return value.inside
    if isinstance(value, np.ndarray):
        raise TypeError(f"a NumPy array {value.shape} meets arrays of the device")
    if isinstance(value, list | tuple):
        return type(value)(map(_inside, value))
    return value


def _outside(result: Any) -> Any:
    if isinstance(result, list):
        return [_outside(each) for each in result]
    return StrictArray(np.asarray(result)) if isinstance(result, np.ndarray | np.generic) else result


class StrictArray:
    """An array of the device."""

    __array_ufunc__ = None  # NumPy's arrays leave operators to this class, which refuses them

    def __init__(self, inside: np.ndarray[Any, np.dtype[Any]]) -> None:
        self.inside = inside
        self.shape, self.dtype, self.ndim = inside.shape, inside.dtype, inside.ndim

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: Any) -> StrictArray:
        return StrictArray(np.asarray(self.inside[_inside(index)]))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.inside[_inside(index)] = _inside(value)

    def __getattr__(self, name: str) -> Any:
        if name in PROPERTIES:
            return _outside(getattr(self.inside, name))
        if name not in METHODS:
            raise AttributeError(f"arrays of the device have no {name}")
        return _checked(getattr(self.inside, name))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an array of the device would become a host array or a number unasked")

    __array__ = __bool__ = __int__ = __float__ = __index__ = __iter__ = __array_function__ = _refuse


def _operator(name: str) -> Callable[..., StrictArray]:
    def operate(self: StrictArray, *others: Any) -> Any:
        result = getattr(self.inside, f"__{name}__")(*map(_inside, others))
        return self if result is self.inside else _outside(result)

    return operate


for _name in OPERATORS:
    setattr(StrictArray, f"__{_name}__", _operator(_name))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        return _outside(function(*_inside(arguments), **{name: _inside(value) for name, value in named.items()}))

    return call


class StrictModule:
    """In the place of CuPy."""

    inf = np.inf

    def asarray(self, values: Any, dtype: Any = None) -> StrictArray:
        """An array of the device as it is, if it has that type; else a copy."""
        if isinstance(values, StrictArray) and dtype in (None, values.dtype):
            return values
        inside = values.inside if isinstance(values, StrictArray) else values
        return StrictArray(np.array(inside, dtype))

    def __getattr__(self, name: str) -> Any:
        if name not in FUNCTIONS:
            raise AttributeError(f"{name} was not looked up in CuPy")
        return _checked(getattr(np, name))


def _to_host(array: StrictArray) -> np.ndarray[Any, np.dtype[Any]]:
    if not isinstance(array, StrictArray):
        raise TypeError(f"{type(array)} is copied from the device, and is not there")
    return array.inside.copy()


STRICT = Device(StrictModule(), _to_host)
