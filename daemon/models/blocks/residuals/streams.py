"""Layers with several residual streams, of which each block reads a mix, and to which it writes (hyper-connections).

Source: Zhu et al. 2024, https://arxiv.org/abs/2409.19606; constrained as in Xie et al. 2025,
https://arxiv.org/abs/2512.24880.

The first layer makes streams of the embeddings, and the last one a row of the streams again, so that what comes before
and after the layers knows nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from motley.daemon.models.blocks.layers import Block, begin, norm
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.plugins.streams import MOST_STREAMS


@dataclass(frozen=True)
class Streams:
    """The residual streams of a model.

    Attributes:
        count: how many.
        along: the axis of all of them, side by side.
        epsilon, written, least, rounds: see `StreamGates`; 0 rounds: they are not mixed.
    """

    count: int
    along: Axis
    epsilon: float
    written: float
    least: float = 0.0
    rounds: int = 0


def read_streams(keys: Keys, shape: Shape, written: float, *, mixed: bool, least: bool = False) -> Streams:
    """The residual streams that keys tell of.

    Args:
        written: see `StreamGates`.
        mixed: streams are.
        least: each gets of what a block makes at least as much as ``hc_eps`` says.

    Raises:
        ConfigError: naming the key that is not possible.
    """
    count, epsilon = keys.size("hc_mult", 4, least=2, most=MOST_STREAMS), keys.number("hc_eps", 1e-6)
    rounds = keys.size("hc_sinkhorn_iters", 20) if mixed else 0
    along = Axis(Kind.PLAIN, count * shape.hidden, "hc_mult * hidden_size")
    return Streams(count, along, epsilon, written, epsilon if least else 0.0, rounds)


def streamed_layer(
    shape: Shape,
    streams: Streams,
    number: int,
    attend: Block,
    mlp: Block,
    end: Block,
) -> Layer:
    """A layer with a norm of what attention and the MLP each read of the streams.

    Args:
        attend, mlp: from normalised rows to what is written to the streams, f32[T, D] -> f32[T, D]{U_tp}.
        end: makes a row of the streams after the last layer, f32[T, S D] -> f32[T, D].
    """
    writer = begin(shape, number, streams.along)
    module, x = f"model.layers.{number}", writer.x
    if number == 0:
        x = writer.as_streams("layers.0.attention.streams", streams.along, x)
    for part, own, before, block in (
        ("attention", "attn_hc", "input_layernorm", attend),
        ("mlp", "ffn_hc", "post_attention_layernorm", mlp),
    ):
        at = f"layers.{number}.{part}"
        gates = stream_gates(writer, shape, streams, at, x, f"{module}.{own}", 3 if streams.rounds else 2)
        row = writer.read_streams(f"{at}.read", x, gates, shape.residual)
        row = norm(writer, shape, f"{at}.norm", row, f"{module}.{before}.weight")
        x = writer.write_streams(x, gates, block(writer, row))
    return writer.layer(end(writer, x) if number == shape.layers - 1 else x)


def stream_gates(
    writer: Writer, shape: Shape, streams: Streams, at: str, x: Value, module: str, parts: int, prefix: str = ""
) -> Value:
    """f32[T, S D] -> f32[T, N]: what says of each row how its streams are read, and in more parts how they are written
    to and mixed, see `StreamGates`.

    Args:
        module: that has the weights, whose names begin with `prefix`.
    """
    count = streams.count
    along = Axis(Kind.PLAIN, sum([count, count, count**2][:parts]), "gates of streams")

    def own(name: str) -> str:
        return f"{module}.{prefix}{name}"

    normed = writer.norm(f"{at}.streams.norm", x, None, shape.epsilon)
    (logits,) = writer.linear(f"{at}.streams.logits", normed, W(own("fn"), along, streams.along, stays_float=True))
    return writer.stream_gates(
        f"{at}.gates",
        logits,
        W(own("scale"), Axis(Kind.PLAIN, parts, "parts of gates")),
        W(own("base"), along),
        count,
        epsilon=streams.epsilon,
        written=streams.written if parts > 1 else 0.0,
        least=streams.least if parts > 1 else 0.0,
        rounds=streams.rounds if parts > 2 else 0,
    )
