"""Gated MLPs: what checkpoints call their matrices, and what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp
from statistics import NormalDist

from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.weights.places import Part

Limits = tuple[float, float]
"""The largest that a gate is before it opens, and that up is in magnitude, see `Gated`."""


@dataclass(frozen=True)
class MlpNames:
    """What a checkpoint calls the matrices of a gated MLP, and where they may lie instead.

    Attributes:
        biases: of gate, up and down, the tensors that are added to their products; empty: none.
        gate_parts, up_parts, down_parts: see `W.parts`.
        bias_parts: the same for the biases of gate, up and down.
    """

    gate: str
    up: str
    down: str
    biases: tuple[str, str, str] = ("", "", "")
    gate_parts: tuple[Part, ...] = ()
    up_parts: tuple[Part, ...] = ()
    down_parts: tuple[Part, ...] = ()
    bias_parts: tuple[tuple[Part, ...], tuple[Part, ...], tuple[Part, ...]] = ((), (), ())


def usual_names(module: str, bias: bool = False, parts: Mapping[str, tuple[Part, ...]] | None = None) -> MlpNames:
    """The names of a gated MLP in nearly every family; `parts` is by the letters ``gate``, ``up`` and ``down``."""
    names = [f"{module}.{part}_proj" for part in ("gate", "up", "down")]
    gate, up, down = (f"{name}.weight" for name in names)
    biases = tuple(f"{name}.bias" * bias for name in names)
    own = parts or {}
    return MlpNames(
        gate,
        up,
        down,
        (biases[0], biases[1], biases[2]),
        own.get("gate", ()),
        own.get("up", ()),
        own.get("down", ()),
    )


def gated_mlp(
    writer: Writer,
    at: str,
    x: Value,
    columns: Axis,
    names: MlpNames,
    activation: Activation = Activation.SILU,
    limits: Limits | None = None,
    opening: float = 1.0,
    sparsity: float = 0.0,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a gated MLP, from its normalised input to its down projection.

    Args:
        limits: of gates and up (with SiLU alone); None: there are none.
        opening: what opens the gates is multiplied by it.
        sparsity: the part of the gates that is closed, if they are distributed normally, see `StatisticalTopK`; 0: all
            count.
    """
    gate_bias, up_bias, down_bias = names.biases
    gate, up = writer.linear(
        f"{at}.gate_up",
        x,
        W(names.gate, columns, x.axis, gate_bias, parts=names.gate_parts, bias_parts=names.bias_parts[0]),
        W(names.up, columns, x.axis, up_bias, parts=names.up_parts, bias_parts=names.bias_parts[1]),
        ys=(f"{at}.gate", f"{at}.up"),
    )
    gate = writer.scaled(gate, opening)
    if sparsity:
        gate = writer.statistical_top_k(f"{at}.moments", gate, NormalDist().inv_cdf(sparsity))
    gated = writer.gated(f"{at}.gated", gate, up, activation, limits)
    down = W(names.down, x.axis, columns, down_bias, parts=names.down_parts, bias_parts=names.bias_parts[2])
    return writer.linear(f"{at}.down", gated, down)[0]


def limits_of_opened(limit: float) -> Limits | None:
    """Limits by which an opened gate, and up in magnitude, are at most so much; 0: any.

    SiLU grows where it is positive: it opens gates up to the one that it makes `limit` of up to that.
    """
    gate = limit
    for _ in range(100):  # gate * sigmoid(gate) = limit, iterated: it is contracting
        gate = limit * (1 + exp(-gate))
    return (gate, limit) if limit else None


def mlp(
    writer: Writer, number: int, x: Value, columns: Axis, bias: bool = False, activation: Activation = Activation.SILU
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a layer's gated MLP that all rows go through, with the usual names."""
    names = usual_names(f"model.layers.{number}.mlp", bias)
    return gated_mlp(writer, f"layers.{number}.mlp", x, columns, names, activation)


def squared_mlp(
    writer: Writer,
    at: str,
    x: Value,
    columns: Axis,
    module: str,
    bias: bool = False,
    parts: Mapping[str, Part] | None = None,
    names: tuple[str, str] = ("up_proj", "down_proj"),
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: an MLP without a gate, which squares what is positive.

    Args:
        module: that its matrices are in, which `names` tells.
        parts: where they lie instead, by those names.
    """
    up, down = names
    own = parts or {}

    def matrix(name: str, out: Axis, inner: Axis) -> W:
        lying = (own[name],) if name in own else ()
        return W(f"{module}.{name}.weight", out, inner, f"{module}.{name}.bias" * bias, parts=lying)

    (made,) = writer.linear(f"{at}.up", x, matrix(up, columns, x.axis))
    squared = writer.gated(f"{at}.squared", made, made, Activation.RELU)
    return writer.linear(f"{at}.down", squared, matrix(down, x.axis, columns))[0]


def gelu_mlp(
    writer: Writer, at: str, x: Value, columns: Axis, module: str, names: tuple[str, str], bias: bool
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: an MLP without a gate, with GELU, by the approximation with tanh.

    Args:
        module: that its matrices are in, which `names` tells.
    """
    up, down = (f"{module}.{name}" for name in names)
    (made,) = writer.linear(f"{at}.up", x, W(f"{up}.weight", columns, x.axis, f"{up}.bias" * bias))
    opened = writer.gated(f"{at}.opened", made, None, Activation.GELU_TANH)
    return writer.linear(f"{at}.down", opened, W(f"{down}.weight", x.axis, columns, f"{down}.bias" * bias))[0]


def fused_names(module: str, hidden: int, columns: int) -> MlpNames:
    """The names of a gated MLP whose gate and up may lie in one matrix, ``gate_up_proj`` [2F, D]."""
    both, rows = f"{module}.gate_up_proj.weight", (2 * columns, hidden)
    return usual_names(module, parts={"gate": (Part(both, rows),), "up": (Part(both, rows, columns),)})


def mlp_axis(columns: int) -> Axis:
    """The columns of an MLP that all rows go through."""
    return Axis(Kind.MLP, columns, "intermediate_size")


def shared_axis(columns: int, called: str = "shared_expert_intermediate_size") -> Axis:
    """The columns of an expert that all rows go through."""
    return Axis(Kind.MLP, columns, called)


def expert_axis(columns: int) -> Axis:
    """The columns of an expert that a router sends rows to."""
    return Axis(Kind.MLP, columns, "the intermediate size of experts", routed=True)
