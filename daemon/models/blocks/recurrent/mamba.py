"""Mamba2 layers, as the families have them that mix these with attention.

Source: Dao and Gu 2024, Transformers are SSMs, https://arxiv.org/abs/2405.21060.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motley.daemon.models.blocks.layer_kinds import FULL
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, RecurrentHeads, Value, W
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part

MAMBA = "linear_attention"
LEGACY = {"mamba": MAMBA, "attention": FULL}
"""What kinds of layers were called before."""

INFINITE = {"__float__": "Infinity"}
"""How transformers writes what JSON has no number for."""


@dataclass(frozen=True)
class Mamba:
    """What a config says of its Mamba2 layers.

    Attributes:
        groups: how many write and read vectors there are, each of ``heads / groups`` neighbouring heads.
        heads: cut by groups, or by heads where there is one group.
        reach: positions that the convolution sees, a row's own among them.
        filter_bias: whether the convolution has a bias.
        bias, output_bias: whether the projections into the layer have one, and the one out of it.
        limits: of a row's step.
        normed: what its heads find has a norm over all heads of a group.
        scales: what projections are multiplied by, by the letters ``z``, ``x``, ``b``, ``c`` and ``dt``; 1 where
            there is none.
    """

    groups: int
    heads: RecurrentHeads
    reach: int
    filter_bias: bool
    bias: bool
    output_bias: bool
    limits: tuple[float, float]
    normed: bool = True
    scales: Mapping[str, float] = field(default_factory=dict)


def read_mamba(
    keys: Keys,
    heads: int,
    head_size: int,
    state_size: int,
    groups: int,
    groups_key: str,
    reach: int,
    biases: tuple[bool, bool],
) -> Mamba:
    """Collect what a config says; what families call differently is given.

    Args:
        biases: whether the convolution has one, and the projections.

    Raises:
        ConfigError: the groups do not fit the heads, or the limits of a step are none.
    """
    if heads % groups:
        raise keys.refusal(groups_key, f"a divisor of the number of Mamba heads, {heads}")
    given = keys.get("time_step_limit") or [0.0, float("inf")]
    limits = [float("inf") if each == INFINITE else each for each in given] if isinstance(given, list) else []
    numbers = all(isinstance(each, int | float) for each in limits)
    if not numbers or len(limits) != 2 or not 0 <= limits[0] < limits[1]:
        raise keys.refusal("time_step_limit", "two numbers of at least 0, the larger one behind")
    shared = groups == 1
    cut = RecurrentHeads(heads if shared else groups, heads, state_size, head_size, shared)
    return Mamba(groups, cut, reach, *biases, biases[1], (float(limits[0]), float(limits[1])))


def mamba(writer: Writer, shape: Shape, number: int, x: Value, of: Mamba, module: str, at: str = "") -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a Mamba2 layer, from its normalised input to its output projection.

    Args:
        module: its name in a checkpoint.
        at: what names of its values begin with; empty: those of the layer's attention, which has none beside it.
    """
    at, heads = at or f"layers.{number}.attention", of.heads
    inner, key, gate = heads.group_axis, heads.key_axis, heads.gate_axis
    bc_size = of.groups * heads.key_size
    starts = {"z": 0, "x": inner.size, "b": 2 * inner.size, "c": 2 * inner.size + bc_size}
    starts["dt"] = starts["c"] + bc_size
    rows, convolved = starts["dt"] + gate.size, inner.size + 2 * bc_size

    def projection(letter: str, out: Axis) -> W:
        name = f"{module}.in_proj_{letter}"
        parts = (Part(f"{module}.in_proj.weight", (rows, shape.hidden), starts[letter]),)
        bias_parts = (Part(f"{module}.in_proj.bias", (rows,), starts[letter]),)
        return W(f"{name}.weight", out, shape.residual, f"{name}.bias" * of.bias, parts=parts, bias_parts=bias_parts)

    def projected(letters: Sequence[str], out: Axis) -> tuple[Value, ...]:
        matrices = [projection(letter, out) for letter in letters]
        names = tuple(f"{at}.{letter}" for letter in letters)
        made = writer.linear(f"{at}.{''.join(letters)}", x, *matrices, ys=names)
        return tuple(writer.scaled(y, of.scales.get(letter, 1.0)) for letter, y in zip(letters, made, strict=True))

    (xs, z), (b, c), (dt,) = projected("xz", inner), projected("bc", key), projected(["dt"], gate)
    sees = Axis(Kind.PLAIN, of.reach, "the kernel of the convolution")

    def filters(letter: str, out: Axis) -> tuple[W, W]:
        name, start = f"{module}.conv1d_{letter}", starts[letter] - inner.size
        whole = Part(f"{module}.conv1d.weight[:, 0]", (convolved, of.reach), start)
        bias = Part(f"{module}.conv1d.bias", (convolved,), start)
        return W(f"{name}.weight", out, sees, parts=(whole,)), W(f"{name}.bias", out, parts=(bias,))

    (x_filter, x_bias), (b_filter, b_bias), (c_filter, c_bias) = (
        filters("x", inner),
        filters("b", key),
        filters("c", key),
    )
    y = writer.state_space(
        f"{at}.recurrent",
        number,
        (xs, z),
        (b, c),
        dt,
        heads,
        filters=(x_filter, b_filter, c_filter),
        filter_biases=(x_bias, b_bias, c_bias) if of.filter_bias else None,
        decay=W(f"{module}.A_log", gate),
        bias=W(f"{module}.dt_bias", gate),
        skip=W(f"{module}.D", gate),
        limits=of.limits,
    )
    gain = W(f"{module}.norm.weight", inner)
    if of.normed and heads.shared:
        (y,) = writer.whole_norm(f"{at}.squares", (y,), (gain,), shape.epsilon)
    elif of.normed:
        y = writer.norm(f"{at}.recurrent.norm", y, gain, shape.epsilon)
    output = W(f"{module}.out_proj.weight", shape.residual, inner, f"{module}.out_proj.bias" * of.output_bias)
    return writer.linear(f"{at}.output", y, output)[0]
