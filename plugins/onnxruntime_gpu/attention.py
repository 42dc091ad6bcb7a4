"""The sessions that compute attention to keys and values in blocks, by operators that any GPU has.

First a step writes its rows' keys and values to their slots, then its groups (`motley.plugins.onnxruntime_gpu.groups`)
attend: one call gathers the slots of all positions that a group sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.onnxruntime_gpu.device import Gpu, declared

NEVER = np.float32(-3e38)
"""What is added to the score of a position that is not seen."""


@dataclass(frozen=True)
class Heads:
    """What attentions must have in common to be computed by the same sessions.

    Attributes:
        heads: queries of a row.
        kv_heads: keys, and values, of a row.
        width: of each.
        rotary: dimensions that turn.
        scale: of the products of queries and keys.
        soft_cap: scores are ``cap * tanh(score / cap)``; 0: they are not.
        sinks: whether each head has a logit more that is no position's.
    """

    heads: int
    kv_heads: int
    width: int
    rotary: int
    scale: float
    soft_cap: float
    sinks: bool


class AttentionSessions:
    """The sessions for attentions of some `Heads`.

    Attributes:
        write: (qkv f32[T, E], cos and sin f32[T, r/2], order i64[1, T], slots i64[T, 1], keys, values) -> queries,
            turned, f32[T, heads * d], keys, values; the last two in place.
        attend: (queries, rows, slots, mask f32[S, 1, 1, R, C], keys, values) -> y f32[S * R, heads * d], if the group
            is the whole step and its rows are in their order.
        attend_some: the same with y f32[T, heads * d] and places i64[S, R, 1], which are `rows`, as more operands:
            those of its rows are written in place.
    """

    def __init__(self, device: Gpu, heads: Heads) -> None:
        self.heads = heads
        self.write = self._write(device)
        self.attend = self._attend(device, whole=True)
        self.attend_some = self._attend(device, whole=False)

    def _write(self, device: Gpu) -> ort.InferenceSession:
        h = self.heads
        widths = [h.heads * h.width, h.kv_heads * h.width, h.kv_heads * h.width]
        constants = _Constants()
        nodes = [helper.make_node("Split", ["qkv", constants.i64(widths)], ["q", "k", "v"], axis=1)]
        for name, count in (("q", h.heads), ("k", h.kv_heads)):
            result = "queries" if name == "q" else "k.turned"
            if not h.rotary:
                nodes.append(helper.make_node("Identity", [name], [result]))
                continue
            nodes += [
                helper.make_node("Reshape", [name, constants.i64([1, -1, count, h.width])], [f"{name}.rows"]),
                helper.make_node("Transpose", [f"{name}.rows"], [f"{name}.heads"], perm=[0, 2, 1, 3]),
                helper.make_node(
                    "RotaryEmbedding",
                    [f"{name}.heads", "cos", "sin", "order"],
                    [f"{name}.rotated"],
                    rotary_embedding_dim=0 if h.rotary == h.width else h.rotary,
                ),
                helper.make_node("Transpose", [f"{name}.rotated"], [f"{name}.back"], perm=[0, 2, 1, 3]),
                helper.make_node("Reshape", [f"{name}.back", constants.i64([-1, count * h.width])], [result]),
            ]
        nodes += [
            helper.make_node("ScatterND", ["keys", "slots", "k.turned"], ["keys.out"]),
            helper.make_node("ScatterND", ["values", "slots", "v"], ["values.out"]),
        ]
        turning = [
            declared("cos", np.float32, ["T", h.rotary // 2]),
            declared("sin", np.float32, ["T", h.rotary // 2]),
            declared("order", np.int64, [1, "T"]),
        ]
        pools = [declared(name, np.float32, ["P", widths[1]]) for name in ("keys", "values")]
        return device.session(
            nodes,
            [
                declared("qkv", np.float32, ["T", sum(widths)]),
                *(turning if h.rotary else ()),
                declared("slots", np.int64, ["T", 1]),
                *pools,
            ],
            [declared(name, np.float32) for name in ("queries", "keys.out", "values.out")],
            constants.all,
        )

    def _attend(self, device: Gpu, whole: bool) -> ort.InferenceSession:
        h = self.heads
        group = h.heads // h.kv_heads
        constants = _Constants()
        node = helper.make_node
        by_head = constants.i64([0, 0, h.kv_heads, group, h.width])
        by_kv_head = constants.i64([0, 0, h.kv_heads, 1, h.width])
        nodes = [
            node("Gather", ["queries", "rows"], ["q"], axis=0),  # [S, R, heads * d]
            node("Reshape", ["q", by_head], ["q.apart"]),
            node("Transpose", ["q.apart"], ["q.turned"], perm=[0, 2, 3, 1, 4]),  # [S, kv_heads, group, R, d]
            node("Gather", ["keys", "slots"], ["k"], axis=0),  # [S, C, kv_heads * d]
            node("Reshape", ["k", by_kv_head], ["k.apart"]),
            node("Transpose", ["k.apart"], ["k.turned"], perm=[0, 2, 3, 4, 1]),  # [S, kv_heads, 1, d, C]
            node("Gather", ["values", "slots"], ["v"], axis=0),
            node("Reshape", ["v", by_kv_head], ["v.apart"]),
            node("Transpose", ["v.apart"], ["v.turned"], perm=[0, 2, 3, 1, 4]),  # [S, kv_heads, 1, C, d]
            node("MatMul", ["q.turned", "k.turned"], ["products"]),
            node("Mul", ["products", constants.f32(h.scale)], ["scores"]),
        ]
        scores = "scores"
        if h.soft_cap:
            cap = constants.f32(h.soft_cap)
            nodes += [
                node("Div", [scores, cap], ["part"]),
                node("Tanh", ["part"], ["bounded"]),
                node("Mul", ["bounded", cap], ["capped"]),
            ]
            scores = "capped"
        nodes.append(node("Add", [scores, "mask"], ["seen"]))
        if h.sinks:
            zero, one, last = constants.i64([0]), constants.i64([1]), constants.i64([4])
            nodes += [
                node("Slice", [scores, zero, one, last], ["any"]),
                node("Mul", ["any", constants.f32(0.0)], ["zeros"]),
                node("Reshape", ["sinks", constants.i64([1, h.kv_heads, group, 1, 1])], ["sinks.apart"]),
                node("Add", ["zeros", "sinks.apart"], ["sink.column"]),
                node("Concat", ["seen", "sink.column"], ["with.sinks"], axis=4),
                node("Softmax", ["with.sinks"], ["odds"], axis=4),
                node("Slice", ["odds", zero, constants.i64([-1]), last], ["weights"]),
            ]
        else:
            nodes.append(node("Softmax", ["seen"], ["weights"], axis=4))
        nodes += [
            node("MatMul", ["weights", "v.turned"], ["sums"]),  # [S, kv_heads, group, R, d]
            node("Transpose", ["sums"], ["sums.back"], perm=[0, 3, 1, 2, 4]),
        ]
        width = h.heads * h.width
        inputs = [
            declared("queries", np.float32, ["T", width]),
            declared("rows", np.int64, ["S", "R"]),
            declared("slots", np.int64, ["S", "C"]),
            declared("mask", np.float32, ["S", 1, 1, "R", "C"]),
            declared("keys", np.float32, ["P", h.kv_heads * h.width]),
            declared("values", np.float32, ["P", h.kv_heads * h.width]),
        ]
        if h.sinks:
            inputs.append(declared("sinks", np.float32, [h.heads]))
        if whole:
            nodes.append(node("Reshape", ["sums.back", constants.i64([-1, width])], ["y"]))
        else:
            nodes += [
                node("Reshape", ["sums.back", constants.i64([0, 0, width])], ["made"]),
                node("ScatterND", ["y.before", "places", "made"], ["y"]),
            ]
            inputs += [declared("y.before", np.float32, ["T", width]), declared("places", np.int64, ["S", "R", 1])]
        return device.session(nodes, inputs, [declared("y", np.float32)], constants.all)


def mask_session(device: Gpu, window: int) -> ort.InferenceSession:
    """(positions f32[S, R], seen f32[C]) -> mask f32[S, 1, 1, R, C]: what is added to the score of a row at each of the
    positions 0 to C - 1, of which it sees those up to its own; `window`: the last so many; 0: all."""
    constants = _Constants()
    node = helper.make_node
    zero, never = constants.f32(0.0), constants.f32(float(NEVER))
    nodes = [
        node("Unsqueeze", ["positions", constants.i64([1, 2, 4])], ["rows"]),
        node("Sub", ["rows", "seen"], ["distance"]),
        node("GreaterOrEqual", ["distance", zero], ["before"]),
        node("Where", ["before", zero, never], ["causal" if window else "mask"]),
    ]
    if window:
        nodes += [
            node("Less", ["distance", constants.f32(float(window))], ["near"]),
            node("Where", ["near", "causal", never], ["mask"]),
        ]
    inputs = [declared("positions", np.float32, ["S", "R"]), declared("seen", np.float32, ["C"])]
    return device.session(nodes, inputs, [declared("mask", np.float32)], constants.all)


class _Constants:
    """The constants of a graph that is being written."""

    def __init__(self) -> None:
        self.all: list[TensorProto] = []

    def i64(self, values: Sequence[int]) -> str:
        """The name of a new i64[N]."""
        return self._new(np.array(values, np.int64))

    def f32(self, value: float) -> str:
        """The name of a new f32."""
        return self._new(np.array(value, np.float32))

    def _new(self, values: npt.NDArray[Any]) -> str:
        name = f"constant.{len(self.all)}"
        self.all.append(numpy_helper.from_array(values, name))
        return name
