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
        vocabulary: V, the tokens that there are.
        rows: f32[P, K], if `waits`: the hidden states at these positions, of which `logits` may be asked.
        waits: it makes no logits by itself.
    """

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head: Any = head
        self.vocabulary = len(head.codes.packed) if isinstance(head, FrozenLinear) else len(head.weight)
        self.positions: Tensor | None = None
        self.tokens: Tensor | None = None
        self.rows: Tensor | None = None
        self.waits = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.positions is not None:
            hidden = hidden[self.positions][None]
        if self.waits:
            self.rows = hidden.flatten(0, -2)
            return hidden[:, :0]
        return self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits f32[..., U] of hidden states f32[..., K]."""
        if self.tokens is None:
            logits: Tensor = self.head(hidden)
            return logits
        if isinstance(self.head, FrozenLinear):
            return self.head.some(hidden, self.tokens)
        bias = getattr(self.head, "bias", None)
        return functional.linear(hidden, self.head.weight[self.tokens], None if bias is None else bias[self.tokens])


def narrow_head(model: nn.Module) -> NarrowHead:
    """Put a `NarrowHead` in the place of a model's head."""
    base: Any = model.get_base_model()
    head = NarrowHead(base.get_output_embeddings())
    base.set_output_embeddings(head)
    return head


def hands_logits_on(model: nn.Module, head: NarrowHead) -> bool:
    """Whether a model's logits are those of its head; others scale or bend them."""
    made: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, args, logits: made.append(logits))
    with torch.no_grad():
        told = model(input_ids=torch.tensor([[1, 2]]), use_cache=False).logits
    hook.remove()
    return len(made) == 1 and torch.equal(told, made[0])


class NearTokens:
    """For every token of a model the tokens whose embeddings are nearest by cosine, itself among them: a table
    i32[V, N] in a file, made once in chunks, of which what is looked up is read."""

    def __init__(self, model: nn.Module, count: int, file: Path) -> None:
        """
        Args:
            count: N, of which there are as many as tokens at most.

        Raises:
            TrainingError: the disk is full, or the file holds something else.
        """
        embedding: Any = model.get_base_model().get_input_embeddings()
        weight = embedding.codes.rows() if isinstance(embedding, FrozenEmbedding) else embedding.weight.detach()
        self._file, self._count = file, min(count, len(weight))
        if not file.exists():
            directions = functional.normalize(weight.float(), dim=1)
            with written_whole(file) as partial, partial.open("wb") as opened:
                for begin in range(0, len(weight), _CHUNK):
                    near = (directions[begin : begin + _CHUNK] @ directions.T).topk(self._count, dim=1).indices
                    opened.write(near.to(torch.int32).numpy().data)
        elif file.stat().st_size != len(weight) * self._row_bytes:
            raise TrainingError(f"{file} holds the near tokens of another model: remove it")

    def union(self, labels: Tensor) -> Tensor:
        """The tokens near to any of the labels i64[P], and they themselves, rising: i64[U]."""
        with self._file.open("rb") as opened:
            rows = []
            for label in labels.unique().tolist():
                opened.seek(label * self._row_bytes)
                rows.append(np.fromfile(opened, np.int32, self._count))
        return torch.unique(torch.cat([*map(torch.from_numpy, rows), labels]).long())

    @property
    def _row_bytes(self) -> int:
        return 4 * self._count
