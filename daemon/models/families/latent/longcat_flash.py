"""LongCat Flash: latent attention twice a layer, and experts beside the second, some of which are the row itself.

A layer of a checkpoint is two here, each with attention and an MLP. The first asks the experts, too; what they make of
its rows is a second residual stream, which the second layer adds at its end (a shortcut, https://arxiv.org/abs/2404.05019).
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.experts import mixture, stacked_parts
from motley.daemon.models.blocks.layers import begin, model, norm
from motley.daemon.models.blocks.mlp import gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys

DEFAULTS = {
    "q_lora_rank": 1536,
    "rope_theta": 10000000.0,
    "routed_scaling_factor": 6.0,
    "moe_topk": 12,
    "zero_expert_num": 256,
    "expert_ffn_hidden_size": 2048,
}
"""What transformers takes where a config is silent."""
ONLY = {
    "attention_method": "MLA",
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "norm_topk_prob": False,
    "router_bias": False,
    "zero_expert_type": "identity",
}
"""Keys of published configs that transformers takes for this."""


def longcat_flash(keys: Keys) -> Model:
    """Describe a model of type ``longcat_flash``."""
    keys = keys.filled(DEFAULTS)
    for key, only in ONLY.items():
        keys.only(key, only)
    keys.size("q_lora_rank")
    layers = keys.size("num_layers")
    keys.only("num_hidden_layers", layers, 2 * layers)
    keys.values["num_hidden_layers"] = 2 * layers
    shape, sizes, rope, context = read_latent(keys, 1e-5)
    keys.only("head_dim", sizes.turned)  # by which transformers rotates
    keys.only("qk_head_dim", sizes.plain + sizes.turned)
    scale = sizes.scale * (shape.hidden / sizes.queries) ** 0.5
    sizes = replace(sizes, scale=scale, enlarged=(shape.hidden / sizes.latent) ** 0.5, attentions=2)
    columns, routed = mlp_axis(keys.size("ffn_hidden_size")), _Routed(keys, shape)
    both = Axis(Kind.PLAIN, 2 * shape.hidden, "2 * hidden_size")

    def layer(number: int) -> Layer:
        file, second = divmod(number, 2)
        at, module = f"layers.{number}", f"model.layers.{file}"
        writer = begin(shape, number, both if second else None)
        x, shortcut = writer.x, None
        if second:
            x, shortcut = (
                writer.read_streams(f"{at}.{name}", writer.x, shares, shape.residual)
                for name, shares in (("residual", (1.0, 0.0)), ("shortcut", (0.0, 1.0)))
            )
        normed = norm(writer, shape, f"{at}.attention.norm", x, f"{module}.input_layernorm.{second}.weight")
        x = writer.add(x, latent_attention(writer, shape, sizes, number, normed))
        normed = norm(writer, shape, f"{at}.mlp.norm", x, f"{module}.post_attention_layernorm.{second}.weight")
        made = gated_mlp(writer, f"{at}.dense", normed, columns, usual_names(f"{module}.mlps.{second}"))
        if shortcut is not None:
            return writer.layer(writer.add(writer.add(x, made), shortcut, name=f"{at}.mlp.residual"))
        asked = routed.write(writer, shape, number, normed)
        return writer.layer(writer.as_streams(f"{at}.mlp.residual", both, writer.add(x, made), asked))

    return model("longcat_flash", shape, layer, {"main": rope}, context, ignored=["model.mtp."])


class _Routed:
    """The experts of a layer of a checkpoint, among which rows may choose themselves."""

    def __init__(self, keys: Keys, shape: Shape) -> None:
        self._count = keys.size("n_routed_experts")
        self._columns = keys.size("expert_ffn_hidden_size")
        self._itself = keys.size("zero_expert_num", least=0)
        self._chosen = keys.size("moe_topk", most=self._count)
        self._scaling = keys.number("routed_scaling_factor")
        self._all = Axis(Kind.PLAIN, self._count + self._itself, "n_routed_experts + zero_expert_num")

    def write(self, writer: Writer, shape: Shape, number: int, x: Value) -> Value:
        """f32[T, D] -> f32[T, D]: what the experts make of rows, and what these keep of themselves."""
        at, module = f"layers.{number}.mlp", f"model.layers.{number // 2}.mlp"
        correction = W(f"{module}.router.e_score_correction_bias", self._all)
        routing = Routing(self._chosen, scaling=self._scaling, correction=correction, identities=self._itself)
        router = W(f"{module}.router.classifier.weight", self._all, shape.residual, stays_float=True)
        names = usual_names(
            f"{module}.experts.{{expert}}", parts=stacked_parts(f"{module}.experts", shape.hidden, self._columns)
        )
        if not self._itself:
            route = writer.route(f"{at}.router", x, router, routing)
            return writer.replicated(mixture(writer, number, x, route, self._count, self._columns, names))
        route, kept = writer.route_and_keep(f"{at}.router", x, router, routing)
        made = mixture(writer, number, x, route, self._count, self._columns, names)
        itself = writer.scaled_rows(f"{at}.itself", x, kept, opened=False)
        return writer.add(itself, made, name=f"{at}.shortcut")
