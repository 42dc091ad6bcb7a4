"""Attention of a layer, from its normalised input to its output projection."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W, key_axis, query_axis
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.weights.places import WHOLE, Part


def attention(
    writer: Writer,
    shape: Shape,
    number: int,
    x: Value,
    *,
    heads: Heads | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    whole_qk_norm: bool = False,
    clip: float = 0.0,
    rope: str | None = "main",
    window: int = 0,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: bool = False,
    fused: str = "",
    neighbours: int = 0,
    gated: bool = False,
    gate: str = "",
    gate_of_heads: bool = False,
    opened_by: Activation = Activation.SIGMOID,
    values: int = 0,
    plain_qk_norm: bool = False,
    turned_qk_norm: bool = False,
    own_gains: bool = False,
    chunked: bool = False,
    warmth: Warmth | None = None,
    chosen: Value | None = None,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: attention of a layer, from its normalised input to its output projection.

    Args:
        heads: of this layer; None: the model's.
        qk_norm: each query and key head has a norm before the rotation: a layer norm where those of rows are, or an RMS
            norm.
        own_gains: that norm has a gain for each head, a row of a matrix.
        whole_qk_norm: that norm is over all query heads at once, and over all key heads.
        clip: the largest magnitude of queries, keys and values before the rotation; 0: any.
        rope: which of the model's rotary embeddings; None: none.
        window: how many positions a row sees, itself included; 0: all.
        scale: of the products of queries and keys; None: ``head size ** -0.5``.
        sinks: the softmax has a logit per head that is no position.
        gated: what a query head finds is multiplied by an opened gate, which ``q_proj`` makes beside the query.
        gate: the module that makes such a gate where ``q_proj`` does not; empty: there is none.
        gate_of_heads: that gate is one number for each head.
        opened_by: what opens a gate.
        values: elements of a head's values, where these are fewer than those of its keys, but at least half as many; 0:
            as many. They are cached behind some of their own, so that a cache has rows of one width.
        fused: the module, beside the usual ones, whose rows are all queries, keys and values; empty: there is none.
        neighbours: so many elements of a head turn, and in a checkpoint those that turn together are neighbours; 0:
            half of what turns lies between them.
        plain_qk_norm: query and key heads have RMS norms without gains.
        turned_qk_norm: the RMS norms of query and key heads come after the rotation.
        chunked, warmth, chosen: see `Attend`.
    """
    heads = heads or shape.heads
    at, module = f"layers.{number}.attention", f"model.layers.{number}.self_attn"
    residual, query, key = shape.residual, query_axis(heads), key_axis(heads)
    rows = query.size + 2 * key.size

    halves = range(0, neighbours, 2), range(1, neighbours, 2), range(neighbours, heads.size)

    def projection(letter: str, out: Axis, start: int) -> W:
        parts = (Part(f"{module}.{fused}.weight", (rows, shape.hidden), start),) if fused else ()
        bias_parts = (Part(f"{module}.{fused}.bias", (rows,), start),) if fused else ()
        name = f"{module}.{letter}_proj"
        if neighbours and letter != "v":
            return of_heads(f"{letter}_halves_proj", out, f"{letter}_proj", heads.size, halves)
        return W(f"{name}.weight", out, residual, f"{name}.bias" * qkv_bias, parts=parts, bias_parts=bias_parts)

    def of_heads(own: str, out: Axis, stored: str, each: int, of_head: tuple[range, ...]) -> W:
        """A matrix of some rows of each head's `each` in a module that files have."""
        name, whole, rows = f"{module}.{own}", f"{module}.{stored}", out.size // heads.size * each
        parts = (Part(f"{whole}.weight", (rows, shape.hidden), heads=each, of_head=of_head),)
        bias_parts = (Part(f"{whole}.bias", (rows,), heads=each, of_head=of_head),)
        return W(f"{name}.weight", out, residual, f"{name}.bias" * qkv_bias, parts=parts, bias_parts=bias_parts)

    def beside(which: str, first: int) -> W:
        """The queries, or their gates, of which `q_proj` has those of a head side by side."""
        return of_heads(f"q_{which}_proj", query, "q_proj", 2 * heads.size, (range(first, first + heads.size),))

    opens_along = query_axis(replace(heads, size=1)) if gate_of_heads else query
    gates = [W(f"{module}.{gate}.weight", opens_along, residual)] if gate else []
    if gated:
        gates = [beside("gate", heads.size)]
    of_values = replace(heads, size=values or heads.size)
    q, k, v, *opening = writer.linear(
        f"{at}.qkv",
        x,
        beside("query", 0) if gated else projection("q", query, 0),
        projection("k", key, query.size),
        projection("v", key_axis(of_values), query.size + key.size),
        *gates,
        ys=(f"{at}.q", f"{at}.k", f"{at}.v", *[f"{at}.gate" for _ in gates]),
    )
    if values:
        v = writer.join(f"{at}.value", v, v, first=2 * values - heads.size)
    q_norm, k_norm = f"{module}.q_norm.weight", f"{module}.k_norm.weight"
    if whole_qk_norm:
        q, k = writer.whole_norm(f"{at}.squares", (q, k), (W(q_norm, query), W(k_norm, key)), shape.epsilon)
    elif qk_norm:

        def gain(name: str, x: Value) -> W:
            if not own_gains:
                return W(name, Axis(Kind.PLAIN, heads.size, "head_dim"))
            rows = Part(f"{name}{WHOLE}", (x.axis.size,), heads=heads.size, of_head=halves)
            return W(name.replace("_norm.", "_halves_norm."), x.axis, parts=(rows,))

        q, k = (
            writer.norm(f"{x.name}.norm", x, gain(name, x), shape.epsilon, shape.norm_offset, shape.centred)
            for name, x in ((q_norm, q), (k_norm, k))
        )
    gains = None
    if plain_qk_norm or turned_qk_norm:  # a rotation leaves the length of a head as it is
        q, k = (writer.norm(f"{each.name}.norm", each, None, shape.epsilon) for each in (q, k))
    if turned_qk_norm:
        one = Axis(Kind.PLAIN, heads.size, "head_dim")
        gains = W(f"{module}.query_layernorm.weight", one), W(f"{module}.key_layernorm.weight", one)
    if clip:
        q, k, v = (writer.clip(each, clip) for each in (q, k, v))
    attended = writer.attend(
        f"{at}.attended",
        number,
        q,
        k,
        v,
        heads,
        rope=rope,
        window=window,
        scale=heads.size**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
        sinks=W(f"{module}.sinks", query_axis(Heads(heads.queries, heads.keys, 1))) if sinks else None,
        chunked=chunked,
        warmth=warmth,
        gains=gains,
        chosen=chosen,
    )
    if gate_of_heads:
        opening = [as_often(writer, opens, heads.size) for opens in opening]
    for opens in opening:
        attended = writer.gated(f"{at}.opened", opens, attended, opened_by)
    if values:
        more = query_axis(replace(heads, size=heads.size - values))
        _, attended = writer.head_parts(
            f"{at}.parts", attended, (f"{at}.more", more), (f"{at}.found", query_axis(of_values))
        )
    output = W(f"{module}.o_proj.weight", residual, query_axis(of_values), f"{module}.o_proj.bias" * output_bias)
    return writer.linear(f"{at}.output", attended, output)[0]


def as_often(writer: Writer, one: Value, count: int) -> Value:
    """Heads of `count` elements, all of them what the one element of a head of `one` is."""
    if count == 1:
        return one
    half = as_often(writer, one, count // 2)
    joined = writer.join(f"{one.name}.{count - count % 2}", half, half)
    return writer.join(f"{one.name}.{count}", joined, one) if count % 2 else joined
