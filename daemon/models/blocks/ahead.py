"""A model's own head for the token after the next one (multi-token prediction), described as a model of one layer.

It has one layer. For a position it is given what the model has made there, behind its last norm, and the embedding of
the token that follows; both are normalised, and one matrix makes the residual of its layer of them. The table of
embeddings and the matrix of words are the model's. For a token still further ahead it is given what it has made itself,
in the place of what the model has.

Source: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2; what is given is behind a last norm where it is in
vLLM (deepseek_mtp.py, glm4_moe_mtp.py, qwen3_next_mtp.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from motley.daemon.models.blocks.layers import Block, model, norm
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys


def head_ahead(
    family: str,
    shape: Shape,
    layer: Callable[[int, Block], Layer],
    ropes: Mapping[str, Rope],
    context: int,
    *,
    hands_normed: bool = False,
    spelled: Mapping[str, str] | None = None,
) -> Model:
    """Describe the head of a model.

    Args:
        shape: of the model.
        layer: writes a decoder layer of the model, given its number, here that after the last, and what makes its
            residual of what enters.
        context: the model's.
        hands_normed: what the head is given of its own is behind its last norm.
        spelled: see `Model`.
    """
    number = shape.layers
    at, module = f"layers.{number}.ahead", f"model.layers.{number}"
    given = Value(f"layers.{number}.given", shape.residual)

    def enter(writer: Writer, x: Value) -> Value:
        token = norm(writer, shape, f"{at}.token", x, f"{module}.enorm.weight")
        row = norm(writer, shape, f"{at}.row", given, f"{module}.hnorm.weight")
        both = writer.side_by_side(f"{at}.both", token, row)
        return writer.linear(f"{at}.made", both, W(f"{module}.eh_proj.weight", shape.residual, both.axis))[0]

    own = replace(layer(number, enter), given=given)
    others = [f"model.layers.{other}." for other in range(number)]
    copies = [f"{module}.embed_tokens.", f"{module}.shared_head.head."]
    described = model(
        family,
        replace(shape, layers=1),
        lambda _: own,
        ropes,
        context,
        ignored=[*others, *copies],
        last_norm=f"{module}.shared_head.norm.weight",
    )
    return replace(described, handed=None if hands_normed else described.head_x, spelled=spelled or {})


def check_one_ahead(keys: Keys, key: str) -> None:
    """Make sure that a model has one such head, as it is said to have where the key is absent.

    Raises:
        ConfigError: it has none, or several.
    """
    if keys.size(key, 1, least=0) != 1:
        raise keys.refusal(key, "1, where the model's own head is to guess tokens; take another draft model, or none")
