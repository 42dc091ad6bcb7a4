"""Binds our own kernels (`motley.plugins.native`) to what they compute between the segments of a graph.

While a token is decoded, hundreds of megabytes of weights flow through the caches, and a call of the runtime finds none
of its own code and data there any more: a norm of 2048 values takes it 12 to 16 us. A few hundred bytes of ours do it
in one or two; and quantised weights are read at the speed of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from motley.plugins.adapters import parts_of
from motley.plugins.block_holder import HeldLayer
from motley.plugins.engine import SCALES, RankGraph
from motley.plugins.mapped_share import Array
from motley.plugins.native.adapted import AdaptedProduct, StepRows
from motley.plugins.native.attention import LayerBlocks, Spans, bind_attention
from motley.plugins.native.choosing import bind_choice
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.plugins.native.rows import (
    ANY,
    Action,
    bind_gated,
    bind_head_norms,
    bind_norm,
    bind_stream_gates,
    bind_streams,
)
from motley.plugins.nodes import attributes_of
from motley.plugins.segments import GATED, HEAD_NORMS, HEAD_PRODUCT, NORM, PRODUCT, Kernel
from motley.plugins.streams import READ_STREAMS, STREAM_GATES, WRITE_STREAMS

Bind = Callable[[Mapping[str, Array]], Action]
"""Binds something to compute to the places of its values, by name. The places must outlive the result."""
FAR = "far."
"""What the place of an array of far blocks is called before the array's name."""
Weight = Callable[[str], Array | None]
"""Gives the value of an initializer by its name; None: there is none of that name."""


@dataclass(frozen=True)
class Attend:
    """The attention that follows a segment, or the choice of what an attention sees.

    Attributes:
        bind: binds it to the places of its values, to the spans of its rows and to the number of its rotary embedding.
            It awaits what other machines tell by calling the last argument, if there is any.
        rope: the names of that embedding's tables.
        keys: the name of its cache of keys.
        layer: what it is to a machine that keeps some of its blocks.
    """

    bind: Callable[[Mapping[str, Array], Spans, int, Callable[[], None] | None], Action]
    rope: tuple[str, str]
    keys: str
    layer: HeldLayer


@dataclass(frozen=True)
class Adapt:
    """What adapters add to a product that a segment ends with.

    Attributes:
        x: the name of what the product is made of.
        product, y: the names of the product before and after; both are in the same place.
        parts: the names of what lies side by side in it, by which adapters know them.
        factors: what the adapters in slots have for it.
        base: what the product is made with, if it is one of our own and nothing comes between; None: another thing.
    """

    x: str
    product: str
    y: str
    parts: tuple[str, ...]
    factors: AdaptedProduct
    base: QuantisedMatrix | None = None

    def append(self, actions: list[Action], places: Mapping[str, Array], rows: StepRows) -> None:
        """Have it computed after some actions, the last of which computes the product: in its place, where one kernel
        does both.

        Args:
            places: of its values.
            rows: which are whose.
        """
        if self.base:
            actions.pop()
        actions.append(self.factors.bind(places[self.x], places[self.y], rows, self.base))


@dataclass(frozen=True)
class QuantisedProduct:
    """A product with a quantised matrix: a `Bind`.

    Attributes:
        x, y: the names of its operand and result.
    """

    matrix: QuantisedMatrix
    x: str
    y: str

    def __call__(self, places: Mapping[str, Array]) -> Action:
        return self.matrix.bind(places[self.x], places[self.y])


@dataclass(frozen=True)
class Gate:
    """What a gated MLP makes of gate and up, which lie side by side, or apart: a `Bind`.

    Attributes:
        gate, up, y: the names of its operands and result; no `up`: it lies beside the gate.
        activation: as `motley.plugins.native.rows.ACTIVATIONS` has it.
        first: where they are apart, which element of a row of gates is the first that is one.
        limits: of gate and up.
    """

    gate: str
    up: str
    y: str
    activation: str
    first: int = 0
    limits: tuple[float, float] = ANY

    def __call__(self, places: Mapping[str, Array]) -> Action:
        up = places[self.up] if self.up else None
        return bind_gated(places[self.gate], places[self.y], self.activation, up, self.first, self.limits)


def adapt(then: Kernel, slots: int, pool: Pool) -> tuple[Adapt, dict[str, int]]:
    """What computes an Adapted node, and the width of its operands and result by their names."""
    (x, product), (y,) = then.operands, then.results
    parts, widths, columns = zip(*parts_of(then.node), strict=True)
    factors = AdaptedProduct(columns[0], widths, slots, pool)
    return Adapt(x, product, y, parts, factors), {x: columns[0], product: sum(widths), y: sum(widths)}


def allocated_blocks(graph: RankGraph) -> dict[str, Array]:
    """[count, *shape] of each of `CacheBlocks.arrays`, by its name. All pages are there."""
    blocks = {
        name: np.empty((graph.blocks.count_of(spec), *shape), dtype)
        for spec in graph.caches
        for name, (shape, dtype) in graph.blocks.arrays([spec]).items()
    }
    for own in blocks.values():
        own.fill(0)
    return blocks


def kernel(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    """What computes the node of a `Kernel`, but attention, recurrences and what adapters add, and the width of its
    operands and results by their names."""
    return _MAKERS[then.node.op_type](then, weight, pool)


def _product(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    codes, scales, zeros, bias = map(weight, then.node.input[1:])
    assert codes is not None
    assert scales is not None
    attributes = attributes_of(then.node)
    matrix = QuantisedMatrix(codes, scales, zeros, bias, attributes["bits"], attributes["block"], pool)
    (x,), (y,) = then.operands, then.results
    return QuantisedProduct(matrix, x, y), {x: matrix.columns, y: matrix.rows}


def _head_product(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    codes, scales, zeros = map(weight, then.node.input[1:])
    assert codes is not None
    assert scales is not None
    attributes = attributes_of(then.node)
    heads, first, width = (attributes[name] for name in ("heads", "first", "width"))
    matrix = QuantisedMatrix(codes, scales, zeros, None, attributes["bits"], attributes["block"], pool, heads)
    (x,), (y,) = then.operands, then.results
    return lambda places: matrix.bind_heads(places[x], places[y], first), {x: width, y: matrix.rows}


def attention(then: Kernel, weight: Weight, pool: Pool, context: int) -> tuple[Attend, dict[str, int]]:
    """What computes an attention node of a `Kernel`, and the width of its operand and result by their names.

    Args:
        context: the longest sequence, in tokens.
    """
    attributes = attributes_of(then.node)
    heads, kv_heads, width = (attributes[name] for name in ("q_heads", "kv_heads", "head_dim"))
    choices, qkv = attributes.get("choices", 0), then.operands[0]
    names = then.node.input[len(then.operands) :]
    keys, values, _, cosines, sines, *others = names if len(then.node.output) > 2 else [names[0], "", *names[1:]]
    (y,) = then.results
    traits = [each for each in map(weight, others) if each is not None]
    sinks = traits[0] if len(traits) == 1 else None
    gains = (traits[0], traits[1]) if len(traits) == 2 else None
    chunk = attributes.get("chunk", 0)
    window = chunk or attributes["window"]
    warmth = _warmth(attributes, context) if "warmth" in attributes else None

    def bind(places: Mapping[str, Array], spans: Spans, rope: int, await_told: Callable[[], None] | None) -> Action:
        return bind_attention(
            places[qkv],
            places[keys],
            places[values] if values else None,
            places[y],
            spans,
            rope,
            heads=heads,
            kv_heads=kv_heads,
            scale=attributes["scale"],
            window=window,
            context=context,
            turned=attributes["rotary_dim"] // 2,
            pool=pool,
            soft_cap=attributes["soft_cap"],
            sinks=sinks,
            key_scales=places.get(f"{keys}{SCALES}"),
            value_scales=places.get(f"{values}{SCALES}"),
            far=_far(places, keys, values),
            await_told=await_told,
            chunked=chunk > 0,
            gains=gains,
            warmth=warmth,
            chosen=places[then.operands[1]] if choices else None,
        )

    layer = HeldLayer(heads, kv_heads, width, window, attributes["soft_cap"], chunk > 0)
    in_row = heads + (2 if values else 1) * kv_heads
    return Attend(bind, (cosines, sines), keys, layer), {qkv: in_row * width, y: heads * width}


def choice(then: Kernel, weight: Weight, pool: Pool, context: int) -> tuple[Attend, dict[str, int]]:
    """What computes the choice of a `Kernel`, as `attention`; how many positions are chosen the graph declares."""
    attributes = attributes_of(then.node)
    heads, size = attributes["heads"], attributes["head_dim"]
    (q, k, *weights), (chosen,) = then.operands, then.results
    keys, _, cosines, sines, *others = then.node.input[len(then.operands) :]
    means = "epsilon" in attributes
    of_keys = weight(others[0]) if others else None
    pooling, gain = (None, of_keys) if means else (of_keys, None)
    row = size if pooling is None else 2 * size

    def bind(places: Mapping[str, Array], spans: Spans, rope: int, await_told: Callable[[], None] | None) -> Action:
        scales = places.get(f"{keys}{SCALES}")
        return bind_choice(
            places[q],
            places[k],
            places[weights[0]] if weights else None,
            LayerBlocks(places[keys], places[keys], scales, scales),
            places[chosen],
            spans,
            rope,
            heads=heads,
            turned=attributes.get("rotary_dim", 0) // 2,
            context=context,
            pool=pool,
            far=_far(places, keys, ""),
            pooling=pooling,
            gain=gain,
            epsilon=attributes.get("epsilon", 0.0),
            copies=attributes.get("lists", 1),
            block=attributes.get("block", 1),
            latest=attributes.get("latest", 0),
        )

    layer = HeldLayer(heads, 1, row, 0, 0.0, False)
    return Attend(bind, (cosines, sines), keys, layer), {
        q: heads * size,
        k: row,
        **dict.fromkeys(weights, heads),
    }


def _warmth(attributes: Mapping[str, Any], context: int) -> Array:
    """f32[context]: what queries are multiplied by at each position, see ``motley.CachedAttentionWarmed``."""
    spans = (np.arange(context) + attributes["warm_offset"]) // attributes["warm_span"]
    factors: Array = (1 + attributes["warmth"] * np.log1p(spans)).astype(np.float32)
    return factors


def _far(places: Mapping[str, Array], keys: str, values: str) -> LayerBlocks | None:
    """The far blocks of a layer, by the names of its keys and values; None: there are none."""
    if f"{FAR}{keys}" not in places:
        return None
    values = values or keys
    names = keys, values, f"{keys}{SCALES}", f"{values}{SCALES}"
    arrays: Iterator[Any] = (places.get(f"{FAR}{name}") for name in names)
    return LayerBlocks(*arrays)


def _norm(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    x, skip, *names = then.node.input
    y, total = [*then.results, ""][:2]
    gain, bias = map(weight, names)
    attributes = attributes_of(then.node)
    assert gain is not None

    def bind(places: Mapping[str, Array]) -> Action:
        added, whole = (places[name] if name else None for name in (skip, total))
        own = places[x], added, gain, attributes["epsilon"], places[y], whole
        return bind_norm(*own, factor=attributes["factor"], bias=bias, centred=bool(attributes["centred"]))

    return bind, dict.fromkeys([*then.operands, *then.results], len(gain))


def _head_norms(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    (x,), (y,) = then.operands, then.results
    gains = [weight(name) if name else None for name in then.node.input[1:]]
    attributes = attributes_of(then.node)
    firsts, heads, size, epsilon = (attributes[name] for name in ("firsts", "heads", "size", "epsilon"))
    widths = {x: attributes["width"], y: sum(heads) * size}
    return lambda places: bind_head_norms(places[x], firsts, gains, heads, size, epsilon, places[y]), widths


def _gated(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    (gate, *others), (y,) = then.operands, then.results
    attributes = attributes_of(then.node)
    columns, activation = attributes["columns"], attributes["activation"].decode()
    (up,) = others or [""]
    widths = {gate: attributes["width"], y: columns} | ({up: columns} if up else {})
    limits = attributes["gate_limit"], attributes["up_limit"]
    return Gate(gate, up, y, activation, attributes["first"], limits), widths


def _stream_gates(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    (logits,), (y,) = then.operands, then.results
    scale, base = map(weight, then.node.input[1:])
    assert scale is not None
    assert base is not None
    rules = attributes_of(then.node)
    return lambda places: bind_stream_gates(places[logits], scale, base, places[y], **rules), {
        logits: len(base),
        y: len(base),
    }


def _streams(then: Kernel, weight: Weight, pool: Pool) -> tuple[Bind, dict[str, int]]:
    """Widths are declared in the graph."""
    x, gates, *own = then.node.input
    (y,), streams, same = then.results, attributes_of(then.node)["streams"], weight(gates)

    def bind(places: Mapping[str, Array]) -> Action:
        made = [places[name] for name in own]
        return bind_streams(places[x], places[gates] if same is None else same, places[y], streams, *made)

    return bind, {}


_MAKERS: dict[str, Callable[[Kernel, Weight, Pool], tuple[Bind, dict[str, int]]]] = {
    PRODUCT: _product,
    HEAD_PRODUCT: _head_product,
    NORM: _norm,
    HEAD_NORMS: _head_norms,
    GATED: _gated,
    **dict.fromkeys(STREAM_GATES, _stream_gates),
    READ_STREAMS: _streams,
    WRITE_STREAMS: _streams,
}
"""By operator, what makes its `Bind`."""
