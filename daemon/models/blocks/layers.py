"""A model of layers between an embedding table and a head, and what most layers begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import EMBEDDING, HEAD, Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import ShardingError, Writer

Block = Callable[[Writer, Value], Value]
"""Attention or an MLP: writes what it makes of rows, and returns it."""


def model(
    family: str,
    shape: Shape,
    layer: Callable[[int], Layer],
    ropes: Mapping[str, Rope],
    context: int,
    *,
    embedding_scale: float = 1.0,
    logits_scale: float = 1.0,
    logits_cap: float = 0.0,
    ignored: Sequence[str] = (),
    last_norm: str = "model.norm.weight",
    head_bias: bool = False,
) -> Model:
    """A model of layers between an embedding table and a head with a norm.

    Args:
        layer: writes a layer, given its number; `residual` is what it begins with.
        context: the longest sequence that the rotary embeddings are for, tokens.
        logits_scale: what logits are multiplied by: the rows that the head reads are, as they are shorter.
        logits_cap: logits are ``cap * tanh(logits / cap)``; 0: they are not.
        ignored: see `Model`.
        last_norm: the gain of the head's norm; empty: the head has no norm.
        head_bias: the head adds a bias to logits.

    Raises:
        ShardingError: a layer does not begin with what the one before it ends with.
    """
    words = Axis(Kind.VOCABULARY, shape.vocabulary, "vocab_size")
    table = W(EMBEDDING, words, shape.residual)
    head = Writer(Value("head.rows", shape.residual))
    normed = norm(head, shape, "head.norm", head.x, last_norm) if last_norm else head.x
    normed = head.scaled(normed, logits_scale)
    matrix = table if shape.tied else W(HEAD, words, shape.residual, "lm_head.bias" * head_bias)
    (logits,) = head.linear("head", normed, matrix, ys=("head.uncapped" if logits_cap else "logits",))
    logits = head.soft_capped(logits, logits_cap, "logits")
    layers = tuple(layer(number) for number in range(shape.layers))
    for before, after in pairwise(layers):
        if before.y != after.x:
            raise ShardingError(f"a layer begins with {after.x.name}, and the one before it ends with {before.y.name}")
    return Model(
        family=family,
        hidden=shape.hidden,
        vocabulary=shape.vocabulary,
        context=context,
        eos=shape.eos,
        embedding=table,
        layers=layers,
        head=tuple(head.operations),
        head_x=head.x,
        logits=logits,
        ropes=dict(ropes),
        embedding_scale=embedding_scale,
        ignored=tuple(ignored),
    )


def begin(shape: Shape, number: int, streams: Axis | None = None) -> Writer:
    """Begin a layer with the residual that the one before it ends with: what its block ``layers.N.mlp`` adds up to.

    Args:
        streams: what that is along, where there are several; the first layer begins with one.
    """
    if number == 0:
        return Writer(Value("hidden", shape.residual))
    return Writer(Value(f"layers.{number - 1}.mlp.residual", streams or shape.residual))


def norm(writer: Writer, shape: Shape, name: str, x: Value, tensor: str) -> Value:
    """Norm of whole rows, f32[T, D], as the model has them; its gain is `tensor` in a checkpoint, if norms have one."""
    bias = f"{tensor.removesuffix('.weight')}.bias" * shape.norm_bias
    gain = W(tensor, shape.residual, bias=bias) if shape.gains else None
    return writer.norm(name, x, gain, shape.epsilon, shape.norm_offset, shape.centred)


def further(shape: Shape, count: int) -> list[str]:
    """What names of tensors begin with in so many layers beyond the last one, which predict tokens further ahead."""
    return [f"model.layers.{number}." for number in range(shape.layers, shape.layers + count)]


def pre_norm_layer(
    shape: Shape,
    number: int,
    attend: Block,
    mlp: Block,
    enter: Block | None = None,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> Layer:
    """A layer as Llama has it: a norm before attention and before the MLP, each added to the residual.

    Args:
        attend, mlp: from normalised rows to what is added, f32[T, D] -> f32[T, D]{U_tp}.
        enter: makes the residual of what enters, f32[T, D]; None: it is that.
        norms: the modules of those before attention and before the MLP.
    """
    writer = begin(shape, number)
    module = f"model.layers.{number}"
    before_attention, before_mlp = norms
    entered = writer.x if enter is None else enter(writer, writer.x)
    x = norm(writer, shape, f"layers.{number}.attention.norm", entered, f"{module}.{before_attention}.weight")
    residual = writer.add(entered, attend(writer, x))
    x = norm(writer, shape, f"layers.{number}.mlp.norm", residual, f"{module}.{before_mlp}.weight")
    return writer.layer(writer.add(residual, mlp(writer, x)))


def parallel_layer(shape: Shape, number: int, attend: Block, mlp: Block) -> Layer:
    """A layer as Command R has it: attention and the MLP read the same norm, and what both make is added at once.

    Args:
        attend, mlp: from normalised rows to what is added, f32[T, D] -> f32[T, D]{U_tp}.
    """
    writer = begin(shape, number)
    at, module = f"layers.{number}.attention.norm", f"model.layers.{number}.input_layernorm.weight"
    x = norm(writer, shape, at, writer.x, module)
    return writer.layer(writer.add(writer.x, attend(writer, x), mlp(writer, x)))


def post_norm_layer(shape: Shape, number: int, attend: Block, mlp: Block) -> Layer:
    """A layer as OLMo 2 has it: norms of what attention and the MLP make, and none of what they read.

    Args:
        attend, mlp: from rows to what is normalised and added, f32[T, D] -> f32[T, D]{U_tp}.
    """
    writer = begin(shape, number)
    at, module = f"layers.{number}", f"model.layers.{number}"
    x = attend(writer, writer.x)
    x = norm(writer, shape, f"{at}.attention.after", x, f"{module}.post_attention_layernorm.weight")
    residual = writer.add(writer.x, x)
    x = mlp(writer, residual)
    x = norm(writer, shape, f"{at}.mlp.after", x, f"{module}.post_feedforward_layernorm.weight")
    return writer.layer(writer.add(residual, x))


def both_norms_layer(
    shape: Shape,
    number: int,
    attend: Block,
    mlp: Block,
    norms: tuple[str, str, str] = (
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    *,
    enter: Block | None = None,
    after: Shape | None = None,
) -> Layer:
    """A layer as Gemma has it: norms of what attention and the MLP read, and of what they make.

    Args:
        norms: the modules of those after attention, before the MLP and after it.
        attend, mlp: from normalised rows to what is normalised and added, f32[T, D] -> f32[T, D]{U_tp}.
        enter: see `pre_norm_layer`.
        after: what norms after attention and the MLP are like; None: like those before.
    """
    writer = begin(shape, number)
    at, module = f"layers.{number}", f"model.layers.{number}"
    after_attention, before_mlp, after_mlp = norms
    after = after or shape
    entered = writer.x if enter is None else enter(writer, writer.x)
    x = norm(writer, shape, f"{at}.attention.norm", entered, f"{module}.input_layernorm.weight")
    x = attend(writer, x)
    x = norm(writer, after, f"{at}.attention.after", x, f"{module}.{after_attention}.weight")
    residual = writer.add(entered, x)
    x = norm(writer, shape, f"{at}.mlp.norm", residual, f"{module}.{before_mlp}.weight")
    x = mlp(writer, x)
    x = norm(writer, after, f"{at}.mlp.after", x, f"{module}.{after_mlp}.weight")
    return writer.layer(writer.add(residual, x))
