"""The functions of domain ``motley`` whose names begin with ``CachedAttention`` in standard ONNX operators.

Engines that have a kernel for the whole recognise the node; others inline the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx.parser

from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.keys import ConfigError

ROW_POSITIONS = """    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    vector = Constant <value_ints: ints = [1]> ()
    first_axis = Constant <value_ints: ints = [0]> ()
    second_axis = Constant <value_ints: ints = [1]> ()

    # Row t stands at position + t.
    row_count = Shape <start: int = 0, end: int = 1> (q)
    row_limit = Squeeze (row_count)
    row_numbers = Range (zero, row_limit, one)
    row_positions = Add (position, row_numbers)
    position_ids = Unsqueeze (row_positions, first_axis)
"""
"""What the bodies of such functions begin with: constants, and the positions of q's rows."""

_BEGIN = (
    """
<domain: "motley", opset_import: ["": 24],
 doc_string: "Rotates T rows, writes their keys and values into the cache at `position`, and attends to the cache.">
%(name)s <q_heads, kv_heads, head_dim, rotary_dim, scale, window, soft_cap>
    (q, k, v, key_cache, value_cache, position, cos_cache, sin_cache%(sinks)s) => (y, key_cache_out, value_cache_out)
{
    # q: f32[T, q_heads * head_dim], k and v: f32[T, kv_heads * head_dim], caches: f32[1, kv_heads, C, head_dim]
"""
    + ROW_POSITIONS
    + """
    # Heads apart: [T, heads * head_dim] -> [1, heads, T, head_dim].
    all_rows = Constant <value_ints: ints = [1, -1]> ()
    q_count = Constant <value_int: int = @q_heads> ()
    q_counts = Reshape (q_count, vector)
    kv_count = Constant <value_int: int = @kv_heads> ()
    kv_counts = Reshape (kv_count, vector)
    width = Constant <value_int: int = @head_dim> ()
    widths = Reshape (width, vector)
    q_shape = Concat <axis: int = 0> (all_rows, q_counts, widths)
    kv_shape = Concat <axis: int = 0> (all_rows, kv_counts, widths)
    q_rows = Reshape (q, q_shape)
    k_rows = Reshape (k, kv_shape)
    v_rows = Reshape (v, kv_shape)
    q_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (q_rows)
    k_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (k_rows)
    v_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (v_rows)

    q_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (q_heads_apart, cos_cache, sin_cache, position_ids)
    k_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (k_heads_apart, cos_cache, sin_cache, position_ids)
    key_cache_out = TensorScatter <axis: int = 2> (key_cache, k_rotated, position)
    value_cache_out = TensorScatter <axis: int = 2> (value_cache, v_heads_apart, position)

    # A row sees the positions up to its own: the last `window` of them, or all if the window is 0.
    capacity = Shape <start: int = 2, end: int = 3> (key_cache)
    key_limit = Squeeze (capacity)
    key_positions = Range (zero, key_limit, one)
    row_column = Unsqueeze (row_positions, second_axis)
    distance = Sub (row_column, key_positions)
    causal = GreaterOrEqual (distance, zero)
    reach = Constant <value_int: int = @window> ()
    near = Less (distance, reach)
    unlimited = Equal (reach, zero)
    within = Or (near, unlimited)
    mask = And (causal, within)
"""
)

_PLAIN = """
    attended = Attention <scale: float = @scale, softcap: float = @soft_cap>
        (q_rotated, key_cache_out, value_cache_out, mask)
"""

# A sink is one more logit of the softmax, which has no value: it only takes its part of the weight.
_WITH_SINKS = """
    # [1, heads, T, head_dim] -> [1, kv_heads, heads / kv_heads, T, head_dim], and caches beside it.
    rest = Constant <value_ints: ints = [-1]> ()
    grouped_shape = Concat <axis: int = 0> (vector, kv_counts, rest, row_count, widths)
    q_grouped = Reshape (q_rotated, grouped_shape)
    group_axis = Constant <value_ints: ints = [2]> ()
    keys = Unsqueeze (key_cache_out, group_axis)
    values = Unsqueeze (value_cache_out, group_axis)
    keys_turned = Transpose <perm: ints = [0, 1, 2, 4, 3]> (keys)
    products = MatMul (q_grouped, keys_turned)
    factor = Constant <value_float: float = @scale> ()
    scores = Mul (products, factor)
    nothing = Constant <value_float: float = -3.4e38> ()
    seen = Where (mask, scores, nothing)
    sink_shape = Concat <axis: int = 0> (vector, kv_counts, rest, vector, vector)
    sink_logits = Reshape (sinks, sink_shape)
    groups = Shape <start: int = 2, end: int = 3> (q_grouped)
    rows_shape = Concat <axis: int = 0> (vector, kv_counts, groups, row_count, vector)
    sink_column = Expand (sink_logits, rows_shape)
    with_sinks = Concat <axis: int = 4> (seen, sink_column)
    odds = Softmax <axis: int = -1> (with_sinks)
    last_axis = Constant <value_ints: ints = [4]> ()
    begin = Constant <value_ints: ints = [0]> ()
    weights = Slice (odds, begin, capacity, last_axis)
    attended_grouped = MatMul (weights, values)
    heads_shape = Concat <axis: int = 0> (vector, q_counts, row_count, widths)
    attended = Reshape (attended_grouped, heads_shape)
"""

_END = """    attended_rows = Transpose <perm: ints = [0, 2, 1, 3]> (attended)
    y_shape = Shape (q)
    y = Reshape (attended_rows, y_shape)
}
"""

_TO_KEYS = {
    "(q, k, v, key_cache, value_cache, position": "(q, k, key_cache, position",
    "(y, key_cache_out, value_cache_out)": "(y, key_cache_out)",
    "    v_rows = Reshape (v, kv_shape)\n": "",
    "    v_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (v_rows)\n": "",
    "    value_cache_out = TensorScatter <axis: int = 2> (value_cache, v_heads_apart, position)\n": "",
    "value_cache_out": "key_cache_out",
}
"""What differs where the cached keys are the values too; what is left of these comes last."""

_TO_CHOSEN_KEYS = {
    "(q, k, v, key_cache, value_cache, position": "(q, k, chosen, key_cache, position",
    "scale, window, soft_cap": "scale, window, soft_cap, choices",
    "    mask = And (causal, within)\n": """    before_choice = And (causal, within)

    # Of these it sees those that are chosen: -1, which is none, is a column behind all positions.
    columns = Add (capacity, vector)
    columns_shape = Concat <axis: int = 0> (row_count, columns)
    unseen = ConstantOfShape (columns_shape)
    one_float = Constant <value_float: float = 1.0> ()
    choices_shape = Shape (chosen)
    choices = Expand (one_float, choices_shape)
    marked = ScatterElements <axis: int = 1> (unseen, chosen, choices)
    marked_positions = Slice (marked, first_axis, capacity, second_axis)
    zero_float = Constant <value_float: float = 0.0> ()
    is_chosen = Less (zero_float, marked_positions)
    mask = And (before_choice, is_chosen)
""",
    **{before: after for before, after in _TO_KEYS.items() if not before.startswith("(q, k, v")},
}
"""What differs where rows besides see those positions alone that are chosen for them, i64[T, N], or are told -1."""

_TO_CHOSEN = {
    "(q, k, v, key_cache": "(q, k, v, chosen, key_cache",
    "scale, window, soft_cap": "scale, window, soft_cap, choices",
    "    mask = And (causal, within)\n": """    before_choice = And (causal, within)

    # Of these a KV head sees those that are chosen for it: -1, which is none, is a column behind all positions.
    columns = Add (capacity, vector)
    list_count = Mul (row_count, kv_counts)
    columns_shape = Concat <axis: int = 0> (list_count, columns)
    unseen = ConstantOfShape (columns_shape)
    list_size = Constant <value_int: int = @choices> ()
    list_sizes = Reshape (list_size, vector)
    lists_shape = Concat <axis: int = 0> (list_count, list_sizes)
    lists = Reshape (chosen, lists_shape)
    one_float = Constant <value_float: float = 1.0> ()
    marks = Expand (one_float, lists_shape)
    marked = ScatterElements <axis: int = 1> (unseen, lists, marks)
    marked_positions = Slice (marked, first_axis, capacity, second_axis)
    zero_float = Constant <value_float: float = 0.0> ()
    is_chosen = Less (zero_float, marked_positions)

    # [T * kv_heads, C] -> [kv_heads, 1, T, C] -> [1, heads, T, C]: query heads see what their KV head does.
    apart_shape = Concat <axis: int = 0> (row_count, kv_counts, vector, capacity)
    is_chosen_apart = Reshape (is_chosen, apart_shape)
    is_chosen_by_heads = Transpose <perm: ints = [1, 2, 0, 3]> (is_chosen_apart)
    rest = Constant <value_ints: ints = [-1]> ()
    grouped_shape = Concat <axis: int = 0> (vector, kv_counts, rest, row_count, widths)
    q_grouped = Reshape (q_rotated, grouped_shape)
    groups = Shape <start: int = 2, end: int = 3> (q_grouped)
    all_shape = Concat <axis: int = 0> (kv_counts, groups, row_count, capacity)
    is_chosen_by_all = Expand (is_chosen_by_heads, all_shape)
    heads_shape = Concat <axis: int = 0> (vector, q_counts, row_count, capacity)
    is_chosen_of_heads = Reshape (is_chosen_by_all, heads_shape)
    mask = And (before_choice, is_chosen_of_heads)
""",
}
"""What differs where a KV head besides sees those positions alone that are chosen for it, i64[T, kv_heads * N]."""

_IN_CHUNKS = {
    "scale, window, soft_cap": "scale, chunk, soft_cap",
    "up to its own: the last `window` of them, or all if the window is 0.": "of its own chunk, up to its own.",
    """    reach = Constant <value_int: int = @window> ()
    near = Less (distance, reach)
    unlimited = Equal (reach, zero)
    within = Or (near, unlimited)
""": """    chunk = Constant <value_int: int = @chunk> ()
    place = Mod (row_column, chunk)
    within = LessOrEqual (distance, place)
""",
}
"""What differs where positions are cut in chunks, and rows see those of their own chunk alone."""

_WARMED = {
    "scale, window, soft_cap": "scale, window, soft_cap, warm_span, warm_offset, warmth",
    "    key_cache_out = ": """
    # Queries are the longer the farther they stand: times 1 + warmth * log(1 + floor((position + offset) / span)).
    warm_offset = Constant <value_int: int = @warm_offset> ()
    warm_span = Constant <value_int: int = @warm_span> ()
    warm_positions = Add (row_positions, warm_offset)
    passed = Mod (warm_positions, warm_span)
    whole_spans = Sub (warm_positions, passed)
    one_float = Constant <value_float: float = 1.0> ()
    warm_span_float = Cast <to: int = 1> (warm_span)
    whole_spans_float = Cast <to: int = 1> (whole_spans)
    spans = Div (whole_spans_float, warm_span_float)
    more_spans = Add (spans, one_float)
    logarithms = Log (more_spans)
    warmth = Constant <value_float: float = @warmth> ()
    grown = Mul (logarithms, warmth)
    factors = Add (grown, one_float)
    factor_column = Unsqueeze (factors, second_axis)
    q_warmed = Mul (q_rotated, factor_column)
    key_cache_out = """,
    "(q_rotated, key_cache_out": "(q_warmed, key_cache_out",
}
"""What differs where queries grow with their positions."""

_WITH_GAINS = {
    "cos_cache, sin_cache)": "cos_cache, sin_cache, q_gain, k_gain)",
    "    key_cache_out = ": """    q_gained = Mul (q_rotated, q_gain)
    k_gained = Mul (k_rotated, k_gain)
    key_cache_out = """,
    "(key_cache, k_rotated, position)": "(key_cache, k_gained, position)",
    "(q_rotated, key_cache_out": "(q_gained, key_cache_out",
}
"""What differs where the elements of queries and keys have gains after the rotation."""


def _but(name: str, changes: Mapping[str, str], sinks: bool = False) -> onnx.FunctionProto:
    """`CACHED_ATTENTION`, or that with sinks, by another name, with some of its text changed."""
    text = _BEGIN % {"name": name, "sinks": ", sinks" * sinks} + (_WITH_SINKS if sinks else _PLAIN) + _END
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return onnx.parser.parse_function(text)


CACHED_ATTENTION = _but("CachedAttention", {})
"""Rotary embedding, caching and attention of the rows of one sequence."""

CACHED_ATTENTION_WITH_SINKS = _but("CachedAttentionWithSinks", {}, sinks=True)
"""The same with a logit f32[q_heads] per head that takes part in the softmax and is no position; no soft cap."""

CACHED_ATTENTION_TO_KEYS = _but("CachedAttentionToKeys", _TO_KEYS)
"""The same without values, and without a cache of them: the keys as they are cached are the values."""

CACHED_ATTENTION_TO_KEYS_WITH_SINKS = _but("CachedAttentionToKeysWithSinks", _TO_KEYS, sinks=True)
"""Both of these."""

CACHED_ATTENTION_TO_CHOSEN = _but("CachedAttentionToChosen", _TO_CHOSEN)
"""The same at those positions alone that ``motley.ChosenBlocks`` has chosen for each KV head."""

CACHED_ATTENTION_TO_CHOSEN_KEYS = _but("CachedAttentionToChosenKeys", _TO_CHOSEN_KEYS)
"""Keys that are values, at those positions alone that ``motley.ChosenPositions`` has chosen."""

CACHED_ATTENTION_TO_CHOSEN_KEYS_WITH_SINKS = _but("CachedAttentionToChosenKeysWithSinks", _TO_CHOSEN_KEYS, sinks=True)
"""The same with sinks."""

CACHED_ATTENTION_IN_CHUNKS = _but("CachedAttentionInChunks", _IN_CHUNKS)
"""The same for rows that see the positions of their own chunk alone."""

CACHED_ATTENTION_WARMED = _but("CachedAttentionWarmed", _WARMED)
"""The same with queries that grow with their positions."""

CACHED_ATTENTION_WITH_GAINS = _but("CachedAttentionWithGains", _WITH_GAINS)
"""The same with gains f32[head_dim] that rotated queries and keys are multiplied by."""


_KEYS, _SINKS, _CHOICE = "keys that are values", "sinks", "a choice of positions"
_TOGETHER = {
    frozenset({_KEYS, _SINKS}): CACHED_ATTENTION_TO_KEYS_WITH_SINKS,
    frozenset({_KEYS, _CHOICE}): CACHED_ATTENTION_TO_CHOSEN_KEYS,
    frozenset({_KEYS, _SINKS, _CHOICE}): CACHED_ATTENTION_TO_CHOSEN_KEYS_WITH_SINKS,
}
"""The functions for several traits."""


def attention_of(attend: Attend) -> tuple[onnx.FunctionProto, dict[str, Any]]:
    """The function that computes an attention, with the attributes that say what a row sees and how queries grow.

    Raises:
        ConfigError: the attention has several of the traits that functions are for.
    """
    functions = {
        _KEYS: (CACHED_ATTENTION_TO_KEYS, attend.v is None),
        _SINKS: (CACHED_ATTENTION_WITH_SINKS, attend.sinks is not None),
        "chunks": (CACHED_ATTENTION_IN_CHUNKS, attend.chunked),
        "queries that grow": (CACHED_ATTENTION_WARMED, attend.warmth is not None),
        "gains": (CACHED_ATTENTION_WITH_GAINS, attend.gains is not None),
        _CHOICE: (CACHED_ATTENTION_TO_CHOSEN, attend.chosen is not None),
    }
    traits = {name: function for name, (function, has) in functions.items() if has}
    if (together := _TOGETHER.get(frozenset(traits))) is not None:
        traits = {" and ".join(traits): together}
    if attend.sinks is not None and attend.soft_cap:
        traits["a soft cap"] = CACHED_ATTENTION
    if len(traits) > 1:
        raise ConfigError(f"layer {attend.layer}: attention with {' and '.join(traits)} is not supported")
    (function,) = traits.values() or [CACHED_ATTENTION]
    more: dict[str, Any] = {"chunk" if attend.chunked else "window": attend.window}
    if attend.chosen is not None:
        more["choices"] = attend.choices
    if attend.warmth is not None:
        more |= {"warm_span": attend.warmth.span, "warm_offset": attend.warmth.offset, "warmth": attend.warmth.growth}
    return function, more
