"""The function ``motley.Xielu`` in standard ONNX operators: an activation that learns how it bends.

Engines that have a kernel for the whole recognise the node; others inline the function.

Source: Huang and Schlag 2024, https://arxiv.org/abs/2411.13010.
"""

from __future__ import annotations

import onnx.parser

XIELU = onnx.parser.parse_function("""
<domain: "motley", opset_import: ["": 24],
 doc_string: "x / 2 + softplus(a) * x^2 where x is positive, x / 2 + (0.5 + softplus(b)) * (exp(x) - 1 - x) elsewhere.">
Xielu (x, a, b) => (y)
{
    # x: f32[T, F], a and b: f32[1], y: f32[T, F]
    zero = Constant <value_float: float = 0.0> ()
    half = Constant <value_float: float = 0.5> ()
    one = Constant <value_float: float = 1.0> ()
    two = Constant <value_float: float = 2.0> ()
    a_power = Exp (a)
    a_power_more = Add (a_power, one)
    bend = Log (a_power_more)
    b_power = Exp (b)
    b_power_more = Add (b_power, one)
    b_softplus = Log (b_power_more)
    fall = Add (b_softplus, half)
    # exp(x) - 1 = 2 t / (1 - t) with t = tanh(x / 2): nothing is cancelled
    low = Min (x, zero)
    low_half = Mul (low, half)
    t = Tanh (low_half)
    t_twice = Mul (t, two)
    t_less = Sub (one, t)
    power_less_one = Div (t_twice, t_less)
    below = Sub (power_less_one, low)
    fallen = Mul (below, fall)
    high = Relu (x)
    square = Mul (high, x)
    bent = Mul (square, bend)
    straight = Mul (x, half)
    curved = Add (bent, fallen)
    y = Add (curved, straight)
}
""")
