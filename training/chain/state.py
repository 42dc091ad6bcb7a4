"""What a training over a chain is after a step: adapters and AdamW's memory of them, whoever has which layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from motley.training.errors import TrainingError

State = dict[str, list[Tensor]]
"""By the name of a weight: the weight, and, once it was stepped along, AdamW's step and two moments."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def names_of(model: nn.Module, weights: Sequence[Tensor]) -> list[str]:
    """What a model calls some of its weights."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return [names[id(weight)] for weight in weights]


def state_of(names: Sequence[str], weights: Sequence[Tensor], optimiser: torch.optim.Optimizer) -> State:
    """The state of a rank's weights."""
    told = {}
    for name, weight in zip(names, weights, strict=True):
        kept = optimiser.state.get(weight, {})
        told[name] = [weight.detach(), *(kept[each] for each in _MOMENTS if each in kept)]
    return told


def restore(state: State, names: Sequence[str], weights: Sequence[Tensor], optimiser: torch.optim.Optimizer) -> None:
    """Make a rank's weights what they were.

    Raises:
        TrainingError: the state is not of these.
    """
    for name, weight in zip(names, weights, strict=True):
        value, *moments = state.get(name, [torch.empty(0)])
        if value.shape != weight.shape:
            raise TrainingError(
                f"the checkpoint is of another training: it has no {name} of shape {list(weight.shape)}"
            )
        with torch.no_grad():
            weight.copy_(value)
        optimiser.state[weight] = dict(zip(_MOMENTS, moments, strict=True)) if moments else {}
