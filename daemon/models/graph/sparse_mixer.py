"""The function ``motley.SparseMixer`` in standard ONNX operators: which two experts a row chooses, and their weights.

Engines that have a kernel for the whole recognise the node; others inline the function.

Source: Liu et al. 2024, GRIN, https://arxiv.org/abs/2409.12136, as it is without training's noise.
"""

from __future__ import annotations

import onnx.parser

SPARSE_MIXER = onnx.parser.parse_function("""
<domain: "motley", opset_import: ["": 24],
 doc_string: "The two largest logits of a row, each weighed by its softmax among those that are near it: at most so much
   less, as a part of the larger of that logit and their own magnitude. The first counts no more for the second.">
SparseMixer <tolerance> (logits) => (weights, chosen)
{
    # logits: f32[T, experts], weights: f32[T, 2], chosen: i64[T, 2]
    two = Constant <value_ints: ints = [2]> ()
    lowest = Constant <value_float: float = -3e38> ()
    most = Constant <value_float: float = @tolerance> ()
    largest, chosen = TopK <axis: int = -1, largest: int = 1, sorted: int = 1> (logits, two)
    first, second = Split <axis: int = 1, num_outputs: int = 2> (largest)
    first_place, second_place = Split <axis: int = 1, num_outputs: int = 2> (chosen)
    size = Abs (logits)

    first_unit = Max (size, first)
    first_less = Sub (first, logits)
    first_part = Div (first_less, first_unit)
    first_far = Greater (first_part, most)
    first_near = Where (first_far, lowest, logits)
    first_odds = Softmax <axis: int = -1> (first_near)
    first_weight = GatherElements <axis: int = 1> (first_odds, first_place)

    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    shape = Shape <start: int = 1, end: int = 2> (logits)
    count = Squeeze (shape)
    places = Range (zero, count, one)
    taken = Equal (places, first_place)
    second_unit = Max (size, second)
    second_less = Sub (second, logits)
    second_part = Div (second_less, second_unit)
    second_far = Greater (second_part, most)
    second_gone = Or (second_far, taken)
    second_near = Where (second_gone, lowest, logits)
    second_odds = Softmax <axis: int = -1> (second_near)
    second_weight = GatherElements <axis: int = 1> (second_odds, second_place)

    weights = Concat <axis: int = 1> (first_weight, second_weight)
}
""")
