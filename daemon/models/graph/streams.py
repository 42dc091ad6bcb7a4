"""The functions of `motley.plugins.streams` in standard ONNX operators, for a number of residual streams.

Engines that have a kernel for the whole recognise the node; others inline the function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import onnx.parser

from motley.plugins.streams import LEAST_MATCH, MATCH_STREAMS, READ_STREAMS, STREAM_GATES, WRITE_STREAMS


@cache
def stream_gates(parts: int, streams: int, rounds: int) -> onnx.FunctionProto:
    """How a block reads streams, in more parts how it writes to them, and how they are mixed."""
    widths = [streams, streams, streams**2][:parts]
    scales = [number for number, width in enumerate(widths) for _ in range(width)]
    names = ["read_logits", "write_logits", "mix_logits"][:parts]
    body = [
        f"parts = Constant <value_ints: ints = {_ints(scales)}> ()",
        f"widths = Constant <value_ints: ints = {_ints(widths)}> ()",
        "epsilon = Constant <value_float: float = @epsilon> ()",
        "factors = Gather <axis: int = 0> (scale, parts)",
        "scaled = Mul (logits, factors)",
        "raw = Add (scaled, base)",
        f"{', '.join(names)} = Split <axis: int = 1> (raw, widths)",
        "read_open = Sigmoid (read_logits)",
        "read = Add (read_open, epsilon)",
    ]
    made = ["read", "write", "mix"][:parts]
    if parts > 1:
        body += [
            "most = Constant <value_float: float = @written> ()",
            "least = Constant <value_float: float = @least> ()",
            "write_open = Sigmoid (write_logits)",
            "write_part = Mul (write_open, most)",
            "write = Add (write_part, least)",
        ]
    if parts > 2:
        body += [
            f"square = Constant <value_ints: ints = [0, {streams}, {streams}]> ()",
            f"flat = Constant <value_ints: ints = [0, {streams**2}]> ()",
            "columns = Constant <value_ints: ints = [1]> ()",
            "rows = Constant <value_ints: ints = [2]> ()",
            "mix_rows = Reshape (mix_logits, square)",
            "odds = Softmax <axis: int = -1> (mix_rows)",
            "mix_0 = Add (odds, epsilon)",
        ]
        divided = ["columns", *["rows", "columns"] * (rounds - 1)]
        for number, axis in enumerate(divided):
            body += [
                f"sum_{number} = ReduceSum <keepdims: int = 1> (mix_{number}, {axis})",
                f"above_{number} = Add (sum_{number}, epsilon)",
                f"mix_{number + 1} = Div (mix_{number}, above_{number})",
            ]
        body += [f"mix = Reshape (mix_{len(divided)}, flat)"]
    body += [f"gates = Concat <axis: int = 1> ({', '.join(made)})"]
    name = STREAM_GATES[parts - 1]
    return _function(f"{name} <streams, epsilon, written, least, rounds> (logits, scale, base) => (gates)", body)


@cache
def read_streams(streams: int) -> onnx.FunctionProto:
    """The sum of streams times their gates."""
    return _function(
        f"{READ_STREAMS} <streams> (x, gates) => (y)",
        [
            *_gates("own", 0, streams, [-1, streams, 1]),
            *_apart(streams),
            "weighed = Mul (apart, own)",
            "second_axis = Constant <value_ints: ints = [1]> ()",
            "y = ReduceSum <keepdims: int = 0> (weighed, second_axis)",
        ],
    )


@cache
def write_streams(streams: int, mixes: bool) -> onnx.FunctionProto:
    """Streams, perhaps mixed, plus what each gets of rows."""
    mixing = [
        *_gates("mix", 2 * streams, 2 * streams + streams**2, [-1, streams, streams]),
        "from_all = Transpose <perm: ints = [0, 2, 1]> (mix)",
        "mixed = MatMul (from_all, apart)",
    ]
    return _function(
        f"{WRITE_STREAMS} <streams> (x, gates, rows) => (y)",
        [
            *_gates("own", streams, 2 * streams, [-1, streams, 1]),
            *_apart(streams),
            "second_axis = Constant <value_ints: ints = [1]> ()",
            "row = Unsqueeze (rows, second_axis)",
            "given = Mul (row, own)",
            *(mixing if mixes else []),
            f"whole = Add ({'mixed' if mixes else 'apart'}, given)",
            "all_elements = Constant <value_ints: ints = [0, -1]> ()",
            "y = Reshape (whole, all_elements)",
        ],
    )


@cache
def match_streams(streams: int) -> onnx.FunctionProto:
    """Rows as streams, each of which has as much of them as its query fits its key."""
    return _function(
        f"{MATCH_STREAMS} <streams, scale> (x, keys, rows) => (y)",
        [
            *_apart(streams),
            "keys_apart = Reshape (keys, apart_shape)",
            "products = Mul (apart, keys_apart)",
            "last_axis = Constant <value_ints: ints = [2]> ()",
            "whole = ReduceSum <keepdims: int = 1> (products, last_axis)",
            "scale = Constant <value_float: float = @scale> ()",
            "fit = Mul (whole, scale)",
            "size = Abs (fit)",
            f"least = Constant <value_float: float = {LEAST_MATCH}> ()",
            "bounded = Max (size, least)",
            "root = Sqrt (bounded)",
            "sign = Sign (fit)",
            "signed = Mul (root, sign)",
            "share = Sigmoid (signed)",
            "second_axis = Constant <value_ints: ints = [1]> ()",
            "row = Unsqueeze (rows, second_axis)",
            "given = Mul (row, share)",
            "all_elements = Constant <value_ints: ints = [0, -1]> ()",
            "y = Reshape (given, all_elements)",
        ],
    )


def _gates(name: str, first: int, stop: int, shape: Sequence[int]) -> list[str]:
    """Some of the gates, in a shape."""
    return [
        f"{name}_first = Constant <value_ints: ints = [{first}]> ()",
        f"{name}_stop = Constant <value_ints: ints = [{stop}]> ()",
        f"{name}_axis = Constant <value_ints: ints = [-1]> ()",
        f"{name}_shape = Constant <value_ints: ints = {_ints(shape)}> ()",
        f"{name}_gates = Slice (gates, {name}_first, {name}_stop, {name}_axis)",
        f"{name} = Reshape ({name}_gates, {name}_shape)",
    ]


def _apart(streams: int) -> list[str]:
    """f32[T, S D] -> f32[T, S, D]."""
    return [
        f"apart_shape = Constant <value_ints: ints = [0, {streams}, -1]> ()",
        "apart = Reshape (x, apart_shape)",
    ]


def _ints(values: Iterable[int]) -> str:
    return str([*values])


def _function(head: str, body: Sequence[str]) -> onnx.FunctionProto:
    lines = "\n    ".join(body)
    return onnx.parser.parse_function(f"""
<domain: "motley", opset_import: ["": 24], doc_string: "See motley.plugins.streams.">
{head}
{{
    {lines}
}}
""")
