"""Logits only where labels are, and for those tokens only that are near to the ones that are learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from motley.training.errors import TrainingError
from motley.training.files import written_whole
from motley.training.memory.quantised import FrozenEmbedding, FrozenLinear

_CHUNK = 256
"""Rows of the table of near tokens that are made at a time."""


class NarrowHead(nn.Module):
    """A model's head, asked for some positions and some tokens only. What the model does to each logit stays as it is.

    Attributes:
        positions: bool[B, T]: where logits are wanted; they come as f32[1, P, U]. None: everywhere, f32[B, T, U].
        tokens: i64[U]: which logits are wanted, rising. None: all.
    """

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.positions: Tensor | None = None
        self.tokens: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.positions is not None:
            hidden = hidden[self.positions][None]
        if self.tokens is None:
            logits: Tensor = self.head(hidden)
            return logits
        if isinstance(self.head, FrozenLinear):
            return functional.linear(hidden, *self.head.rows(self.tokens))
        bias = getattr(self.head, "bias", None)
        return functional.linear(hidden, self.head.weight[self.tokens], None if bias is None else bias[self.tokens])


def narrow_head(model: nn.Module) -> NarrowHead:
    """Put a `NarrowHead` in the place of a model's head."""
    base: Any = model.get_base_model()
    head = NarrowHead(base.get_output_embeddings())
    base.set_output_embeddings(head)
    return head


def near_tokens(model: nn.Module, count: int, file: Path) -> Tensor:
    """For every token the tokens whose embeddings are nearest by cosine, itself among them: i32[V, count].

    Read from `file` where it was kept there; else made in chunks, and kept.

    Raises:
        TrainingError: the disk is full, or the file holds something else.
    """
    embedding: Any = model.get_base_model().get_input_embeddings()
    weight = embedding.codes.rows() if isinstance(embedding, FrozenEmbedding) else embedding.weight.detach()
    count = min(count, len(weight))
    if file.exists():
        kept = torch.from_numpy(np.load(file))
        if kept.shape != (len(weight), count):
            raise TrainingError(f"{file} holds the near tokens of another model: remove it")
        return kept
    directions = functional.normalize(weight.float(), dim=1)
    table = torch.empty(len(weight), count, dtype=torch.int32)
    for begin in range(0, len(weight), _CHUNK):
        chosen = slice(begin, begin + _CHUNK)
        table[chosen] = (directions[chosen] @ directions.T).topk(count, dim=1).indices.to(torch.int32)
    with written_whole(file) as partial, partial.open("wb") as opened:
        np.save(opened, table.numpy())
    return table


def union_of(table: Tensor, labels: Tensor) -> Tensor:
    """The tokens near to any of the labels i64[P], and they themselves, rising: i64[U]."""
    return torch.unique(torch.cat([table[labels.unique()].flatten().long(), labels]))
