"""A model with adapters whose training spares memory in some of the ways of `motley.training.memory`, and its loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from motley.training.examples import IGNORED, Example, padded
from motley.training.memory.freeing import give_back_what_is_free
from motley.training.memory.head import NarrowHead, NearTokens, hands_logits_on, narrow_head
from motley.training.memory.layers import one_by_one, remove_files
from motley.training.memory.quantised import quantise_base
from motley.training.memory.rows import LOGITS, in_stretches
from motley.training.memory.switches import INT4, LABELS, LAYERS, NEAR


class Spared:
    """What `spare` has made of a model.

    Attributes:
        folder: where things wait on disk.
    """

    def __init__(
        self, model: nn.Module, head: NarrowHead, near: NearTokens | None, labels_only: bool, folder: Path
    ) -> None:
        self._model, self._head, self._near, self._labels_only = model, head, near, labels_only
        self._by_stretches = labels_only and hands_logits_on(model, head)
        self.folder = folder

    def close(self) -> None:
        """Remove what has waited on disk; the model cannot be used any more. The table of near tokens is kept."""
        remove_files(self.folder)

    def summed_loss(self, batch: Sequence[Example]) -> Tensor:
        """As `motley.training.training.summed_loss`; the softmax is over near tokens in training only."""
        tokens, labels = map(torch.from_numpy, padded(batch))
        learnt = labels != IGNORED
        wanted = labels[learnt]
        chosen = self._near.union(wanted) if self._near is not None and self._model.training else None
        targets = wanted if chosen is None else torch.searchsorted(chosen, wanted)
        head = self._head
        head.positions, head.tokens, head.waits = learnt if self._labels_only else None, chosen, self._by_stretches
        logits = self._model(input_ids=tokens, use_cache=False).logits
        if not self._by_stretches:
            return _negative_log_likelihood(logits.flatten(0, -2) if self._labels_only else logits[learnt], targets)
        rows, head.rows = head.rows, None
        assert rows is not None, "the model has asked its head"
        length = max(1, LOGITS // (head.vocabulary if chosen is None else len(chosen)))

        def loss_of(some: Tensor, learnt_there: Tensor) -> Tensor:
            return _negative_log_likelihood(head.logits(some), learnt_there)

        return torch.stack(in_stretches(loss_of, length, rows, targets)).sum()


def _negative_log_likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="sum")


def spare(model: nn.Module, switches: Collection[str], near: int, folder: Path) -> Spared:
    """Change a model with adapters so that its training takes less memory.

    Args:
        switches: of `SWITCHES`.
        near: how many tokens are near to each.
        folder: for what waits on disk.

    Raises:
        TrainingError: the model has no layers, or the disk is full.
    """
    give_back_what_is_free()
    if INT4 in switches:
        quantise_base(model)
    table = NearTokens(model, near, folder / f"near-{near}.i32") if NEAR in switches else None
    if LAYERS in switches:
        one_by_one(model, folder)
    return Spared(model, narrow_head(model), table, LABELS in switches, folder)
