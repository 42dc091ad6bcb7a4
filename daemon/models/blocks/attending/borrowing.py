"""Attention whose queries, keys and values have norms, and whose last layers attend to keys and values of earlier ones,
as Gemma's models have it from 3n on."""

from __future__ import annotations

from collections.abc import Sequence

from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Placement, Value, W, key_axis, query_axis
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys


class Lenders:
    """Which layers have keys of their own, and whose the others attend to.

    Attributes:
        owners: how many layers have keys of their own: the first ones.
        unused: what names of tensors begin with that files have for the others.
    """

    def __init__(self, keys: Keys, windows: Sequence[int], silent: int = 0) -> None:
        """`windows` are those of all layers, 0 where there is none; the last ``num_kv_shared_layers`` borrow.

        Args:
            silent: how many where the keys are silent.

        Raises:
            ConfigError: there is nobody to borrow from.
        """
        layers = len(windows)
        self.owners = layers - keys.size("num_kv_shared_layers", silent, least=0, most=layers - 1)
        self._windows = windows
        self._last = {window: number for number, window in enumerate(windows[: self.owners])}
        if self._last.keys() != set(windows):
            raise keys.refusal("num_kv_shared_layers", "fewer, so that a layer of each kind has keys of its own")
        self.unused = [
            f"model.layers.{number}.self_attn.{part}"
            for number in range(self.owners, layers)
            for part in ("k_proj.", "v_proj.", "k_norm.")
        ]

    def of(self, number: int) -> int | None:
        """The layer whose keys and values a layer attends to: the last owner of its kind; None: it has its own."""
        return self._last[self._windows[number]] if number >= self.owners else None


def normed_attention(
    writer: Writer,
    shape: Shape,
    number: int,
    x: Value,
    heads: Heads,
    window: int,
    borrows: int | None,
    keys_are_values: bool = False,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: attention whose queries, keys and values have norms, values one without a gain.
    Layers with a window have the rotary embedding ``sliding``, others ``full``.

    Args:
        borrows: the layer whose keys and values these are, too; None: the layer has its own.
    """
    at, module = f"layers.{number}.attention", f"model.layers.{number}.self_attn"
    letters = "q" if borrows is not None else "qk" if keys_are_values else "qkv"
    axes = {"q": query_axis(heads), "k": key_axis(heads), "v": key_axis(heads)}
    matrices = [W(f"{module}.{letter}_proj.weight", axes[letter], shape.residual) for letter in letters]
    q, *kv = writer.linear(f"{at}.qkv", x, *matrices, ys=tuple(f"{at}.{letter}" for letter in letters))
    one = Axis(Kind.PLAIN, heads.size, "head_dim")
    if borrows is None:
        k = writer.norm(f"{at}.k.norm", kv[0], W(f"{module}.k_norm.weight", one), shape.epsilon)
        v = writer.norm(f"{at}.v.norm", kv[-1], None, shape.epsilon)
    else:
        k, v = (Value(f"layers.{borrows}.attention.{x}.norm", axes[x], Placement.SHARDED) for x in "kv")
    attended = writer.attend(
        f"{at}.attended",
        number if borrows is None else borrows,
        writer.norm(f"{at}.q.norm", q, W(f"{module}.q_norm.weight", one), shape.epsilon),
        k,
        v,
        heads,
        rope="sliding" if window else "full",
        window=window,
        scale=1.0,
        borrowed=borrows is not None,
    )
    return writer.linear(f"{at}.output", attended, W(f"{module}.o_proj.weight", shape.residual, axes["q"]))[0]
