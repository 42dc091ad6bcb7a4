"""The sizes that nearly every config begins with: layers, width, heads, words."""

from __future__ import annotations

from dataclasses import dataclass

from motley.daemon.models.description.axes import Axis, Heads, Kind
from motley.daemon.models.keys import Keys


@dataclass(frozen=True)
class Shape:
    """The facts that nearly every config has.

    Attributes:
        layers: how many.
        hidden: D, elements of the residual.
        heads: of every layer's attention, unless the family says otherwise.
        vocabulary: words.
        epsilon: of norms.
        tied: the head is the embedding table.
        eos: tokens that end a text.
        norm_offset: what is added to a norm's gain as it is stored: 1 in the Gemma families.
        centred: norms of rows are layer norms, else RMS norms.
        norm_bias: they add a bias.
        gains: they multiply by a gain.
    """

    layers: int
    hidden: int
    heads: Heads
    vocabulary: int
    epsilon: float
    tied: bool
    eos: tuple[int, ...]
    norm_offset: float = 0.0
    centred: bool = False
    norm_bias: bool = False
    gains: bool = True

    @property
    def residual(self) -> Axis:
        """The axis of the residual."""
        return Axis(Kind.HIDDEN, self.hidden, "hidden_size")


def read_shape(
    keys: Keys,
    *,
    head_dim: int | None = None,
    kv_heads: bool = False,
    epsilon: float = 1e-6,
    tied: bool = False,
    norm_offset: float = 0.0,
    layer_norm: str = "",
    norm_bias: bool = False,
) -> Shape:
    """Read the facts that nearly every config has.

    Args:
        head_dim: elements of a head where the keys are silent; None: hidden size / heads.
        kv_heads: there are as many KV heads as query heads where the keys are silent; else they may not be.
        epsilon, tied: where the keys are silent.
        norm_offset: see `Shape`; the key ``norms_are_whole`` (of a GGUF file) says that it has been added.
        layer_norm: the key of the epsilon where norms are layer norms; empty: they are RMS norms.
        norm_bias: see `Shape`.

    Raises:
        ConfigError: naming the key that is missing or not possible.
    """
    hidden = keys.size("hidden_size")
    queries = keys.size("num_attention_heads")
    shared = keys.size("num_key_value_heads", queries if kv_heads else None)
    if queries % shared:
        raise keys.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {queries}")
    derived = keys.get("head_dim") is None and head_dim is None
    size = keys.size("head_dim", head_dim or hidden // queries)
    if size % 2 or (derived and hidden % queries):
        raise keys.refusal("head_dim", "an even number, by default hidden_size / num_attention_heads")
    return Shape(
        layers=keys.layers(),
        hidden=hidden,
        heads=Heads(queries, shared, size),
        vocabulary=keys.size("vocab_size"),
        epsilon=keys.number(layer_norm or "rms_norm_eps", epsilon),
        tied=keys.flag("tie_word_embeddings", tied),
        eos=tuple(dict.fromkeys(keys.tokens("eos_token_id"))),
        norm_offset=0.0 if keys.flag("norms_are_whole", False) else norm_offset,
        centred=bool(layer_norm),
        norm_bias=norm_bias,
    )
