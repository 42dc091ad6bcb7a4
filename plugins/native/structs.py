"""The structs that compiled kernels read, field by field, for ctypes. Their sizes are part of the interface."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

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
        ("gain", c_void_p),
        ("chosen", c_void_p),
        ("count", c_int64),
        ("block", c_int64),
        ("latest", c_int64),
        ("copies", c_int64),
        ("epsilon", c_float),
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
        ("dilation", c_int64),
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
