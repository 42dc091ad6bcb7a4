"""Factors of rotary frequencies that are tensors of a GGUF file: some for short texts, others for long ones."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.gguf.metadata import Metadata, rope_keys
from motley.daemon.weights.spec import Piece

_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
LONG_FACTORS = frozenset({_LONG, _SHORT})
"""What each rotary frequency is divided by, f32[r / 2] each."""


def long_rope(metadata: Metadata) -> dict[str, Any]:
    """The keys of a rotary embedding with such factors; none where a file has no such tensors."""
    own, checkpoint = metadata.own, metadata.checkpoint
    if _LONG not in checkpoint:
        if own.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise own.refusal("rope.scaling.attn_factor", f"only 1.0 without the tensor {_LONG}")
        return {}
    size = own.size("rope.dimension_count", metadata.head_size) // 2
    checkpoint.expect({_LONG: (size,), _SHORT: (size,)})
    long, short = (checkpoint.read(Piece(name, range(size))).tolist() for name in (_LONG, _SHORT))
    rope = rope_keys(metadata)["rope_parameters"] | {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": own.number("rope.scaling.attn_factor", 1.0),
    }
    original = own.size("rope.scaling.original_context_length", own.size("context_length"))
    return {"rope_parameters": rope, "original_max_position_embeddings": original}
