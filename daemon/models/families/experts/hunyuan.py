"""Hunyuan: Llama with norms of query and key heads after the rotation; or with experts, of which one is shared."""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope, rope_of

_KNOWN = {"alpha", "rope_theta", "rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
"""What rotary embeddings with an ``alpha`` have; all after the type changes nothing."""
Mlp = Callable[[Writer, int, Value], Value]
"""What a layer has after its attention: from normalised rows to what is added."""


def hunyuan_v1_dense(keys: Keys) -> Model:
    """Describe a model of type ``hunyuan_v1_dense``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    columns = mlp_axis(keys.size("intermediate_size"))
    return _hunyuan("hunyuan_v1_dense", keys, shape, lambda writer, number, x: mlp(writer, number, x, columns))


def hunyuan_vl(keys: Keys) -> Model:
    """Describe a model of type ``hunyuan_vl_text``, whose rotary embedding has sections for images, alike in a text."""
    keys = keys.also({"head_dim": "attention_head_dim"}).filled({"tie_word_embeddings": True})
    where = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.inner(where).values
    for section in ("mrope_section", "xdrope_section"):
        rope.pop(section, None)
    rope |= {key: "dynamic" for key in ("type", "rope_type") if rope.get(key) == "xdrope"}
    keys.values[where] = rope
    return hunyuan_v1_dense(keys)


def hunyuan_v1_moe(keys: Keys) -> Model:
    """Describe a model of type ``hunyuan_v1_moe``."""
    shape, columns = read_shape(keys, kv_heads=True, epsilon=1e-5), keys.size("intermediate_size")
    keys = keys.filled({"num_experts_per_tok": _for_all(keys, "moe_topk", 1)})
    keys.values["num_experts"] = _for_all(keys, "num_experts", 1)
    count = expert_count(keys)
    if _for_all(keys, "moe_intermediate_size", columns) != columns:
        raise keys.refusal("moe_intermediate_size", f"only intermediate_size = {columns}")
    if _for_all(keys, "num_shared_expert", 1) != 1:
        raise keys.refusal("num_shared_expert", "only 1")
    routing = Routing(keys.size("num_experts_per_tok"), normalised=True)
    shared = SharedExpert(columns, "shared_mlp", gated=False)

    def mixture(writer: Writer, number: int, x: Value) -> Value:
        return experts(writer, shape, number, x, count, columns, routing, router="gate.wg", shared=shared)

    return _hunyuan("hunyuan_v1_moe", keys, shape, mixture)


def _hunyuan(family: str, keys: Keys, shape: Shape, mlp: Mlp) -> Model:
    rope, context = _rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    keys.only("use_qk_norm", True)
    keys.only("use_cla", False)
    bias = keys.flag("attention_bias", False)

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, turned_qk_norm=True),
            lambda writer, x: mlp(writer, number, x),
        )

    return model(family, shape, layer, {"main": rope}, context)


def _rope(keys: Keys, head_size: int) -> tuple[Rope, int]:
    """One that is ``dynamic`` and has an ``alpha`` is not: its base is stretched once and for all."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    given = keys.inner(name)
    if given.get("alpha") is None or (given.get("rope_type") or given.get("type")) != "dynamic":
        return read_rope(keys, head_size)
    for key in given.values.keys() - _KNOWN:
        raise given.refusal(key, f"{', '.join(sorted(_KNOWN))} with an alpha")
    theta = given.number("rope_theta", keys.number("rope_theta", 10000.0))
    alpha = given.number("alpha")
    if head_size < 4 or not 0 < alpha <= 1e6:
        raise given.refusal("alpha", "a number above 0, up to 1000000, with heads of 4 elements at least")
    stretched = theta * alpha ** (head_size / (head_size - 2))
    return rope_of(keys, Keys(keys.where, {"rope_theta": stretched}), head_size, stretched)


def _for_all(keys: Keys, key: str, silent: int) -> int:
    """A number that may be a list of one for each layer, all of them alike."""
    value = keys.get(key)
    if isinstance(value, list):
        if len(value) != keys.layers() or any(each != value[0] for each in value):
            raise keys.refusal(key, "one number, or the same for every layer")
        keys = Keys(keys.where, {key: value[0]})
    return keys.size(key, silent)
