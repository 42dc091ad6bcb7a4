"""Truncating a model's graph at the border of a layer: gradients do not go below it, and nothing is kept for them.

Adapters below the border are not trained. The gradient of those above is exact; what is missing is that of those below.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import TYPE_CHECKING

from motley.training.errors import TrainingError

if TYPE_CHECKING:
    from torch import Tensor, nn


def truncate(model: nn.Module, top: int, loss: Callable[[], Tensor]) -> float:
    """Have only the adapters of a model's last layers trained, and of what comes after them.

    Args:
        top: how many layers.
        loss: of an example, by which it is measured what that misses. All layers' activations are kept for it.

    Returns:
        the error of the gradient: the norm of what is missing, over that of the whole.

    Raises:
        TrainingError: the model has fewer layers, or no list of them.
    """
    from motley.training.memory.layers import decoder_layers

    layers = decoder_layers(model)
    if top > len(layers):
        raise TrainingError(f"the last {top} layers are to be trained, and the model has {len(layers)}")
    below = [weight for layer in layers[: len(layers) - top] for weight in layer.parameters() if weight.requires_grad]
    every = [weight for weight in model.parameters() if weight.requires_grad]
    loss().backward()
    missing, whole = (
        sum(float(each.grad.square().sum()) for each in some if each.grad is not None) for some in (below, every)
    )
    for weight in every:
        weight.grad = None
    for weight in below:
        weight.requires_grad_(False)
    return sqrt(missing / whole) if whole else 0.0
