"""Alternating updates (AltUp): of several residual streams a layer computes with the first, and the others follow.

Each layer predicts all streams from all of them, computes with what it predicts of the first, and corrects them all by
how far the result is from that. Source: Baykal et al. 2023, https://arxiv.org/abs/2301.13310.
"""

from __future__ import annotations

from motley.daemon.models.blocks.layers import norm
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part
from motley.plugins.streams import MOST_STREAMS

LEAST = 1e-5
"""The least mean of squares that rows are made as large as others by."""


class AltUp:
    """The residual streams of a model.

    Attributes:
        along: the axis of all of them, side by side.
    """

    def __init__(self, keys: Keys, shape: Shape) -> None:
        """Read how many there are.

        Raises:
            ConfigError: naming the key that is not possible.
        """
        keys.only("altup_active_idx", 0)
        self._shape = shape
        self._count = keys.size("altup_num_inputs", least=2, most=MOST_STREAMS)
        self._scales = keys.flag("altup_correct_scale", True)
        self._each = Axis(Kind.PLAIN, self._count, "altup_num_inputs")
        self.along = Axis(Kind.PLAIN, self._count * shape.hidden, "altup_num_inputs * hidden_size")

    def begin(self, writer: Writer, x: Value) -> Value:
        """f32[T, D] -> f32[T, S D]: streams of embeddings: these, and products with them, which are as large."""
        products = (
            self._as_large(writer, "layers.0.streams", number, x, x, "altup_projections")
            for number in range(1, self._count)
        )
        return writer.as_streams("layers.0.streams", self.along, x, *products)

    def end(self, writer: Writer, number: int, x: Value) -> Value:
        """f32[T, S D] -> f32[T, D]: a row of the streams after the last layer: the mean of the first, and of products
        with the others, which are as large."""
        at, shares = f"layers.{number}.head", (1 / self._count,) * self._count
        streams = [self._one(writer, f"{at}.{stream}", x, stream) for stream in range(self._count)]
        products = (
            self._as_large(writer, f"{at}.streams", stream, streams[stream], streams[0], "altup_unembed_projections")
            for stream in range(1, self._count)
        )
        whole = writer.as_streams(f"{at}.streams", self.along, streams[0], *products)
        return writer.read_streams(f"{at}.mean", whole, shares, self._shape.residual)

    def predict(self, writer: Writer, number: int, x: Value) -> tuple[Value, Value]:
        """f32[T, S D] -> f32[T, S D] and f32[T, D]: streams, to each of which a mix of all is added, and the first."""
        at, count = f"layers.{number}.predict", self._count
        name = f"model.layers.{number}.altup.prediction_coefs"
        every = f"{name}.weight", (count**2, count)
        modalities = self._modalities(writer, number, at, self._one(writer, f"{at}.before", x, 0))
        gates = writer.linear(
            f"{at}.gates",
            modalities,
            *(
                W(
                    f"{name}.{stream}.weight",
                    self._each,
                    self._each,
                    stays_float=True,
                    parts=(Part(*every, stream * count),),
                )
                for stream in range(count)
            ),
            ys=tuple(f"{at}.gates.{stream}" for stream in range(count)),
        )
        mixes = [
            writer.read_streams(f"{at}.mix.{stream}", x, own, self._shape.residual) for stream, own in enumerate(gates)
        ]
        predicted = writer.add(x, writer.as_streams(f"{at}.mixes", self.along, *mixes))
        return predicted, self._one(writer, f"{at}.first", predicted, 0)

    def correct(self, writer: Writer, number: int, predicted: Value, first: Value, made: Value) -> tuple[Value, Value]:
        """Streams f32[T, S D], each with its part of how far what a layer has made, f32[T, D], is from what was
        predicted of the first; and that first one, f32[T, D], perhaps scaled."""
        at, module = f"layers.{number}.correct", f"model.layers.{number}.altup"
        change = writer.add(made, writer.scaled(first, -1.0, f"{at}.predicted"))
        modalities = self._modalities(writer, number, at, made)
        matrix = W(f"{module}.correction_coefs.weight", self._each, self._each, stays_float=True)
        (parts,) = writer.linear(f"{at}.parts", modalities, matrix)
        gates = writer.side_by_side(f"{at}.gates", parts, parts)  # the first half would say what is read
        streams = writer.write_streams(predicted, gates, change, f"{at}.streams")
        streams = writer.write_streams(streams, (1.0,) * self._count, change, f"{at}.corrected")
        row = self._one(writer, f"{at}.first", streams, 0)
        if self._scales:
            row = writer.times(f"{at}.scaled", row, W(f"{module}.correct_output_scale", self._shape.residual))
        return streams, row

    def give_others(self, writer: Writer, number: int, streams: Value, row: Value) -> Value:
        """f32[T, S D]: the streams a layer ends with: a row f32[T, D] is added to all but the first."""
        return writer.write_streams(streams, (0.0, *[1.0] * (self._count - 1)), row, f"layers.{number}.mlp.residual")

    def _modalities(self, writer: Writer, number: int, at: str, row: Value) -> Value:
        """f32[T, D] -> f32[T, S]: what says of a row how streams are mixed."""
        shape, module = self._shape, f"model.layers.{number}.altup"
        normed = norm(writer, shape, f"{at}.norm", row, f"{module}.router_norm.weight")
        router = W(f"{module}.modality_router.weight", self._each, shape.residual, stays_float=True)
        (routed,) = writer.linear(f"{at}.router", writer.scaled(normed, 1 / shape.hidden), router)
        return writer.soft_capped(routed, 1.0)

    def _one(self, writer: Writer, name: str, x: Value, number: int) -> Value:
        """f32[T, S D] -> f32[T, D]: one of the streams."""
        shares = tuple(float(stream == number) for stream in range(self._count))
        return writer.read_streams(name, x, shares, self._shape.residual)

    def _as_large(self, writer: Writer, at: str, number: int, x: Value, of: Value, tensors: str) -> Value:
        """f32[T, D] -> f32[T, D]: a product that is as large as another row; its matrix is one of some."""
        residual = self._shape.residual
        (made,) = writer.linear(f"{at}.{number}", x, W(f"model.{tensors}.{number - 1}.weight", residual, residual))
        return writer.as_large(f"{at}.{number}.as_large", made, of, LEAST)
