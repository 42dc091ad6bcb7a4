"""Granite's mixtures of experts: Granite, with experts in every layer, and beside them an MLP for all rows.

Granite SWA's have windows in most layers, sinks in all, and a base of the rotary embedding for each layer.
"""

from __future__ import annotations

from motley.daemon.models.blocks.experts import expert_count, mixture
from motley.daemon.models.blocks.mlp import MlpNames, gated_mlp, shared_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.dense.granite import granite_like
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part


def granitemoe(keys: Keys) -> Model:
    """Describe a model of type ``granitemoe``."""
    keys.only("shared_intermediate_size", 0)
    return _described("granitemoe", keys)


def granitemoeshared(keys: Keys) -> Model:
    """Describe a model of type ``granitemoeshared``."""
    return _described("granitemoeshared", keys)


def granitemoe_swa(keys: Keys) -> Model:
    """Describe a model of type ``granitemoe_swa``."""
    return _described("granitemoe_swa", keys, by_layers=True)


def _described(family: str, keys: Keys, by_layers: bool = False) -> Model:
    """`by_layers`: with what Granite SWA has."""
    shape = read_shape(keys, kv_heads=True)
    shared = keys.size("shared_intermediate_size", 0, least=0)
    columns = shared_axis(shared, "shared_intermediate_size") if shared else None

    def feed(writer: Writer, number: int, x: Value) -> Value:
        x = writer.replicated(x)
        base = granite_shared(writer, shape, number, x, columns) if columns else None
        return granite_experts(writer, shape, number, x, keys, base)

    return granite_like(family, keys, shape, feed, by_layers=by_layers)


def granite_shared(writer: Writer, shape: Shape, number: int, x: Value, columns: Axis) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: the MLP that all rows go through; files have its gate and up in one matrix."""
    module = f"model.layers.{number}.shared_mlp"
    both = (2 * columns.size, shape.hidden)
    names = MlpNames(
        f"{module}.gate_proj.weight",
        f"{module}.up_proj.weight",
        f"{module}.output_linear.weight",
        gate_parts=(Part(f"{module}.input_linear.weight", both),),
        up_parts=(Part(f"{module}.input_linear.weight", both, columns.size),),
    )
    return gated_mlp(writer, f"layers.{number}.mlp.shared", x, columns, names)


def granite_experts(
    writer: Writer, shape: Shape, number: int, x: Value, keys: Keys, base: Value | None = None
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: experts whose matrices files have in two tensors; `base` is what is added."""
    at, module, hidden = f"layers.{number}.mlp", f"model.layers.{number}.block_sparse_moe", shape.hidden
    count, columns = expert_count(keys, "num_local_experts"), keys.size("intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok", 2), scores="softmax of chosen")
    called = Part(f"{module}.router.weight", (count, hidden))
    chooses = Axis(Kind.PLAIN, count, "num_local_experts")
    router = W(f"{module}.router.layer.weight", chooses, shape.residual, stays_float=True, parts=(called,))
    route = writer.route(f"{at}.router", x, router, routing)

    def lying(published: str, today: str, rows: tuple[int, int], start: int = 0) -> tuple[Part, Part]:
        return (
            Part(f"{module}.{published}.weight[{{expert}}]", rows, start),
            Part(f"{module}.experts.{today}[{{expert}}]", rows, start),
        )

    one = f"{module}.experts.{{expert}}"
    names = MlpNames(
        f"{one}.gate_proj.weight",
        f"{one}.up_proj.weight",
        f"{one}.down_proj.weight",
        gate_parts=lying("input_linear", "gate_up_proj", (2 * columns, hidden)),
        up_parts=lying("input_linear", "gate_up_proj", (2 * columns, hidden), columns),
        down_parts=lying("output_linear", "down_proj", (hidden, columns)),
    )
    return mixture(writer, number, x, route, count, columns, names, base)
