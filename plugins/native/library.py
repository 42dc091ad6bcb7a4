"""The compiled kernels (`kernels/`) as ctypes functions."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .structs import (
    STRUCTS,
    Adapted,
    Attention,
    Choice,
    Draw,
    Encoding,
    Gated,
    HeadNorms,
    Masses,
    Matmul,
    Mixture,
    Norm,
    Question,
    Recurrent,
    StreamGates,
    Streams,
)

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

LEVELS = ("portable", "avx2", "avx_vnni", "avx512_vnni")
"""Kinds of processors, worst first; the numbers that library.c calls them by are their places."""

PATH = Path(__file__).with_name("_kernels.dll" if sys.platform == "win32" else "_kernels.so")

INTERFACE = (24, *map(ctypes.sizeof, STRUCTS))
"""What ``motley_interface`` of library.c must be: a number that is raised in both files whenever they no longer
understand each other, and the size of each struct. It shows that a library was built before an update."""

FUNCTIONS: tuple[tuple[str, list[Any], Any], ...] = (
    ("supports", [c_int32], c_int32),
    ("set_level", [c_int32], None),
    ("set_reach", [c_int32, c_int32, c_int32], None),
    ("pool_open", [c_int32], c_void_p),
    ("pool_stop", [c_void_p], None),
    ("pool_free", [c_void_p], None),
    ("prepare", [POINTER(Matmul)], c_int32),
    ("matmul", [POINTER(Matmul)], None),
    ("norm", [POINTER(Norm)], None),
    ("head_norms", [POINTER(HeadNorms)], None),
    ("gated", [POINTER(Gated)], None),
    ("stream_gates", [POINTER(StreamGates)], None),
    ("streams", [POINTER(Streams)], None),
    ("prepare_mixture", [POINTER(Mixture)], c_int32),
    ("mixture", [POINTER(Mixture)], c_int64),
    ("adapted", [POINTER(Adapted), POINTER(Matmul)], c_int64),
    ("prepare_attention", [POINTER(Attention)], c_int32),
    ("attention", [POINTER(Attention)], c_int32),
    ("queries", [POINTER(Attention), c_int64, c_void_p], c_int32),
    ("answer", [POINTER(Question)], c_int32),
    ("prepare_choice", [POINTER(Choice)], c_int32),
    ("choose", [POINTER(Choice)], c_int32),
    ("prepare_recurrent", [POINTER(Recurrent)], c_int32),
    ("recurrent", [POINTER(Recurrent)], c_int32),
    ("encode", [POINTER(Encoding)], None),
    ("contenders", [POINTER(Draw)], c_int64),
    ("masses", [POINTER(Masses)], None),
    ("guard", [c_void_p, c_int64], c_int32),
    ("is_broken", [c_int32], c_int32),
    ("unguard", [c_int32], None),
)


@cache
def library() -> ctypes.CDLL:
    """The library, set to the best level that this processor supports.

    Raises:
        ImportError: it is missing, cannot be loaded, or was built from other sources than these.
    """
    try:
        lib = ctypes.CDLL(str(PATH))
        _declare(lib)
    except (OSError, AttributeError, ValueError) as error:
        raise ImportError(
            f"Motley's compiled kernels cannot be loaded ({error}); they are built by installation: "
            "run `pip install .` (or `pip install -e .`) in Motley's folder again",
            path=str(PATH),
        ) from error
    lib.motley_set_level(LEVELS.index(supported_levels(lib)[-1]))
    return lib


def _declare(lib: ctypes.CDLL) -> None:
    """Give functions their types.

    Raises:
        AttributeError: one is missing.
        ValueError: the library is not of these sources.
    """
    interface = tuple((c_int32 * len(INTERFACE)).in_dll(lib, "motley_interface"))
    if interface != INTERFACE:
        raise ValueError(f"built from other sources: its interface is {interface}, not {INTERFACE}")
    for name, arguments, result in FUNCTIONS:
        function = lib[f"motley_{name}"]
        function.argtypes, function.restype = arguments, result
        setattr(lib, f"motley_{name}", function)
    lib.motley_adapted.errcheck = _check_rows
    lib.motley_mixture.errcheck = _check_choices
    lib.motley_attention.errcheck = lib.motley_queries.errcheck = lib.motley_choose.errcheck = _check_spans


def supported_levels(lib: ctypes.CDLL) -> list[str]:
    """The `LEVELS` that this processor supports, worst first."""
    return [level for number, level in enumerate(LEVELS) if lib.motley_supports(number)]


def address(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, *shape: int) -> int:
    """The address of an array's elements, for a kernel to read.

    Raises:
        ValueError: it has another shape or type, or is not contiguous or aligned.
    """
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} must be {np.dtype(dtype)}{list(shape)}, not {array.dtype}{list(array.shape)}")
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise ValueError(f"{name} must be contiguous and aligned")
    return array.ctypes.data


def place(name: str, array: npt.NDArray[Any], dtype: npt.DTypeLike, *shape: int) -> int:
    """The address of an array's elements, for a kernel to write.

    Raises:
        ValueError: it is read-only, has another shape or type, or is not contiguous or aligned.
    """
    if not array.flags.writeable:
        raise ValueError(f"{name} must be writeable")
    return address(name, array, dtype, *shape)


def _check_rows(misfit: Any, _function: Any, arguments: tuple[Any, ...]) -> Any:
    """Tell what is wrong with the rows that ``motley_adapted`` has not computed.

    Raises:
        IndexError: a row is not there.
        MemoryError: there is no memory for what is between the two products.
    """
    a = arguments[0]._obj
    if misfit >= 0:
        slot = a.step.contents.groups[misfit].slot
        raise IndexError(f"the adapter in slot {slot} has a row that is not among the {a.tokens} of the step")
    if misfit < -1:
        raise MemoryError("no memory for what adapters make of a step's rows")
    return misfit


def _check_choices(misfit: Any, _function: Any, arguments: tuple[Any, ...]) -> Any:
    """Tell which choice of an expert ``motley_mixture`` could not follow.

    Raises:
        IndexError: there is one.
    """
    if misfit >= 0:
        m = arguments[0]._obj
        row, choice = divmod(misfit, m.choices)
        raise IndexError(f"choice {choice} of row {row} is none of the {m.experts} experts of its layer")
    return misfit


def _check_spans(misfit: Any, _function: Any, arguments: tuple[Any, ...]) -> Any:
    """Tell what is wrong with the span that ``motley_attention`` or ``motley_choose`` says does not fit.

    Raises:
        IndexError: there is one.
    """
    if misfit >= 0:
        bound = arguments[0]._obj
        a = bound.attention if isinstance(bound, Choice) else bound
        spans = a.spans.contents
        span = spans.all[misfit]
        angles = ""
        if a.turned:
            table = spans.tables[misfit * spans.ropes + a.rope]
            angles = f", and tables f32[{table.places}, {table.turned}] of {a.turned} angles each"
        choices = f"; where {a.choices} positions are chosen, these are ascending" if a.chosen else ""
        far = f", those of its rows below {a.near.count}" if a.far.count else ""
        raise IndexError(
            f"span {misfit} is of rows {span.row} to {span.row + span.rows} of {a.rows}, at positions "
            f"{span.position} to {span.position + span.rows} of at most {a.context}; it has {span.count} blocks of "
            f"{a.tokens} positions, whose numbers must be below {a.near.count + a.far.count}{far}{angles}{choices}"
        )
    return misfit
