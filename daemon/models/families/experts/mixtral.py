"""Mixtral: Mistral with experts in the place of every MLP."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_everywhere
from motley.daemon.models.blocks.experts import expert_count, experts, stacked_parts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames, usual_names
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part


def mixtral(keys: Keys) -> Model:
    """Describe a model of type ``mixtral``."""
    shape = read_shape(keys, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size, theta=1e6)
    windows = windows_everywhere(keys, shape.layers, silent=0)
    keys.only("attention_bias", False)
    count, columns = expert_count(keys), keys.size("intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok"), normalised=True)

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, window=windows[number]),
            lambda writer, x: mixtral_experts(writer, shape, number, x, count, columns, routing),
        )

    return model("mixtral", shape, layer, {"main": rope}, context)


def mixtral_experts(
    writer: Writer,
    shape: Shape,
    number: int,
    x: Value,
    count: int,
    columns: int,
    routing: Routing,
    router: str = "gate",
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a layer's experts; files from before transformers 5 have them in another module,
    where the `router` is called ``gate``."""
    older = Part(f"model.layers.{number}.block_sparse_moe.gate.weight", (count, shape.hidden))
    names = mixtral_names(number, shape.hidden, columns)
    return experts(writer, shape, number, x, count, columns, routing, names=names, router=router, router_parts=(older,))


def mixtral_names(number: int, hidden: int, columns: int) -> MlpNames:
    """Files from before transformers 5 call gate, up and down w1, w3 and w2."""
    module = f"model.layers.{number}"
    stacked = stacked_parts(f"{module}.mlp.experts", hidden, columns)
    older = f"{module}.block_sparse_moe.experts.{{expert}}"
    letters = {"gate": ("w1", (columns, hidden)), "up": ("w3", (columns, hidden)), "down": ("w2", (hidden, columns))}
    parts = {
        part: (Part(f"{older}.{letter}.weight", shape), *stacked[part]) for part, (letter, shape) in letters.items()
    }
    return usual_names(f"{module}.mlp.experts.{{expert}}", parts=parts)
