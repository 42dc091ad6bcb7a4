"""Layers with several residual streams, which blocks read by gates for each element (Qwen4-Exp).

Before a block each stream is normed by itself. Two narrow matrices make of all of them, side by side, how much of each
element of each stream the block reads: the mean of what these gates let through. A third makes of them how much each
stream gets of what the block makes.

The first layer makes streams of the embeddings, and the last one a row of the streams again, in the same way as a block
reads them.
"""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.layers import Block, begin
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W
from motley.daemon.models.description.model import Layer
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.plugins.streams import MOST_STREAMS

Enter = Callable[[Writer, Value], Value]
"""From streams to streams, f32[T, S D] both."""


class GatedStreams:
    """The residual streams of a model.

    Attributes:
        along: the axis of all of them, side by side.
    """

    def __init__(self, keys: Keys, shape: Shape) -> None:
        """Read how many there are, and how narrow the matrices of gates.

        Raises:
            ConfigError: naming the key that is not possible.
        """
        self._shape = shape
        self._count = keys.size("hc_count", 4, least=2, most=MOST_STREAMS)
        heads = Heads(self._count, self._count, shape.hidden)
        self.along = Axis(Kind.PLAIN, self._count * shape.hidden, "hc_count * hidden_size", heads)
        self._each = Axis(Kind.PLAIN, self._count, "hc_count")
        self._narrow = Axis(Kind.PLAIN, keys.size("hc_lowrank", 320), "hc_lowrank")

    def layer(self, number: int, attend: Block, mlp: Block, enter: Enter | None = None) -> Layer:
        """A layer.

        Args:
            attend, mlp: from what they read of the streams to what is written to them, f32[T, D] -> f32[T, D]{U_tp}.
            enter: changes the streams before; None: nothing does.
        """
        shape, module = self._shape, f"model.layers.{number}"
        writer = begin(shape, number, self.along)
        x = writer.x if number else writer.as_streams("layers.0.attention.streams", self.along, writer.x)
        if enter is not None:
            x = enter(writer, x)
        for part, own, block in (("attention", "attn_hyper_connection", attend), ("mlp", "mlp_hyper_connection", mlp)):
            at = f"layers.{number}.{part}"
            normed = self.normed(writer, f"{at}.streams.norm", x, f"{module}.{own}.hc_norm.weight")
            w = W(f"{module}.{own}.block_inject_weight.weight", self._each, self.along, stays_float=True)
            (logits,) = writer.linear(f"{at}.streams.logits", normed, w)
            opened = writer.gated(
                f"{at}.streams.opened", writer.scaled(logits, 1 / self._count), None, Activation.SIGMOID
            )
            row = self._read(writer, at, normed, f"{module}.{own}")
            written = writer.scaled(opened, 2.0)
            # Gates are of reading first: these read nothing.
            gates = writer.side_by_side(f"{at}.streams.written", written, written)
            x = writer.write_streams(x, gates, block(writer, row))
        if number < shape.layers - 1:
            return writer.layer(x)
        at, module = f"layers.{number}.head", "model.hyper_connection_mixer"
        normed = self.normed(writer, f"{at}.streams.norm", x, f"{module}.hc_norm.weight")
        return writer.layer(self._read(writer, at, normed, module))

    def normed(self, writer: Writer, name: str, x: Value, gain: str) -> Value:
        """f32[T, S D] -> f32[T, S D]: an RMS norm of each stream by itself; its gain is of all of them."""
        return writer.norm(name, x, W(gain, self.along), self._shape.epsilon, self._shape.norm_offset)

    def _read(self, writer: Writer, at: str, normed: Value, module: str) -> Value:
        """f32[T, S D] -> f32[T, D]: what is read of normed streams."""
        down = W(f"{module}.input_mix_weight_down.weight", self._narrow, self.along)
        up = W(f"{module}.input_mix_weight_up.weight", self.along, self._narrow)
        (made,) = writer.linear(f"{at}.streams.down", normed, down)
        made = writer.gated(f"{at}.streams.narrow", writer.scaled(made, 1 / self._count), None, Activation.SILU)
        (gates,) = writer.linear(f"{at}.streams.gates", made, up)
        through = writer.gated(f"{at}.streams.through", gates, normed, Activation.SIGMOID)
        return writer.read_streams(f"{at}.read", through, (1 / self._count,) * self._count, self._shape.residual)
