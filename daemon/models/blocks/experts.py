"""Experts in the place of an MLP: how many there are and in which layers, and the layer that sends rows to them."""

from __future__ import annotations

from dataclasses import dataclass

from motley.daemon.models.blocks.mlp import Limits, MlpNames, expert_axis, gated_mlp, shared_axis, usual_names
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part


def expert_count(keys: Keys, *spellings: str) -> int:
    """How many experts a layer has: both spellings are read in every family, as transformers does.

    Raises:
        ConfigError: no spelling says it, or they say different numbers.
    """
    both = spellings or ("num_experts", "num_local_experts")
    spelled = next((key for key in both if keys.get(key) is not None), both[0])
    count = keys.size(spelled)
    for key in both:
        if keys.size(key, count) != count:
            raise keys.refusal(key, f"only the same as {spelled} = {count}")
    if keys.size("num_experts_per_tok") > count:
        raise keys.refusal("num_experts_per_tok", f"at most {spelled} = {count}")
    return count


def sparse_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts, by ``mlp_only_layers`` and ``decoder_sparse_step``.

    Raises:
        ConfigError: none has, or the keys name layers that there are not.
    """
    plain = keys.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(layer in range(layers) for layer in plain):
        raise keys.refusal("mlp_only_layers", f"a list of layers from 0 to {layers - 1}")
    step = keys.size("decoder_sparse_step", 1)
    sparse = [layer not in plain and (layer + 1) % step == 0 for layer in range(layers)]
    if not any(sparse):
        raise keys.refusal("decoder_sparse_step", f"at most num_hidden_layers = {layers}, or mlp_only_layers less")
    return sparse


def stacked_parts(module: str, hidden: int, columns: int, transposed: bool = False) -> dict[str, tuple[Part, ...]]:
    """Where experts' matrices lie in files as transformers 5 keeps them: those of a layer in two tensors,
    ``gate_up_proj`` [E, 2F, D] and ``down_proj`` [E, D, F]; transposed, [E, D, 2F] and [E, F, D]."""
    both, down = f"{module}.gate_up_proj[{{expert}}]", f"{module}.down_proj[{{expert}}]"
    wide, narrow = (2 * columns, hidden), (hidden, columns)
    if transposed:
        wide, narrow = wide[::-1], narrow[::-1]
    return {
        "gate": (Part(both, wide, transposed=transposed),),
        "up": (Part(both, wide, columns, transposed=transposed),),
        "down": (Part(down, narrow, transposed=transposed),),
    }


@dataclass(frozen=True)
class SharedExpert:
    """An expert that all rows go through.

    Attributes:
        columns: between its projections.
        module: its name within the layer's MLP.
        gated: a row gets as much of it as the sigmoid of a product with ``{module}_gate`` says.
        names: of its matrices; None: the usual ones.
        limits: see `gated_mlp`.
    """

    columns: int
    module: str = "shared_expert"
    gated: bool = True
    names: MlpNames | None = None
    limits: Limits | None = None


def experts(
    writer: Writer,
    shape: Shape,
    number: int,
    x: Value,
    count: int,
    columns: int,
    routing: Routing,
    *,
    names: MlpNames | None = None,
    router: str = "gate",
    router_bias: bool = False,
    router_parts: tuple[Part, ...] = (),
    shared: SharedExpert | None = None,
    activation: Activation = Activation.SILU,
    scales_inputs: bool = False,
    limits: Limits | None = None,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a router sends each row to some of `count` experts, and their results are summed.

    Args:
        columns: of an expert.
        names: of an expert's matrices; None: the usual ones.
        router: the module within the layer's MLP; `router_parts` is where its matrix may lie otherwise.
        scales_inputs: see `Experts`.
        limits: of routed experts, see `gated_mlp`.
    """
    at, module = f"layers.{number}.mlp", f"model.layers.{number}.mlp"
    chooses = Axis(Kind.PLAIN, count, "num_experts")
    gate = f"{module}.{router}"
    matrix = W(f"{gate}.weight", chooses, shape.residual, f"{gate}.bias" * router_bias, True, router_parts)
    x = writer.replicated(x)
    route = writer.route(f"{at}.router", x, matrix, routing)
    base = None
    if shared is not None:
        inner = f"{module}.{shared.module}"
        own = shared.names or usual_names(inner)
        base = gated_mlp(writer, f"{at}.shared", x, shared_axis(shared.columns), own, activation, shared.limits)
        if shared.gated:
            one = Axis(Kind.PLAIN, 1, "1")
            (share,) = writer.linear(
                f"{at}.shared.router", x, W(f"{inner}_gate.weight", one, shape.residual, stays_float=True)
            )
            base = writer.scaled_rows(f"{at}.shared.scaled", base, share)
    usual = usual_names(f"{module}.experts.{{expert}}", parts=stacked_parts(f"{module}.experts", shape.hidden, columns))
    return mixture(writer, number, x, route, count, columns, names or usual, base, activation, scales_inputs, limits)


def mixture(
    writer: Writer,
    number: int,
    x: Value,
    route: tuple[Value, Value],
    count: int,
    columns: int,
    names: MlpNames,
    base: Value | None = None,
    activation: Activation = Activation.SILU,
    scales_inputs: bool = False,
    limits: Limits | None = None,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: what the experts that a router has chosen make of each row, weighed and summed.

    Args:
        route: from `Writer.route`.
        base: what is added to the sum.
        scales_inputs: see `Experts`.
        limits: see `gated_mlp`.
    """
    at = f"layers.{number}.mlp"
    body = Writer(Value(f"{at}.experts.{{expert}}.x", x.axis))
    result = gated_mlp(body, f"{at}.experts.{{expert}}", body.x, expert_axis(columns), names, activation, limits)
    return writer.experts(f"{at}.mixture", number, x, route, count, (body, result), base, scales_inputs)
