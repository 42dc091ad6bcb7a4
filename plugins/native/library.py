"""The compiled kernels (`library.c` and the operators beside it) as ctypes functions.

Long because each struct that C reads is here once, field by field: their sizes together are the interface.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

LEVELS = ("portable", "avx2", "avx_vnni", "avx512_vnni")
"""Kinds of processors, worst first; the numbers that library.c calls them by are their places."""

PATH = Path(__file__).with_name("_kernels.dll" if sys.platform == "win32" else "_kernels.so")


AWAIT = ctypes.CFUNCTYPE(None)
"""What an attention calls before it reads what it is told, see attention.h. It must not raise."""


class Matmul(ctypes.Structure):
    """``struct matmul`` of matmul.h."""

    _fields_ = (
        ("pool", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("bias", c_void_p),
        ("x", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("x_token", c_int64),
        ("x_head", c_int64),
        ("bits", c_int32),
        ("block", c_int32),
    )


class Norm(ctypes.Structure):
    """``struct norm`` of rows.h."""

    _fields_ = (
        ("x", c_void_p),
        ("skip", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("y", c_void_p),
        ("total", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("epsilon", c_float),
        ("factor", c_float),
        ("centred", c_int32),
    )


PARTS_OF_HEADS = 3
"""Of rows of heads, see rows.h."""


class HeadNorms(ctypes.Structure):
    """``struct head_norms`` of rows.h."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("gains", c_void_p * PARTS_OF_HEADS),
        ("heads", c_int64 * PARTS_OF_HEADS),
        ("firsts", c_int64 * PARTS_OF_HEADS),
        ("rows", c_int64),
        ("size", c_int64),
        ("width", c_int64),
        ("epsilon", c_float),
    )


class Gated(ctypes.Structure):
    """``struct gated`` of rows.h."""

    _fields_ = (
        ("gate", c_void_p),
        ("up", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("gate_stride", c_int64),
        ("up_stride", c_int64),
        ("activation", c_int32),
        ("gate_limit", c_float),
        ("up_limit", c_float),
    )


class StreamGates(ctypes.Structure):
    """``struct stream_gates`` of rows.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("scale", c_void_p),
        ("base", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("streams", c_int64),
        ("epsilon", c_float),
        ("written", c_float),
        ("least", c_float),
        ("rounds", c_int32),
    )


class Streams(ctypes.Structure):
    """``struct streams`` of rows.h."""

    _fields_ = (
        ("x", c_void_p),
        ("gates", c_void_p),
        ("own", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("columns", c_int64),
        ("streams", c_int64),
        ("gates_stride", c_int64),
        ("mixes", c_int32),
    )


class Mixture(ctypes.Structure):
    """``struct mixture`` of mixture.h."""

    _fields_ = (
        ("pool", c_void_p),
        ("first", POINTER(Matmul)),
        ("last", POINTER(Matmul)),
        ("x", c_void_p),
        ("chosen", c_void_p),
        ("weights", c_void_p),
        ("base", c_void_p),
        ("total", c_void_p),
        ("experts", c_int64),
        ("tokens", c_int64),
        ("choices", c_int64),
        ("activation", c_int32),
        ("gate_limit", c_float),
        ("up_limit", c_float),
    )


class Encoding(ctypes.Structure):
    """``struct encoding`` of codes.h."""

    _fields_ = (
        ("values", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("blocks", c_int64),
        ("block", c_int32),
        ("bits", c_int32),
    )


class Draw(ctypes.Structure):
    """``struct draw`` of sampling.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("contenders", c_void_p),
        ("tokens", c_int64),
        ("state", c_uint64),
        ("temperature", c_double),
        ("least", c_double),
    )


class Masses(ctypes.Structure):
    """``struct masses`` of sampling.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("starts", c_void_p),
        ("peaks", c_void_p),
        ("sums", c_void_p),
        ("tokens", c_int64),
        ("stretches", c_int64),
        ("temperature", c_double),
    )


class Table(ctypes.Structure):
    """``struct table`` of attention.h."""

    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("places", c_int64), ("turned", c_int64))


class Span(ctypes.Structure):
    """``struct span`` of attention.h."""

    _fields_ = (
        ("row", c_int64),
        ("rows", c_int64),
        ("position", c_int64),
        ("blocks", c_void_p),
        ("count", c_int64),
        ("away", c_void_p),
        ("away_count", c_int64),
        ("told", c_void_p),
    )


class SpanList(ctypes.Structure):
    """``struct spans`` of attention.h."""

    _fields_ = (("all", POINTER(Span)), ("tables", POINTER(Table)), ("count", c_int64), ("ropes", c_int64))


class Tier(ctypes.Structure):
    """``struct tier`` of attention.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("first", c_int64),
        ("count", c_int64),
    )


class Attention(ctypes.Structure):
    """``struct attention`` of attention.h."""

    _fields_ = (
        ("pool", c_void_p),
        ("spans", POINTER(SpanList)),
        ("qkv", c_void_p),
        ("near", Tier),
        ("far", Tier),
        ("sinks", c_void_p),
        ("q_gain", c_void_p),
        ("k_gain", c_void_p),
        ("warmth", c_void_p),
        ("chosen", c_void_p),
        ("y", c_void_p),
        ("rows", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("tokens", c_int64),
        ("turned", c_int64),
        ("window", c_int64),
        ("rope", c_int64),
        ("context", c_int64),
        ("choices", c_int64),
        ("format", c_int32),
        ("keys_alone", c_int32),
        ("chunked", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("await_told", AWAIT),
    )


class Question(ctypes.Structure):
    """``struct question`` of attention.h."""

    _fields_ = (
        ("attention", POINTER(Attention)),
        ("queries", c_void_p),
        ("blocks", c_void_p),
        ("stretches", c_void_p),
        ("summaries", c_void_p),
        ("position", c_int64),
        ("rows", c_int64),
        ("block_count", c_int64),
        ("count", c_int64),
    )


class Choice(ctypes.Structure):
    """``struct choice`` of choosing.h."""

    _fields_ = (
        ("attention", Attention),
        ("q", c_void_p),
        ("k", c_void_p),
        ("weights", c_void_p),
        ("pooling", c_void_p),
        ("chosen", c_void_p),
        ("count", c_int64),
        ("block", c_int64),
        ("latest", c_int64),
    )


class Factors(ctypes.Structure):
    """``struct factors`` of adapted.h."""

    _fields_ = (
        ("down", c_void_p),
        ("up", c_void_p),
        ("rank", c_int64),
        ("down_kind", c_int32),
        ("up_kind", c_int32),
    )


class AdaptedPart(ctypes.Structure):
    """``struct adapted_part`` of adapted.h."""

    _fields_ = (("slots", POINTER(Factors)), ("first", c_int64), ("width", c_int64))


class AdaptedGroup(ctypes.Structure):
    """``struct adapted_group`` of adapted.h."""

    _fields_ = (("slot", c_int64), ("first", c_int64), ("count", c_int64))


class AdaptedRows(ctypes.Structure):
    """``struct adapted_rows`` of adapted.h."""

    _fields_ = (("rows", c_void_p), ("groups", POINTER(AdaptedGroup)), ("count", c_int64))


class Adapted(ctypes.Structure):
    """``struct adapted`` of adapted.h."""

    _fields_ = (
        ("pool", c_void_p),
        ("step", POINTER(AdaptedRows)),
        ("parts", POINTER(AdaptedPart)),
        ("x", c_void_p),
        ("y", c_void_p),
        ("tokens", c_int64),
        ("columns", c_int64),
        ("width", c_int64),
        ("count", c_int64),
    )


class RecurrentSpan(ctypes.Structure):
    """``struct recurrent_span`` of recurrent.h."""

    _fields_ = (
        ("row", c_int64),
        ("rows", c_int64),
        ("position", c_int64),
        ("slot", c_int64),
        ("guesses", c_int64),
    )


class RecurrentSpanList(ctypes.Structure):
    """``struct recurrent_spans`` of recurrent.h."""

    _fields_ = (("all", POINTER(RecurrentSpan)), ("count", c_int64))


class Recurrent(ctypes.Structure):
    """``struct recurrent`` of recurrent.h."""

    _fields_ = (
        ("pool", c_void_p),
        ("spans", POINTER(RecurrentSpanList)),
        ("first", c_void_p),
        ("second", c_void_p),
        ("gates", c_void_p),
        ("filters", c_void_p),
        ("filter_bias", c_void_p),
        ("rate", c_void_p),
        ("bias", c_void_p),
        ("gain", c_void_p),
        ("states", c_void_p),
        ("recent", c_void_p),
        ("guessed", c_void_p),
        ("marks", c_void_p),
        ("y", c_void_p),
        ("kind", c_int64),
        ("rows", c_int64),
        ("slots", c_int64),
        ("heads", c_int64),
        ("group", c_int64),
        ("key_size", c_int64),
        ("value_size", c_int64),
        ("columns", c_int64),
        ("first_columns", c_int64),
        ("first_stride", c_int64),
        ("gate_columns", c_int64),
        ("reach", c_int64),
        ("most_guesses", c_int64),
        ("width", c_int64),
        ("decays", c_int64),
        ("squashed", c_int64),
        ("epsilon", c_float),
        ("least", c_float),
        ("most", c_float),
        ("written", c_float),
        ("floor", c_float),
    )


STRUCTS = (
    *(Matmul, Norm, HeadNorms, Gated, StreamGates, Streams, Mixture),
    *(Table, Span, SpanList, Tier, Attention, Question, Choice),
    *(Factors, AdaptedPart, AdaptedGroup, AdaptedRows, Adapted),
    *(RecurrentSpan, RecurrentSpanList, Recurrent),
    *(Encoding, Draw, Masses),
)
INTERFACE = (23, *map(ctypes.sizeof, STRUCTS))
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
