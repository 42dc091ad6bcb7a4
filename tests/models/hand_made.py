"""Models described by hand, for what few families have: operations, and how they follow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.latent import Latent, latent_attention
from motley.daemon.models.blocks.experts import SharedExpert, experts
from motley.daemon.models.blocks.layers import begin, model, norm, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames, gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W, key_axis, query_axis
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.rope import LinearScaling, Rope
from motley.daemon.models.description.writing import Writer

SHAPE = Shape(
    layers=2, hidden=48, heads=Heads(12, 4, 16), vocabulary=61, epsilon=1e-5, tied=False, eos=(), norm_offset=0.0
)
COLUMNS = mlp_axis(80)
PLAIN_ROPE = {"main": Rope(100.0, 16)}

Block = Callable[[Writer, int, Value], Value]
"""From normalised rows of a layer to what is added to the residual."""


def attend(writer: Writer, number: int, x: Value) -> Value:
    return attention(writer, SHAPE, number, x)


def mlp(writer: Writer, number: int, x: Value) -> Value:
    return gated_mlp(writer, f"layers.{number}.mlp", x, COLUMNS, usual_names(f"model.layers.{number}.mlp"))


def of_blocks(
    attend: Block = attend, mlp: Block = mlp, shape: Shape = SHAPE, ropes: Mapping[str, Rope] = PLAIN_ROPE
) -> Model:
    """Layers as Llama has them, but for their blocks."""

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape, number, lambda writer, x: attend(writer, number, x), lambda writer, x: mlp(writer, number, x)
        )

    return model("by hand", shape, layer, ropes, 64)


# -- attention -------------------------------------------------------------------------------------------------------


def sinks() -> Model:
    return of_blocks(lambda writer, number, x: attention(writer, SHAPE, number, x, sinks=True, window=number * 5))


def soft_capped_attention() -> Model:
    return of_blocks(lambda writer, number, x: attention(writer, SHAPE, number, x, soft_cap=0.5, scale=0.7))


def latent(queries: int) -> Model:
    """Latent attention, of queries that are made of a row of their own if it has elements."""
    sizes = Latent(12, queries, latent=32, plain=16, turned=8, values=32, neighbours=True, scale=0.3)
    return of_blocks(
        lambda writer, number, x: latent_attention(writer, SHAPE, sizes, number, x), ropes={"main": Rope(100.0, 8)}
    )


def several_ropes() -> Model:
    """And a layer without one."""
    names = ("near", "far", None)
    ropes = {"near": Rope(100.0, 16), "far": Rope(5e5, 16, LinearScaling(4.0))}
    return of_blocks(
        lambda writer, number, x: attention(writer, SHAPE, number, x, rope=names[number], window=(6, 0, 0)[number]),
        shape=replace(SHAPE, layers=3),
        ropes=ropes,
    )


def partial_rope() -> Model:
    return of_blocks(ropes={"main": Rope(100.0, 4)})


def unlike_heads() -> Model:
    """Layers of 8, 2 and 4 KV heads, of unlike sizes."""
    heads = (Heads(16, 8, 8), Heads(16, 2, 16), Heads(8, 4, 32))
    ropes = {"8": Rope(100.0, 8), "16": Rope(100.0, 16), "32": Rope(100.0, 8)}
    return of_blocks(
        lambda writer, number, x: attention(
            writer, SHAPE, number, x, heads=heads[number], rope=str(heads[number].size), qk_norm=True
        ),
        shape=replace(SHAPE, layers=3),
        ropes=ropes,
    )


def unlike_heads_with_norms_of_whole_rows() -> Model:
    heads = (Heads(16, 8, 8), Heads(16, 2, 8))
    return of_blocks(
        lambda writer, number, x: attention(writer, SHAPE, number, x, heads=heads[number], whole_qk_norm=True),
        ropes={"main": Rope(100.0, 8)},
    )


def clipped() -> Model:
    return of_blocks(lambda writer, number, x: attention(writer, SHAPE, number, x, clip=0.3, qkv_bias=True))


# -- norms and residuals ---------------------------------------------------------------------------------------------


def norms_of(before: bool, after: bool, offset: float = 0.0, multiplier: float = 1.0) -> Model:
    """Norms before blocks, after them (of the sum over the ranks), or both; and what blocks are multiplied by."""
    shape = replace(SHAPE, norm_offset=offset)

    def block(writer: Writer, number: int, residual: Value, kind: str, make: Block) -> Value:
        at, module = f"layers.{number}.{kind}", f"model.layers.{number}.{kind}"
        x = norm(writer, shape, f"{at}.norm", residual, f"{module}.before.weight") if before else residual
        y = make(writer, number, x)
        if after:
            y = norm(writer, shape, f"{at}.after", y, f"{module}.after.weight")
        return writer.add(residual, writer.scaled(y, multiplier))

    def layer(number: int) -> Layer:
        writer = begin(shape, number)
        residual = block(writer, number, writer.x, "attention", attend)
        return writer.layer(block(writer, number, residual, "mlp", mlp))

    return model("by hand", shape, layer, PLAIN_ROPE, 64)


def whole_gains() -> Model:
    """Gains that 1 is added to, of heads too."""
    shape = replace(SHAPE, norm_offset=1.0)
    return of_blocks(lambda writer, number, x: attention(writer, shape, number, x, qk_norm=True), shape=shape)


def norms_without_gains() -> Model:
    """Of heads."""

    def heads_normed(writer: Writer, number: int, x: Value) -> Value:
        at, module = f"layers.{number}.attention", f"model.layers.{number}"
        keys = key_axis(SHAPE.heads)
        axes = {"q": query_axis(SHAPE.heads), "k": keys, "v": keys}
        ws = [W(f"{module}.{letter}", axis, SHAPE.residual) for letter, axis in axes.items()]
        q, k, v = writer.linear(f"{at}.qkv", x, *ws, ys=tuple(f"{at}.{letter}" for letter in axes))
        q, k = (writer.norm(f"{each.name}.norm", each, None, 1e-5) for each in (q, k))
        y = writer.attend(f"{at}.attended", number, q, k, v, SHAPE.heads, rope="main", window=0, scale=0.35)
        return writer.linear(f"{at}.output", y, W(f"{module}.o", SHAPE.residual, y.axis))[0]

    return of_blocks(heads_normed)


def scaled_ends() -> Model:
    """An embedding that is scaled, and logits that are capped; the head is the table."""
    shape = replace(SHAPE, tied=True)

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape, number, lambda writer, x: attend(writer, number, x), lambda writer, x: mlp(writer, number, x)
        )

    return model("by hand", shape, layer, PLAIN_ROPE, 64, embedding_scale=48**0.5, logits_cap=1.5)


def scaled_after_the_sum() -> Model:
    """What is added is multiplied on every rank, not each rank's term."""

    def scaled(writer: Writer, number: int, x: Value) -> Value:
        return writer.scaled(writer.replicated(mlp(writer, number, x)), 0.22)

    return of_blocks(mlp=scaled)


def layers_times_a_number() -> Model:
    """What a block adds is multiplied by a number of the checkpoint once it has been summed."""

    def timed(writer: Writer, number: int, x: Value) -> Value:
        by = W(f"model.layers.{number}.by", Axis(Kind.PLAIN, 1, "1"))
        return writer.times(f"layers.{number}.mlp.timed", mlp(writer, number, x), by)

    return of_blocks(mlp=timed)


# -- MLPs and experts ------------------------------------------------------------------------------------------------


def activated(activation: Activation, scale: float = 1.0) -> Model:
    """`scale` widens what goes into the activation, so that it reaches its limits."""

    def own(writer: Writer, number: int, x: Value) -> Value:
        names = usual_names(f"model.layers.{number}.mlp")
        return gated_mlp(writer, f"layers.{number}.mlp", writer.scaled(x, scale), COLUMNS, names, activation)

    return of_blocks(mlp=own)


def biases_everywhere() -> Model:
    """Those of matrices that are cut by columns are added once."""

    def own(writer: Writer, number: int, x: Value) -> Value:
        names = usual_names(f"model.layers.{number}.mlp", bias=True)
        return gated_mlp(writer, f"layers.{number}.mlp", x, COLUMNS, names)

    return of_blocks(
        lambda writer, number, x: attention(writer, SHAPE, number, x, qkv_bias=True, output_bias=True), own
    )


def rows_scaled() -> Model:
    """By a number that every rank computes, after the sum."""

    def own(writer: Writer, number: int, x: Value) -> Value:
        at = f"layers.{number}.mlp"
        one = W(f"model.layers.{number}.share", Axis(Kind.PLAIN, 1, "1"), SHAPE.residual, stays_float=True)
        y = writer.replicated(mlp(writer, number, x))
        return writer.scaled_rows(f"{at}.scaled", y, writer.linear(f"{at}.share", x, one)[0])

    return of_blocks(mlp=own)


def mixture(
    routing: Routing,
    bias: bool = False,
    shared: SharedExpert | None = None,
    activation: Activation = Activation.SILU,
    multiplier: float = 1.0,
) -> Model:
    """Eight experts in every layer but the first. `bias`: of the router and of experts, too."""

    def own(writer: Writer, number: int, x: Value) -> Value:
        if number == 0:
            return mlp(writer, number, x)
        module = f"model.layers.{number}.mlp"
        rule = routing
        if routing.correction is not None:
            rule = replace(routing, correction=replace(routing.correction, name=f"{module}.correction"))
        if routing.gains is not None:
            rule = replace(routing, gains=replace(routing.gains, name=f"{module}.gains"))
        names: MlpNames = usual_names(f"{module}.experts.{{expert}}", bias=bias)
        y = experts(
            writer,
            SHAPE,
            number,
            x,
            8,
            48,
            rule,
            names=names,
            router_bias=bias,
            shared=shared,
            activation=activation,
        )
        return writer.scaled(y, multiplier)

    return of_blocks(mlp=own, shape=replace(SHAPE, layers=3))


PER_EXPERT = W("", Axis(Kind.PLAIN, 8, "experts"))

MODELS: Mapping[str, Callable[[], Model]] = {
    "sinks": sinks,
    "soft capped attention": soft_capped_attention,
    "latent": partial(latent, 0),
    "latent queries": partial(latent, 16),
    "several ropes": several_ropes,
    "partial rope": partial_rope,
    "unlike heads": unlike_heads,
    "unlike heads with norms of whole rows": unlike_heads_with_norms_of_whole_rows,
    "clipped": clipped,
    "norms before": partial(norms_of, True, False, multiplier=0.3),
    "norms after": partial(norms_of, False, True),
    "norms around": partial(norms_of, True, True, offset=1.0, multiplier=0.3),
    "no norms": partial(norms_of, False, False),
    "whole gains": whole_gains,
    "norms without gains": norms_without_gains,
    "scaled ends": scaled_ends,
    "scaled after the sum": scaled_after_the_sum,
    "rows scaled after the sum": rows_scaled,
    "gelu": partial(activated, Activation.GELU_TANH),
    "clamped": partial(activated, Activation.CLAMPED, 20.0),
    "biases everywhere": biases_everywhere,
    "softmax of chosen": partial(mixture, Routing(3, "softmax of chosen"), bias=True, activation=Activation.CLAMPED),
    "sigmoid with a correction": partial(
        mixture,
        Routing(3, "sigmoid", normalised=True, epsilon=1e-2, scaling=2.5, correction=PER_EXPERT),
        shared=SharedExpert(64, "shared_experts", gated=False),
    ),
    "weights of experts with gains": partial(mixture, Routing(3, normalised=True, scaling=0.5, gains=PER_EXPERT)),
    "layers times a number": layers_times_a_number,
    "groups": partial(
        mixture,
        Routing(2, "sigmoid", normalised=True, groups=4, groups_kept=2, correction=PER_EXPERT),
        bias=True,
        shared=SharedExpert(32),
    ),
    "a mixture that is scaled": partial(mixture, Routing(2, "softmax"), multiplier=0.22),
    "a mixture with a shared expert that is scaled": partial(
        mixture, Routing(2, "softmax"), shared=SharedExpert(64), multiplier=0.22
    ),
    "groups of a softmax": partial(mixture, Routing(3, "softmax", groups=2, groups_kept=1, scaling=0.5)),
}
"""By what is special about them."""
