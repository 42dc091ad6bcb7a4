"""Where a model is cut, and what is left of it at each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from motley.training.errors import TrainingError
from motley.training.memory.layers import decoder_layers


def cut(layers: int, shares: Sequence[float]) -> list[range]:
    """Cut layers in runs, one for each rank, as near to the shares as whole layers allow; each rank has one at least.

    Raises:
        TrainingError: there are fewer layers than ranks.
    """
    if layers < len(shares):
        raise TrainingError(f"{layers} layers cannot be cut in {len(shares)} parts")
    ends: list[int] = []
    so_far = 0.0
    for index, share in enumerate(shares):
        so_far += share
        wanted = round(layers * so_far / sum(shares))
        least = (ends[-1] if ends else 0) + 1
        ends.append(max(least, min(wanted, layers - (len(shares) - index - 1))))
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def forget(modules: Iterable[nn.Module]) -> None:
    """Free the weights of modules that another rank computes; they keep their places, and are not trained here."""
    for module in modules:
        for weight in (*module.parameters(), *module.buffers()):
            weight.requires_grad_(False)
            weight.data = torch.empty(0, dtype=weight.dtype)


def keep_only(model: nn.Module, part: range) -> list[nn.Module]:
    """Free everything of a model but some of its layers, and return these."""
    layers = list(decoder_layers(model))
    kept = layers[part.start : part.stop]
    inside = {id(weight) for layer in kept for weight in (*layer.parameters(), *layer.buffers())}
    for weight in (*model.parameters(), *model.buffers()):
        if id(weight) not in inside:
            weight.requires_grad_(False)
            weight.data = torch.empty(0, dtype=weight.dtype)
    return kept
