"""Latent attention, of DeepSeek's families and those that took it over.

A token's keys and values are products with one short row, its *latent*, and a few rotated elements that all heads
share; these are what is cached (DeepSeek-V2, https://arxiv.org/abs/2405.04434). The products are moved to the other
side: of queries before they meet the latent rows, and of what heads have seen after it. Thus a layer has one head of
keys, whose latent elements are its values too, and which every rank that has query heads caches.

The rotated elements stand first in a cached row, as those of other families' heads do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import log

from motley.daemon.models.blocks.attending.attention import as_often
from motley.daemon.models.blocks.attending.indexer import Indexer
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W, key_axis, query_axis
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import USUAL, read_rope
from motley.daemon.weights.places import Part

EPSILON = 1e-6
"""Of the norms of latent rows in most families, whatever a config says of others."""


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attention.

    Attributes:
        heads: of queries.
        queries: elements of the row that queries are made of; 0: they are made of the residual.
        latent: elements of a latent row.
        plain, turned: elements of a head's queries that are not rotated, and that are, if any.
        values: elements of what a head has seen.
        neighbours: elements that turn together are neighbours in a checkpoint; else a half lies between them.
        scale: of the products of queries and keys.
        warmth: None: queries do not grow with their positions. Where they do, latent rows are cached as values, too.
        epsilon: of the norms of latent rows.
        opening: one matrix makes queries, and a gate for each element of what a head has seen; of the row that queries
            are made of, as its norm leaves it and as it was before.
        enlarged: what latent rows are multiplied by behind their norm.
        attentions: how many of them a layer has as checkpoints count layers: ``self_attn.0`` and so on.
    """

    heads: int
    queries: int
    latent: int
    plain: int
    turned: int
    values: int
    neighbours: bool
    scale: float
    warmth: Warmth | None = None
    epsilon: float = EPSILON
    opening: bool = False
    enlarged: float = 1.0
    attentions: int = 1

    def module(self, number: int) -> str:
        """What the names of an attention's tensors begin with."""
        layer, own = divmod(number, self.attentions)
        return f"model.layers.{layer}.self_attn" + f".{own}" * (self.attentions > 1)

    def axis(self, size: int) -> Axis:
        """Query heads of some size, side by side."""
        return query_axis(Heads(self.heads, 1, size))

    def shared(self, size: int) -> Axis:
        """The one head of keys, of some size."""
        return key_axis(Heads(self.heads, 1, size))

    def turned_rows(self, first: int) -> tuple[range, ...]:
        """The rotated rows of a head of which they begin at `first`: those first that turn against the others."""
        if not self.neighbours:
            return (range(first, first + self.turned),)
        return range(first, first + self.turned, 2), range(first + 1, first + self.turned, 2)


def read_latent(
    keys: Keys, epsilon: float = 1e-6, ignored: Collection[str] = (), types: Collection[str] = USUAL
) -> tuple[Shape, Latent, Rope, int]:
    """What most configs have, the sizes of latent attention, its rotary embedding, and the longest context, tokens.

    Args:
        epsilon: of most norms, where the keys are silent.
        ignored, types: see `read_rope`.

    Raises:
        ConfigError: naming the key that is missing or not possible.
    """
    shape, latent = read_latent_sizes(keys, epsilon)
    rope, context = read_rope(keys, latent.turned, ignored=ignored, types=types)
    return shape, replace(latent, scale=latent.scale * _yarn_scale(keys)), rope, context


def read_latent_sizes(keys: Keys, epsilon: float = 1e-6, turns: bool = True) -> tuple[Shape, Latent]:
    """What most configs have, and the sizes of latent attention.

    Args:
        turns: some elements of heads do.

    Raises:
        ConfigError: naming the key that is missing or not possible.
    """
    turned = keys.size("qk_rope_head_dim") if turns else keys.size("qk_rope_head_dim", 0, least=0, most=0)
    plain = keys.size("qk_nope_head_dim")
    heads = keys.size("num_attention_heads")
    if turned % 2:
        raise keys.refusal("qk_rope_head_dim", "an even number")
    if keys.size("num_key_value_heads", heads) != heads:
        raise keys.refusal("num_key_value_heads", f"only num_attention_heads = {heads}")
    keys.only("attention_bias", False)
    keys.get("head_dim")  # published configs have it, and mean by it various things
    filled = keys.filled({"num_key_value_heads": heads})
    if not turned:
        filled.values.pop("head_dim", None)  # 0: the elements that turn
    shape = read_shape(filled, head_dim=turned or 2 * plain, epsilon=epsilon)
    latent = Latent(
        heads=heads,
        queries=keys.size("q_lora_rank", 0),
        latent=keys.size("kv_lora_rank"),
        plain=plain,
        turned=turned,
        values=keys.size("v_head_dim"),
        neighbours=keys.flag("rope_interleave", True),
        scale=(plain + turned) ** -0.5,
    )
    return shape, latent


def _yarn_scale(keys: Keys) -> float:
    """What the products of queries and keys are multiplied by where YaRN stretches the context."""
    rope = keys.inner("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    kind = rope.get("rope_type") or rope.get("type")
    if kind in (None, "default") or not rope.get("mscale_all_dim"):
        return 1.0
    return float((0.1 * rope.number("mscale_all_dim") * log(rope.number("factor")) + 1.0) ** 2)


def latent_attention(
    writer: Writer,
    shape: Shape,
    sizes: Latent,
    number: int,
    x: Value,
    rope: str | None = "main",
    gate: str = "",
    gate_of_elements: bool = False,
    sinks: bool = False,
    indexer: Indexer | None = None,
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: attention of a layer, from its normalised input to its output projection.

    Args:
        rope: which of the model's rotary embeddings; None: none, and what is called rotated is not.
        gate: the module that makes a number of each head, whose sigmoid multiplies what it has seen; empty: none.
        gate_of_elements: it makes one of each element of what heads have seen.
        sinks: the softmax has a logit per head that is no position.
        indexer: what chooses the positions that rows see; None: they see all.
    """
    at, module = f"layers.{number}.attention", sizes.module(number)
    latent = Axis(Kind.PLAIN, sizes.latent, "kv_lora_rank")

    source, made_of = _query_latent(writer, shape, sizes, number, x)
    queries, *gates = _queries(writer, sizes, number, made_of)
    chosen = None
    if indexer is not None:
        chosen = indexer.choose(writer, number, x, source, rope)
    absorbed = writer.head_linear(
        f"{at}.absorbed",
        queries,
        W(
            f"{module}.k_up_proj.weight",
            sizes.axis(sizes.latent),
            Axis(Kind.PLAIN, sizes.plain, "qk_nope_head_dim"),
            parts=(_part_of_heads(sizes, module, range(sizes.plain), transposed=True),),
        ),
    )
    query, key = absorbed, _key(writer, shape, sizes, number, x)
    if sizes.turned:
        query = writer.join(f"{at}.query", queries, absorbed, first=sizes.plain)
    attended = writer.attend(
        f"{at}.attended",
        number,
        query,
        key,
        None if sizes.warmth is None else key,
        Heads(sizes.heads, 1, sizes.turned + sizes.latent),
        rope=rope,
        window=0,
        scale=sizes.scale,
        sinks=W(f"{module}.sinks", sizes.axis(1)) if sinks else None,
        warmth=sizes.warmth,
        chosen=chosen,
    )
    seen = writer.head_linear(
        f"{at}.seen",
        attended,
        W(
            f"{module}.v_up_proj.weight",
            sizes.axis(sizes.values),
            latent,
            parts=(_part_of_heads(sizes, module, range(sizes.plain, sizes.plain + sizes.values)),),
        ),
        first=sizes.turned,
    )
    if gate:
        along = sizes.axis(sizes.values if gate_of_elements else 1)
        gates = [*writer.linear(f"{at}.gate", x, W(f"{module}.{gate}.weight", along, shape.residual))]
        if not gate_of_elements:
            gates = [as_often(writer, gates[0], sizes.values)]
    for opens in gates:
        seen = writer.gated(f"{at}.opened", opens, seen, Activation.SIGMOID)
    output = W(f"{module}.o_proj.weight", shape.residual, sizes.axis(sizes.values))
    return writer.linear(f"{at}.output", seen, output)[0]


def _part_of_heads(sizes: Latent, module: str, rows: range, transposed: bool = False) -> Part:
    """Some rows of each head of the matrix that makes keys and values of latent rows."""
    each = sizes.plain + sizes.values
    whole = (sizes.heads * each, sizes.latent)
    return Part(f"{module}.kv_b_proj.weight", whole, transposed=transposed, heads=each, of_head=(rows,))


def _query_latent(writer: Writer, shape: Shape, sizes: Latent, number: int, x: Value) -> tuple[Value, Value]:
    """The latent rows of queries, normed, if there are any, and the rows that queries are made of."""
    if not sizes.queries:
        return x, x
    at, module = f"layers.{number}.attention", sizes.module(number)
    inner = Axis(Kind.PLAIN, sizes.queries, "q_lora_rank")
    (x,) = writer.linear(f"{at}.q_latent", x, W(f"{module}.q_a_proj.weight", inner, shape.residual))
    normed = writer.norm(f"{at}.q_latent.norm", x, W(f"{module}.q_a_layernorm.weight", inner), sizes.epsilon)
    return normed, writer.side_by_side(f"{at}.q_latent.both", normed, x) if sizes.opening else normed


def _queries(writer: Writer, sizes: Latent, number: int, x: Value) -> tuple[Value, ...]:
    """Of each head first the elements that are not rotated, then those that are; and gates, if they come with them."""
    at, module = f"layers.{number}.attention", sizes.module(number)
    source = "q_gate_proj" if sizes.opening else "q_b_proj" if sizes.queries else "q_proj"
    each, opens = sizes.plain + sizes.turned, sizes.values * sizes.opening

    def of_heads(name: str, *rows: range) -> W:
        whole = Part(f"{module}.{source}.weight", (sizes.heads * (each + opens), x.axis.size), heads=each + opens)
        size = sum(map(len, rows))
        return W(f"{module}.{name}.weight", sizes.axis(size), x.axis, parts=(replace(whole, of_head=rows),))

    if not (sizes.neighbours or opens):
        return writer.linear(f"{at}.q", x, W(f"{module}.{source}.weight", sizes.axis(each), x.axis))
    turned = of_heads("q_halves_proj", range(sizes.plain), *sizes.turned_rows(sizes.plain))
    if not opens:
        return writer.linear(f"{at}.q", x, turned)
    gate = of_heads("q_gates_proj", range(each, each + opens))
    return writer.linear(f"{at}.q_gate", x, turned, gate, ys=(f"{at}.q", f"{at}.gate"))


def _key(writer: Writer, shape: Shape, sizes: Latent, number: int, x: Value) -> Value:
    """The elements of keys that are rotated, and behind them the latent row."""
    at, module = f"layers.{number}.attention", sizes.module(number)
    each = sizes.latent + sizes.turned
    rows = {"turned": sizes.turned_rows(sizes.latent)} if sizes.turned else {}
    rows["latent"] = (range(sizes.latent),)
    *turned, latent = writer.linear(
        f"{at}.k",
        x,
        *(
            W(
                f"{module}.k_{part}_proj.weight",
                sizes.shared(sum(map(len, of_head))),
                shape.residual,
                parts=(Part(f"{module}.kv_a_proj_with_mqa.weight", (each, shape.hidden), heads=each, of_head=of_head),),
            )
            for part, of_head in rows.items()
        ),
        ys=tuple(f"{at}.k.{part}" for part in rows),
    )
    gain = W(f"{module}.kv_a_layernorm.weight", Axis(Kind.PLAIN, sizes.latent, "kv_lora_rank"))
    latent = writer.scaled(writer.norm(f"{at}.k.latent.norm", latent, gain, sizes.epsilon), sizes.enlarged)
    return writer.join(f"{at}.key", *turned, latent) if turned else latent
