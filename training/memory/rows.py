"""What computes every row for itself, some rows at a time: an MLP's activations, and logits, are large for all rows.

On the way back each stretch of rows is computed again, so that what autograd keeps is of one stretch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = 1024
"""Of a stretch of an MLP's input."""
LOGITS = 1 << 20
"""Of a stretch of rows with logits."""
_PROBE = 4
"""Rows by which it is found out whether a module computes each for itself."""


def in_stretches(compute: Callable[..., Tensor], length: int, *rows: Tensor) -> list[Tensor]:
    """What a function makes of each stretch of rows.

    Args:
        compute: it is given a stretch of each of `rows`, and is called again on the way back.
        length: of a stretch, in rows.
        rows: [N, ...] each, of as many rows.
    """
    made = []
    for stretch in zip(*(each.split(length) for each in rows), strict=True):
        made.append(
            checkpoint(compute, *stretch, use_reentrant=False) if torch.is_grad_enabled() else compute(*stretch)
        )
    return made


def split_rows(layer: nn.Module, width: int) -> None:
    """Have the parts of a layer that compute each row for itself, and have more than one matrix, do so in stretches.

    Args:
        width: of a row.
    """
    for part in layer.children():
        if sum(isinstance(each, nn.Linear) for each in part.modules()) > 1 and _is_by_rows(part, width):
            part.forward = _by_stretches(part.forward)


def _by_stretches(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def compute(hidden: Tensor) -> Tensor:
        rows = hidden.flatten(0, -2)
        if len(rows) <= ROWS:
            return forward(hidden)
        return torch.cat(in_stretches(lambda some: forward(some[None])[0], ROWS, rows)).view_as(hidden)

    return compute


def _is_by_rows(part: Any, width: int) -> bool:
    """Whether a part makes of a row what it makes of it in others' company, and of rows nothing but rows of a width."""
    trains = part.training
    part.eval()
    hidden = torch.linspace(-1, 1, _PROBE * width).sin().view(1, _PROBE, width)
    try:
        with torch.no_grad():
            whole = part(hidden)
            alone = [part(row) for row in hidden.split(1, 1)]
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it wants more than rows
        return False
    finally:
        part.train(trains)
    if not isinstance(whole, Tensor) or whole.shape != hidden.shape:
        return False
    return bool(torch.allclose(whole, torch.cat(alone, 1), rtol=1e-4, atol=1e-6))
