"""Nemotron-H: each layer is one block: Mamba2, attention without rotation, an MLP without a gate, or experts.

Source: https://arxiv.org/abs/2504.03624.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.experts import expert_count
from motley.daemon.models.blocks.layer_kinds import FULL, layer_kinds
from motley.daemon.models.blocks.layers import model, norm
from motley.daemon.models.blocks.mlp import expert_axis, mlp_axis, shared_axis, squared_mlp
from motley.daemon.models.blocks.recurrent.mamba import LEGACY, MAMBA, Mamba, mamba, read_mamba
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import corrected_routing
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part
from motley.plugins.recurrent import WIDEST_HEAD

MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": MAMBA, "*": FULL, "-": MLP, "E": EXPERTS}
"""Of ``hybrid_override_pattern``."""
NAMES = {".self_attn.": ".mixer.", ".mlp.": ".mixer.", ".input_layernorm.": ".norm.", "model.norm.": "model.norm_f."}


def nemotron_h(keys: Keys) -> Model:
    """Describe a model of type ``nemotron_h``."""
    kinds = _kinds(keys)
    epsilon = keys.number("layer_norm_epsilon", 1e-5)
    shape = replace(read_shape(keys, head_dim=128, kv_heads=True), epsilon=epsilon)
    keys.only("mlp_hidden_act", "relu2")
    keys.only("mamba_hidden_act", "silu")
    keys.only("sliding_window")
    for false in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        keys.only(false, False)
    of = _mamba(keys)
    plain = mlp_axis(keys.size("intermediate_size", 21504))

    def layer(number: int) -> Layer:
        kind = kinds[number]
        before = "hidden" if number == 0 else f"layers.{number - 1}.{_block(kinds[number - 1])}.residual"
        writer, module = Writer(Value(before, shape.residual)), f"model.layers.{number}"
        x = norm(writer, shape, f"layers.{number}.{_block(kind)}.norm", writer.x, f"{module}.input_layernorm.weight")
        residual = writer.x
        match kind:
            case "linear_attention":
                y = mamba(writer, shape, number, x, of, f"{module}.mixer")
            case "full_attention":
                y = attention(writer, shape, number, x, rope=None)
            case "mlp":
                y = squared_mlp(writer, f"layers.{number}.mlp", x, plain, f"{module}.mixer")
            case _:
                residual, y = _experts(writer, shape, number, x, keys)
        return writer.layer(writer.add(residual, y))

    described = model("nemotron_h", shape, layer, {}, keys.size("max_position_embeddings", 4096), ignored=["mtp."])
    called = Part("model.embeddings.weight", (shape.vocabulary, shape.hidden))
    embedding = replace(described.embedding, parts=(called,))
    return replace(spelled(described, NAMES), embedding=embedding, prefixes=("backbone.",))


def _block(kind: str) -> str:
    """What the values of a layer of a kind are called."""
    return "attention" if kind in (MAMBA, FULL) else "mlp"


def _kinds(keys: Keys) -> list[str]:
    """The kind of each layer; ``num_hidden_layers`` is how many there are, if it is silent."""
    pattern = keys.get("hybrid_override_pattern")
    key = next((each for each in ("layers_block_type", "layer_types") if keys.get(each)), "hybrid_override_pattern")
    kinds = keys.get(key) if key != "hybrid_override_pattern" else None
    if kinds is None:
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
            raise keys.refusal(key, f"letters {' '.join(LETTERS)}, one for each layer")
        kinds = [LETTERS[letter] for letter in pattern]
    layers = len(kinds) if isinstance(kinds, list) else 1
    if keys.get("num_hidden_layers") is None:
        keys.values["num_hidden_layers"] = layers
    if keys.layers() != layers:
        raise keys.refusal("num_hidden_layers", f"only as many as {key} has, {layers}")
    return layer_kinds(keys, key, kinds, layers, [*LETTERS.values()], some=FULL, legacy=LEGACY)


def _mamba(keys: Keys) -> Mamba:
    return read_mamba(
        keys,
        keys.size("mamba_num_heads", 128),
        keys.size("mamba_head_dim", 64, most=WIDEST_HEAD),
        keys.size("ssm_state_size", 128, most=WIDEST_HEAD),
        keys.size("n_groups", 8),
        "n_groups",
        keys.size("conv_kernel", 4, least=2),
        (keys.flag("use_conv_bias", True), keys.flag("use_bias", False)),
    )


def _experts(writer: Writer, shape: Shape, number: int, x: Value, keys: Keys) -> tuple[Value, Value]:
    """f32[T, D] -> f32[T, D] and what is to be added, f32[T, D]{U_tp} or f32[T, D]: experts without gates.

    One more expert is for all rows. In the larger models experts read and make rows that are narrower, and one matrix
    before them and one behind them are everyone's.
    """
    at, module = f"layers.{number}.mlp", f"model.layers.{number}.mixer"
    count = expert_count(keys, "n_routed_experts", "num_local_experts")
    keys.only("n_shared_experts", 1)
    columns = keys.size("moe_intermediate_size")
    router = W(f"{module}.gate.weight", Axis(Kind.PLAIN, count, "n_routed_experts"), shape.residual, stays_float=True)
    x = writer.replicated(x)
    route = writer.route(f"{at}.router", x, router, corrected_routing(keys, number, count))
    shared = shared_axis(keys.size("moe_shared_expert_intermediate_size"), "moe_shared_expert_intermediate_size")
    latent = keys.size("moe_latent_size", 0, least=0)
    shared_at = f"layers.{number}.dense" if latent else f"{at}.shared"
    base = squared_mlp(writer, shared_at, x, shared, f"{module}.shared_experts")
    axis = Axis(Kind.PLAIN, latent, "moe_latent_size") if latent else shape.residual
    if latent:
        (x,) = writer.linear(f"{at}.narrow", x, W(f"{module}.fc1_latent_proj.weight", axis, shape.residual))
    body = Writer(Value(f"{at}.experts.{{expert}}.x", axis))
    parts = {
        "up_proj": Part(f"{module}.experts.up_proj[{{expert}}]", (columns, axis.size)),
        "down_proj": Part(f"{module}.experts.down_proj[{{expert}}]", (axis.size, columns)),
    }
    one = f"{module}.experts.{{expert}}"
    result = squared_mlp(body, f"{at}.experts.{{expert}}", body.x, expert_axis(columns), one, parts=parts)
    if not latent:
        return writer.x, writer.experts(f"{at}.mixture", number, x, route, count, (body, result), base)
    mixed = writer.experts(f"{at}.mixture", number, x, route, count, (body, result))
    out = W(f"{module}.fc2_latent_proj.weight", shape.residual, axis)
    return writer.add(writer.x, base), writer.linear(f"{at}.wide", mixed, out)[0]
