"""The function ``motley.HeadProducts`` in standard ONNX operators: a product of each head with a matrix of its own.

Engines that have a kernel for the whole recognise the node; others inline the function.
"""

from __future__ import annotations

import onnx.parser

HEAD_PRODUCTS = onnx.parser.parse_function("""
<domain: "motley", opset_import: ["": 24],
 doc_string: "Multiplies the elements from `first` to `last` of each head with a matrix of its own.">
HeadProducts <heads, first, last, width> (x, w) => (y)
{
    # x: f32[T, width] with width = heads * S, w: f32[heads * N, K] with K = last - first, y: f32[T, heads * N]
    vector = Constant <value_ints: ints = [1]> ()
    rest = Constant <value_ints: ints = [-1]> ()
    count = Constant <value_int: int = @heads> ()
    counts = Reshape (count, vector)
    begin = Constant <value_int: int = @first> ()
    begins = Reshape (begin, vector)
    end = Constant <value_int: int = @last> ()
    ends = Reshape (end, vector)
    rows = Shape <start: int = 0, end: int = 1> (x)
    inner = Shape <start: int = 1, end: int = 2> (w)
    last_axis = Constant <value_ints: ints = [2]> ()
    apart_shape = Concat <axis: int = 0> (rows, counts, rest)
    apart = Reshape (x, apart_shape)
    used = Slice (apart, begins, ends, last_axis)
    by_head = Transpose <perm: ints = [1, 0, 2]> (used)
    matrices_shape = Concat <axis: int = 0> (counts, rest, inner)
    matrices = Reshape (w, matrices_shape)
    turned = Transpose <perm: ints = [0, 2, 1]> (matrices)
    products = MatMul (by_head, turned)
    by_row = Transpose <perm: ints = [1, 0, 2]> (products)
    y_shape = Concat <axis: int = 0> (rows, rest)
    y = Reshape (by_row, y_shape)
}
""")
