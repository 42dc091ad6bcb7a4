"""What computes attention to keys and values in blocks, by operators that any GPU has.

First a step writes its rows' keys and values to their slots, by nodes that run with those before them; then its groups
(`motley.plugins.onnxruntime_gpu.groups`) attend by sessions of their own, as a step may have several: one call gathers
the slots of all positions that a group sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

from motley.plugins.engine import DOMAIN
from motley.plugins.nodes import attributes_of
from motley.plugins.onnxruntime_gpu.device import Gpu, declared
from motley.plugins.segments import ATTEND

ORDER = "step.order"
"""What nodes read: i64[T, 1], the numbers of the rows."""
SLOTS, WINDOW_SLOTS = "step.slots", "step.slots.windowed"
"""The same: i64[T, 1], where the rows' keys and values go; in layers with a window, the latter."""
SPLIT_PARTS = 7
"""A kernel binds what it splits and each part; WebGPU promises eight buffers."""
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

    @property
    def group(self) -> int:
        """Queries of a row that have the same key."""
        return self.heads // self.kv_heads

    @classmethod
    def of(cls, node: NodeProto) -> Heads:
        """Those of a `motley.plugins.segments.ATTENTION` or `ATTEND`."""
        attributes = attributes_of(node)
        return cls(
            heads=attributes["q_heads"],
            kv_heads=attributes["kv_heads"],
            width=attributes["head_dim"],
            rotary=attributes["rotary_dim"],
            scale=attributes["scale"],
            soft_cap=attributes["soft_cap"],
            sinks=len(node.input) > 6,
        )


class AttentionSessions:
    """The sessions for attentions of some `Heads`.

    Attributes:
        attend: (queries f32[T, 1, heads * d], rows, slots, mask f32[S, 1, 1, R, C], keys, values) -> y f32[S * R,
            kv_heads, 1, heads / kv_heads, d], if the group is the whole step and its rows are in their order.
        attend_tokens: the same if its pieces have a row each, without `rows`. Its runs may be captured.
        attend_some: as `attend`, with y and places i64[S, R, 1], which are `rows`, as more operands: those of its rows
            are written in place.
    """

    def __init__(self, device: Gpu, heads: Heads, kept: type[np.floating[Any]]) -> None:
        """
        Args:
            kept: what keys and values are in the caches, FP32 or FP16.
        """
        self.heads = heads
        self._kept = kept
        self.attend = self._attend(device)
        self.attend_tokens = self._attend(device, tokens=True)
        self.attend_some = self._attend(device, some=True)

    def _attend(self, device: Gpu, tokens: bool = False, some: bool = False) -> ort.InferenceSession:
        h = self.heads
        group = h.group
        constants = Constants()
        node = helper.make_node
        by_kv_head = constants.i64([0, 0, h.kv_heads, 1, h.width])
        if tokens:  # where R is 1, heads of a group take the place of rows, and nothing has to be turned
            alike, asking = 1, group
            nodes = [node("Reshape", ["queries", constants.i64([-1, h.kv_heads, 1, group, h.width])], ["q.turned"])]
        else:
            alike, asking = group, 1
            nodes = [
                node("Gather", ["queries", "rows"], ["q"], axis=0),  # [S, R, 1, heads * d]
                node("Reshape", ["q", constants.i64([0, 0, h.kv_heads, group, h.width])], ["q.apart"]),
                node("Transpose", ["q.apart"], ["q.turned"], perm=[0, 2, 3, 1, 4]),  # [S, kv_heads, group, R, d]
            ]
        nodes += [
            *self._gathered("keys", "k"),  # [S, C, kv_heads * d]
            node("Reshape", ["k", by_kv_head], ["k.apart"]),
            node("Transpose", ["k.apart"], ["k.turned"], perm=[0, 2, 3, 4, 1]),  # [S, kv_heads, 1, d, C]
            *self._gathered("values", "v"),
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
                node("Reshape", ["sinks", constants.i64([1, h.kv_heads, alike, asking, 1])], ["sinks.apart"]),
                node("Add", ["zeros", "sinks.apart"], ["sink.column"]),
                node("Concat", ["seen", "sink.column"], ["with.sinks"], axis=4),
                node("Softmax", ["with.sinks"], ["odds"], axis=4),
                node("Slice", ["odds", zero, constants.i64([-1]), last], ["weights"]),
            ]
        else:
            nodes.append(node("Softmax", ["seen"], ["weights"], axis=4))
        nodes.append(node("MatMul", ["weights", "v.turned"], ["y" if tokens else "sums"]))
        if not tokens:
            nodes.append(node("Transpose", ["sums"], ["sums.back"], perm=[0, 3, 1, 2, 4]))  # [S, R, kv_heads, group, d]
        inputs = [
            declared("queries", np.float32, ["T", 1, h.heads * h.width]),
            declared("slots", np.int64, ["S", "C"]),
            declared("mask", np.float32, ["S", 1, 1, "R", "C"]),
            declared("keys", self._kept, ["P", h.kv_heads * h.width]),
            declared("values", self._kept, ["P", h.kv_heads * h.width]),
        ]
        if not tokens:
            inputs.append(declared("rows", np.int64, ["S", "R"]))
        if h.sinks:
            inputs.append(declared("sinks", np.float32, [h.heads]))
        if some:
            nodes += [
                node("Reshape", ["sums.back", constants.i64([0, 0, h.kv_heads, 1, group, h.width])], ["made"]),
                node("ScatterND", ["y.before", "places", "made"], ["y"]),
            ]
            inputs += [
                declared("y.before", np.float32, ["T", h.kv_heads, 1, group, h.width]),
                declared("places", np.int64, ["S", "R", 1]),
            ]
        elif not tokens:
            nodes.append(node("Reshape", ["sums.back", constants.i64([-1, h.kv_heads, 1, group, h.width])], ["y"]))
        return device.session(nodes, inputs, [declared("y", np.float32)], constants.tensors, captured=tokens)

    def _gathered(self, cache: str, result: str) -> list[NodeProto]:
        """What gathers f32[S, C, kv_heads * d] from a cache, whatever is kept there."""
        if self._kept is np.float32:
            return [helper.make_node("Gather", [cache, "slots"], [result], axis=0)]
        there = f"{result}.kept"
        return [
            helper.make_node("Gather", [cache, "slots"], [there], axis=0),
            helper.make_node("Cast", [there], [result], to=TensorProto.FLOAT),
        ]


def group_session(device: Gpu, window: int, nothing: int) -> ort.InferenceSession:
    """(stands f32[T, 1], rows i64[S, R], seen f32[C], found f32[S, C]) -> mask f32[S, 1, 1, R, C], slots i64[S, C].

    Where the rows of a group stand, and where the first C positions are that its pieces may see -> what is added to the
    score of a row at each of the positions 0 to C - 1, of which it sees those up to its own; and where these are: after
    those that a piece sees, nothing.

    Args:
        window: of its positions a row sees the last so many; 0: all.
        nothing: the slot that stays zero.
    """
    constants = Constants()
    node = helper.make_node
    zero, never = constants.f32(0.0), constants.f32(float(NEVER))
    nodes = [
        node("Gather", ["stands", "rows"], ["own"], axis=0),  # [S, R, 1]
        node("Unsqueeze", ["own", constants.i64([1, 2])], ["own.apart"]),
        node("Sub", ["own.apart", "seen"], ["distance"]),
        node("GreaterOrEqual", ["distance", zero], ["before"]),
        node("Where", ["before", zero, never], ["causal" if window else "mask"]),
        node("ReduceMax", ["own", constants.i64([1])], ["last"], keepdims=0),  # [S, 1]
        node("GreaterOrEqual", ["last", "seen"], ["any"]),
        node("Where", ["any", "found", constants.f32(float(nothing))], ["seen.slots"]),
        node("Cast", ["seen.slots"], ["slots"], to=TensorProto.INT64),
    ]
    if window:
        nodes += [
            node("Less", ["distance", constants.f32(float(window))], ["near"]),
            node("Where", ["near", "causal", never], ["mask"]),
        ]
    inputs = [
        declared("stands", np.float32, ["T", 1]),
        declared("rows", np.int64, ["S", "R"]),
        declared("seen", np.float32, ["C"]),
        declared("found", np.float32, ["S", "C"]),
    ]
    outputs = [declared("mask", np.float32), declared("slots", np.int64)]
    return device.session(nodes, inputs, outputs, constants.tensors, captured=True)


def unpacking_session(device: Gpu, floats: Mapping[str, int], whole: Sequence[str]) -> ort.InferenceSession:
    """(packed f32[T, W]) -> what each row of it is made of: one array goes up in less time than several.

    Args:
        floats: the names and widths of values f32[T, width].
        whole: the names of values i64[T, 1], which come after these.
    """
    constants = Constants()
    widths = [*floats.values(), *(1 for _ in whole)]
    parts = [*floats, *(f"{name}.float" for name in whole)]
    nodes, rest, left = list[NodeProto](), "packed", [*zip(parts, widths, strict=True)]
    while left:
        taken, left = (left, []) if len(left) <= SPLIT_PARTS else (left[: SPLIT_PARTS - 1], left[SPLIT_PARTS - 1 :])
        if left:
            taken = [*taken, (f"rest.{len(left)}", sum(width for _, width in left))]
        sizes = constants.i64([width for _, width in taken])
        nodes.append(helper.make_node("Split", [rest, sizes], [name for name, _ in taken], axis=1))
        rest = taken[-1][0]
    nodes += [helper.make_node("Cast", [f"{name}.float"], [name], to=TensorProto.INT64) for name in whole]
    outputs = [*(declared(name, np.float32) for name in floats), *(declared(name, np.int64) for name in whole)]
    packed = [declared("packed", np.float32, ["T", sum(widths)])]
    return device.session(nodes, packed, outputs, constants.tensors, captured=True)


def with_writing(node: NodeProto, constants: Constants) -> Iterator[NodeProto]:
    """A `motley.plugins.segments.ATTENTION` as what turns its rows and writes their keys and values, in place, and an
    `ATTEND`, whose queries are f32[T, 1, heads * d] and whose result is f32[T, kv_heads, 1, heads / kv_heads, d].

    So they have these shapes where a kernel has made them: runs that are captured must not end with a change of shape.
    """
    heads = Heads.of(node)
    qkv, keys, values, lengths, cos, sin, *sinks = node.input
    y, keys_out, values_out = node.output
    slots = WINDOW_SLOTS if attributes_of(node)["window"] else SLOTS
    queries, own_keys, own_values = (f"{y}.{each}" for each in ("queries", "keys", "values"))
    turned = f"{own_keys}.turned" if heads.rotary else own_keys
    before = f"{queries}.before" if heads.rotary else queries
    width = heads.kv_heads * heads.width
    widths = [heads.heads * heads.width, width, width]
    yield helper.make_node("Reshape", [qkv, constants.i64([-1, 1, sum(widths)])], [f"{y}.rows"])
    yield helper.make_node("Split", [f"{y}.rows", constants.i64(widths)], [before, own_keys, own_values], axis=2)
    if heads.rotary:
        for x, count, result in ((before, heads.heads, queries), (own_keys, heads.kv_heads, turned)):
            yield helper.make_node(
                "RotaryEmbedding",
                [x, cos, sin, ORDER],
                [result],
                num_heads=count,
                rotary_embedding_dim=0 if heads.rotary == heads.width else heads.rotary,
            )
    for x, cache, written in ((turned, keys, keys_out), (own_values, values, values_out)):
        yield helper.make_node("Reshape", [x, constants.i64([-1, width])], [f"{x}.flat"])
        yield helper.make_node("ScatterND", [cache, slots, f"{x}.flat"], [written])
    attend = helper.make_node(
        ATTEND, [queries, keys, values, lengths, cos, sin, *sinks], [f"{y}.apart"], name=node.name, domain=DOMAIN
    )
    attend.attribute.extend(node.attribute)
    yield attend
    yield helper.make_node("Reshape", [f"{y}.apart", constants.i64([-1, widths[0]])], [y])


@dataclass(frozen=True)
class Constants:
    """The constants of a graph that is being written, by their names; equal ones are one."""

    by_name: dict[str, TensorProto] = field(default_factory=dict)

    @property
    def tensors(self) -> list[TensorProto]:
        return list(self.by_name.values())

    def i64(self, values: Sequence[int]) -> str:
        """The name of an i64[N]."""
        return self._named(np.array(values, np.int64))

    def f32(self, value: float) -> str:
        """The name of an f32."""
        return self._named(np.array(value, np.float32))

    def _named(self, values: npt.NDArray[Any]) -> str:
        name = f"constant {values.dtype} {values.tolist()}"
        if name not in self.by_name:
            self.by_name[name] = numpy_helper.from_array(values, name)
        return name
