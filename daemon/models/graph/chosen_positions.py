"""``motley.ChosenPositions`` and its kin in standard ONNX operators: which positions the rows of one sequence see.

Engines that have a kernel for the whole recognise the nodes; others inline the functions.
"""

from __future__ import annotations

import onnx.parser

from motley.daemon.models.graph.cached_attention import ROW_POSITIONS

_BEGIN = (
    """
<domain: "motley", opset_import: ["": 24],
 doc_string: "Turns T rows, writes their index keys into the cache at `position`, and chooses the best positions.">
%s => (chosen, index_cache_out)
{
    # q: f32[T, heads * head_dim], k: f32[T, E], weights: f32[T, heads], cache: f32[1, 1, C, E]
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
    q_rows = Reshape (q, q_shape)
    q_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (q_rows)
    head_axes = Constant <value_ints: ints = [0, 1]> ()
    k_heads_apart = Unsqueeze (k, head_axes)

    # A row chooses of the positions up to its own.
    capacity = Shape <start: int = 2, end: int = 3> (index_cache)
    row_column = Unsqueeze (row_positions, second_axis)
    nothing = Constant <value_float: float = -3.4e38> ()
    choices = Constant <value_int: int = @count> ()
    counts = Reshape (choices, vector)
    none = Constant <value_int: int = -1> ()
    rest = Constant <value_ints: ints = [-1]> ()
    third_axis = Constant <value_ints: ints = [2]> ()
"""
)
_QUERIES_TURNED = """
    q_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (q_heads_apart, cos_cache, sin_cache, position_ids)
"""
_TURNED = (
    _QUERIES_TURNED
    + """
    k_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (k_heads_apart, cos_cache, sin_cache, position_ids)
    index_cache_out = TensorScatter <axis: int = 2> (index_cache, k_rotated, position)
    keys_turned = Transpose <perm: ints = [0, 1, 3, 2]> (index_cache_out)
    products = MatMul (q_rotated, keys_turned)
    key_limit = Squeeze (capacity)
    key_positions = Range (zero, key_limit, one)
    causal = LessOrEqual (key_positions, row_column)
"""
)
_OF_BLOCKS = """
    index_cache_out = TensorScatter <axis: int = 2> (index_cache, k_heads_apart, position)
    block = Constant <value_int: int = @block> ()
    block_size = Reshape (block, vector)
    over = Mod (capacity, block_size)
    whole = Sub (capacity, over)
    of_blocks = Slice (index_cache_out, first_axis, whole, third_axis)
"""
_POOLED = (
    _OF_BLOCKS
    + """
    # Keys of whole blocks: [blocks, block, 2 * head_dim] -> [blocks, head_dim].
    both_widths = Add (widths, widths)
    blocks_shape = Concat <axis: int = 0> (rest, block_size, both_widths)
    in_blocks = Reshape (of_blocks, blocks_shape)
    keys = Slice (in_blocks, first_axis, widths, third_axis)
    gates = Slice (in_blocks, widths, both_widths, third_axis)
    logits = Add (gates, pooling)
    shares = Softmax <axis: int = 1> (logits)
    parts = Mul (shares, keys)
    pooled = ReduceSum <keepdims: int = 0> (parts, second_axis)
    keys_turned = Transpose <perm: ints = [1, 0]> (pooled)
    products = MatMul (q_heads_apart, keys_turned)
"""
)
_AVERAGED = (
    _QUERIES_TURNED
    + _OF_BLOCKS
    + """
    # Keys of whole blocks: [blocks, block, head_dim] -> [1, 1, blocks, head_dim].
    blocks_shape = Concat <axis: int = 0> (rest, block_size, widths)
    in_blocks = Reshape (of_blocks, blocks_shape)
    sum_of_block = ReduceSum <keepdims: int = 0> (in_blocks, second_axis)
    as_float = Cast <to: int = 1> (block)
    mean_of_block = Div (sum_of_block, as_float)
    normed = RMSNormalization <axis: int = -1, epsilon: float = @epsilon> (mean_of_block, gain)
    heads_of_blocks = Unsqueeze (normed, head_axes)

    # They turn as the first positions of their blocks. There may be blocks behind what sequences can have.
    whole_count = Shape <start: int = 0, end: int = 1> (sum_of_block)
    whole_limit = Squeeze (whole_count)
    whole_numbers = Range (zero, whole_limit, one)
    whole_starts = Mul (whole_numbers, block)
    table_rows = Shape <start: int = 0, end: int = 1> (cos_cache)
    is_in_table = Less (whole_starts, table_rows)
    table_starts = Where (is_in_table, whole_starts, zero)
    start_ids = Unsqueeze (table_starts, first_axis)
    k_rotated = RotaryEmbedding <rotary_embedding_dim: int = @rotary_dim>
        (heads_of_blocks, cos_cache, sin_cache, start_ids)
    keys_turned = Transpose <perm: ints = [0, 1, 3, 2]> (k_rotated)
    products = MatMul (q_rotated, keys_turned)

    # What the heads find of each key: [T, blocks].
    found = Relu (products)
    sums = ReduceSum <keepdims: int = 0> (found, head_axes)
"""
)
_WEIGHED = """
    # What the heads find of each key, weighed: [T, keys].
    found = Relu (products)
    weights_of_heads = Transpose <perm: ints = [1, 0]> (weights)
    outer_axes = Constant <value_ints: ints = [0, 3]> ()
    weight_columns = Unsqueeze (weights_of_heads, outer_axes)
    weighed = Mul (found, weight_columns)
    sums = ReduceSum <keepdims: int = 0> (weighed, head_axes)
"""
_POSITIONS = """
    # The best. There are columns enough to choose from; what is no position becomes -1.
    scores = Where (causal, sums, nothing)
    beyond_shape = Concat <axis: int = 0> (row_count, counts)
    beyond = Expand (nothing, beyond_shape)
    candidates = Concat <axis: int = 1> (scores, beyond)
    best, places = TopK <axis: int = -1, largest: int = 1, sorted: int = 1> (candidates, counts)
    is_position = Less (nothing, best)
    chosen = Where (is_position, places, none)
}
"""
_POOLS = """
    # The best of the blocks that end up to a row, [T, blocks]. There are columns enough to choose from.
    most = Constant <value_int: int = @blocks> ()
    most_blocks = Reshape (most, vector)
    beyond_shape = Concat <axis: int = 0> (row_count, most_blocks)
    beyond = Expand (nothing, beyond_shape)
    all_sums = Concat <axis: int = 1> (sums, beyond)
    block_count = Shape <start: int = 1, end: int = 2> (all_sums)
    block_limit = Squeeze (block_count)
    numbers = Range (zero, block_limit, one)
    starts = Mul (numbers, block)
    stops = Add (starts, block)
    row_stops = Add (row_column, one)
    is_whole = LessOrEqual (stops, row_stops)
    candidates = Where (is_whole, all_sums, nothing)
    best, places = TopK <axis: int = -1, largest: int = 1, sorted: int = 1> (candidates, most_blocks)

    # Their positions: [T, blocks, block] -> [T, blocks * block]; what is none becomes -1.
    within = Range (zero, block, one)
    start_column = Unsqueeze (starts, second_axis)
    positions = Add (start_column, within)
    is_whole_column = Unsqueeze (is_whole, third_axis)
    seen = Where (is_whole_column, positions, none)
    place_column = Unsqueeze (places, third_axis)
    places_shape = Concat <axis: int = 0> (row_count, most_blocks, block_size)
    places_of_each = Expand (place_column, places_shape)
    chosen_blocks = GatherElements <axis: int = 1> (seen, places_of_each)
    rows_shape = Concat <axis: int = 0> (row_count, rest)
    of_whole_blocks = Reshape (chosen_blocks, rows_shape)

    # And what follows the last whole block.
    place = Mod (row_stops, block)
    last_stop = Sub (row_stops, place)
    all_but_one = Sub (block, one)
    within_last = Range (zero, all_but_one, one)
    last_positions = Add (last_stop, within_last)
    is_seen = LessOrEqual (last_positions, row_column)
    after = Where (is_seen, last_positions, none)
    chosen = Concat <axis: int = 1> (of_whole_blocks, after)
}
"""
_AS_OFTEN = """
    list_count = Constant <value_int: int = @lists> ()
    list_counts = Reshape (list_count, vector)
    lists_shape = Concat <axis: int = 0> (row_count, list_counts, counts)
    of_each_list = Unsqueeze (of_each, second_axis)
    of_all_lists = Expand (of_each_list, lists_shape)
    chosen = Reshape (of_all_lists, rows_shape)
}
"""
_BLOCKS = """
    # The best of each block of positions, of more blocks than are chosen: [1, heads, T, blocks].
    scores = Where (causal, products, nothing)
    block = Constant <value_int: int = @block> ()
    block_size = Reshape (block, vector)
    over = Mod (capacity, block_size)
    missing = Sub (block_size, over)
    more = Add (missing, counts)
    beyond_shape = Concat <axis: int = 0> (vector, head_counts, row_count, more)
    beyond = Expand (nothing, beyond_shape)
    all_scores = Concat <axis: int = 3> (scores, beyond)
    blocks_shape = Concat <axis: int = 0> (vector, head_counts, row_count, rest, block_size)
    in_blocks = Reshape (all_scores, blocks_shape)
    last_axis = Constant <value_ints: ints = [4]> ()
    of_blocks = ReduceMax <keepdims: int = 0> (in_blocks, last_axis)

    # The latest ones count as better than all others.
    block_count = Shape <start: int = 3, end: int = 4> (in_blocks)
    block_limit = Squeeze (block_count)
    numbers = Range (zero, block_limit, one)
    starts = Mul (numbers, block)
    place = Mod (row_column, block)
    own_start = Sub (row_column, place)
    latest = Constant <value_int: int = @latest> ()
    latest_positions = Mul (latest, block)
    earlier_start = Sub (own_start, latest_positions)
    is_late = Less (earlier_start, starts)
    is_begun = LessOrEqual (starts, own_start)
    is_latest = And (is_late, is_begun)
    everything = Constant <value_float: float = 3.4e38> ()
    candidates = Where (is_latest, everything, of_blocks)

    # Positions of the best: [1, heads, T, blocks, block] -> [T, heads * count]. What no row sees becomes -1.
    within = Range (zero, block, one)
    start_column = Unsqueeze (starts, second_axis)
    positions = Add (start_column, within)
    row_of_each = Unsqueeze (row_column, third_axis)
    is_seen = LessOrEqual (positions, row_of_each)
    seen = Where (is_seen, positions, none)
    all_shape = Shape (in_blocks)
    seen_by_heads = Expand (seen, all_shape)
    most = Constant <value_int: int = @blocks> ()
    most_blocks = Reshape (most, vector)
    best, places = TopK <axis: int = -1, largest: int = 1, sorted: int = 1> (candidates, most_blocks)
    place_column = Unsqueeze (places, last_axis)
    places_shape = Concat <axis: int = 0> (vector, head_counts, row_count, most_blocks, block_size)
    places_of_each = Expand (place_column, places_shape)
    chosen_blocks = GatherElements <axis: int = 3> (seen_by_heads, places_of_each)
    of_rows = Transpose <perm: ints = [0, 2, 1, 3, 4]> (chosen_blocks)
    chosen_shape = Concat <axis: int = 0> (row_count, rest)
    chosen = Reshape (of_rows, chosen_shape)
}
"""

CHOSEN_POSITIONS = onnx.parser.parse_function(
    _BEGIN
    % """ChosenPositions <heads, head_dim, rotary_dim, count>
    (q, k, weights, index_cache, position, cos_cache, sin_cache)"""
    + _TURNED
    + _WEIGHED
    + _POSITIONS
)
"""Index keys are cached as keys are; `motley.daemon.models.description.operations.Choose` states what is chosen.

``chosen`` is i64[T, count]: positions in any order, and as many -1 as there are fewer.
"""

CHOSEN_BLOCKS = onnx.parser.parse_function(
    _BEGIN
    % """ChosenBlocks <heads, head_dim, rotary_dim, count, block, blocks, latest>
    (q, k, index_cache, position, cos_cache, sin_cache)"""
    + _TURNED
    + _BLOCKS
)
"""The same, where each head chooses ``blocks`` of ``block`` positions: ``chosen`` is i64[T, heads * count]."""

CHOSEN_POOLS = onnx.parser.parse_function(
    _BEGIN
    % """ChosenPools <heads, head_dim, count, block, blocks>
    (q, k, weights, index_cache, position, cos_cache, sin_cache, pooling)"""
    + _POOLED
    + _WEIGHED
    + _POOLS
)
"""The same of ``blocks`` of ``block`` positions, whose keys are pooled by the gates behind them, f32[T, 2 * head_dim],
and ``pooling`` f32[block, head_dim]. Nothing is turned. ``count`` is ``blocks * block + block - 1``."""

CHOSEN_MEANS = onnx.parser.parse_function(
    _BEGIN
    % """ChosenMeans <heads, head_dim, rotary_dim, count, lists, block, blocks, epsilon>
    (q, k, index_cache, position, cos_cache, sin_cache, gain)"""
    + _AVERAGED
    + _POOLS.replace("chosen = Concat", "of_each = Concat").replace("}\n", _AS_OFTEN)
)
"""The same where the key of a block is the mean of its positions' keys, which are cached as they are: normed then, with
``gain`` f32[head_dim], and turned. The heads count alike. ``chosen`` is i64[T, lists * count], so often the same."""
