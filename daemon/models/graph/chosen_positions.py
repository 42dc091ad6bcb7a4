"""``motley.ChosenPositions`` in standard ONNX operators: which positions the rows of one sequence see.

Engines that have a kernel for the whole recognise the node; others inline the function.
"""

from __future__ import annotations

import onnx.parser

from motley.daemon.models.graph.cached_attention import ROW_POSITIONS

CHOSEN_POSITIONS = onnx.parser.parse_function(
    """
<domain: "motley", opset_import: ["": 24],
 doc_string: "Turns T rows, writes their index keys into the cache at `position`, and chooses the best positions.">
ChosenPositions <heads, head_dim, rotary_dim, count>
    (q, k, weights, index_cache, position, cos_cache, sin_cache) => (chosen, index_cache_out)
{
    # q: f32[T, heads * head_dim], k: f32[T, head_dim], weights: f32[T, heads], cache: f32[1, 1, C, head_dim]
"""
    + ROW_POSITIONS
    + """
    # Heads apart: [T, heads * head_dim] -> [1, heads, T, head_dim].
    all_rows = Constant <value_ints: ints = [1, -1]> ()
    head_count = Constant <value_int: int = @heads> ()
    head_counts = Reshape (head_count, vector)
    width = Constant <value_int: int = @head_dim> ()
    widths = Reshape (width, vector)
    q_shape = Concat <axis: int = 0> (all_rows, head_counts, widths)
    k_shape = Concat <axis: int = 0> (all_rows, vector, widths)
    q_rows = Reshape (q, q_shape)
    k_rows = Reshape (k, k_shape)
    q_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (q_rows)
    k_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (k_rows)
    q_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (q_heads_apart, cos_cache, sin_cache, position_ids)
    k_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (k_heads_apart, cos_cache, sin_cache, position_ids)
    index_cache_out = TensorScatter <axis: int = 2> (index_cache, k_rotated, position)

    # What the heads find of each position, weighed: [T, C].
    keys_turned = Transpose <perm: ints = [0, 1, 3, 2]> (index_cache_out)
    products = MatMul (q_rotated, keys_turned)
    found = Relu (products)
    weights_of_heads = Transpose <perm: ints = [1, 0]> (weights)
    outer_axes = Constant <value_ints: ints = [0, 3]> ()
    weight_columns = Unsqueeze (weights_of_heads, outer_axes)
    weighed = Mul (found, weight_columns)
    head_axes = Constant <value_ints: ints = [0, 1]> ()
    sums = ReduceSum <keepdims: int = 0> (weighed, head_axes)

    # The best up to a row's own. There are columns enough to choose from; what is no position becomes -1.
    capacity = Shape <start: int = 2, end: int = 3> (index_cache)
    key_limit = Squeeze (capacity)
    key_positions = Range (zero, key_limit, one)
    row_column = Unsqueeze (row_positions, second_axis)
    causal = LessOrEqual (key_positions, row_column)
    nothing = Constant <value_float: float = -3.4e38> ()
    scores = Where (causal, sums, nothing)
    choices = Constant <value_int: int = @count> ()
    counts = Reshape (choices, vector)
    beyond_shape = Concat <axis: int = 0> (row_count, counts)
    beyond = Expand (nothing, beyond_shape)
    candidates = Concat <axis: int = 1> (scores, beyond)
    best, places = TopK <axis: int = -1, largest: int = 1, sorted: int = 1> (candidates, counts)
    is_position = Less (nothing, best)
    none = Constant <value_int: int = -1> ()
    chosen = Where (is_position, places, none)
}
"""
)
"""Index keys are cached as keys are; `motley.daemon.models.description.operations.Choose` states what is chosen.

``chosen`` is i64[T, count]: positions in any order, and as many -1 as there are fewer.
"""
