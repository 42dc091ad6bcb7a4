"""Embeddings for each layer, as Gemma's models for phones have them: a second table, a part of a row for each layer.

They are looked up by token like embeddings, so they are read from the files and are in no rank's memory. Every rank has
what a layer does with its part: the matrices are small, and to cut them would cost one more sum.
"""

from __future__ import annotations

from motley.daemon.models.blocks.layers import norm
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import EMBEDDED
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part


class GivenRows:
    """A table f32[words, layers * P], and what a layer does with its P columns.

    Attributes:
        table: see `Model.beside`.
    """

    def __init__(self, keys: Keys, shape: Shape, size: int, fewer: bool = False) -> None:
        """`size` is P.

        Args:
            fewer: the table may have fewer rows than there are words, of which the others are given the first.

        Raises:
            ConfigError: the table has not a row for each word.
        """
        words = keys.size("vocab_size_per_layer_input", shape.vocabulary)
        if words < shape.vocabulary and not fewer:
            raise keys.refusal("vocab_size_per_layer_input", f"at least vocab_size = {shape.vocabulary}")
        self._shape = shape
        self._axis = Axis(Kind.PLAIN, size, "hidden_size_per_layer_input")
        columns = Axis(Kind.PLAIN, shape.layers * size, "num_hidden_layers * hidden_size_per_layer_input")
        rows = Axis(Kind.PLAIN, words, "vocab_size_per_layer_input")
        self.table = W("model.embed_tokens_per_layer.weight", rows, columns)

    def given(self, number: int) -> Value:
        """What a layer is given, f32[T, P]."""
        return Value(f"layers.{number}.given", self._axis)

    def write(self, writer: Writer, number: int, residual: Value) -> Value:
        """f32[T, D] -> f32[T, D]: the residual and what the layer makes of it by its part of the rows."""
        return writer.add(residual, self.made(writer, number, residual))

    def made(self, writer: Writer, number: int, residual: Value) -> Value:
        """f32[T, D] -> f32[T, D]: what the layer makes of a residual by its part of the rows."""
        shape, axis, size = self._shape, self._axis, self._axis.size
        at, module = f"layers.{number}.beside", f"model.layers.{number}"
        every = Part("model.per_layer_model_projection.weight", (shape.layers * size, shape.hidden), number * size)
        own = W(f"{module}.per_layer_model_projection.weight", axis, shape.residual, parts=(every,))
        (made,) = writer.linear(f"{at}.projected", Value(EMBEDDED, shape.residual), own)
        gain = W("model.per_layer_projection_norm.weight", axis)
        made = writer.norm(f"{at}.norm", writer.scaled(made, shape.hidden**-0.5), gain, shape.epsilon)
        both = writer.scaled(writer.add(made, writer.scaled(self.given(number), size**0.5)), 2**-0.5)
        into = W(f"{module}.per_layer_input_gate.weight", axis, shape.residual)
        (gate,) = writer.linear(f"{at}.gate", residual, into)
        opened = writer.gated(f"{at}.opened", gate, both, Activation.GELU_TANH)
        (x,) = writer.linear(f"{at}.output", opened, W(f"{module}.per_layer_projection.weight", shape.residual, axis))
        return norm(writer, shape, f"{at}.after", x, f"{module}.post_per_layer_input_norm.weight")
