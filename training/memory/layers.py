"""One decoder layer in memory at a time: a node whose input and weights wait on disk, computed again on the way back.
Of a layer that is computed again, an MLP is so once more, some rows at a time (`motley.training.memory.rows`).

What comes after the last layer (its norm, the head, the loss) is never computed again, but for logits by rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from motley.training.errors import TrainingError
from motley.training.files import cannot_write
from motley.training.memory.rows import split_rows


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """A model's layers: the list of modules that has most of its weights.

    Raises:
        TrainingError: it has no list of modules.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise TrainingError(f"{type(model).__name__} has no list of layers, so they cannot be computed one by one")
    return max(lists, key=lambda each: sum(weight.numel() for weight in (*each.parameters(), *each.buffers())))


def remove_files(folder: Path) -> None:
    """Remove what `one_by_one`, and steps that died, have left in a folder."""
    for file in folder.glob("layer-*"):
        file.unlink()


def one_by_one(model: nn.Module, folder: Path) -> None:
    """Make a model's layers nodes, whose weights move to files in `folder` now.

    Raises:
        TrainingError: the model has no layers, or the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    width = _width_of(model)
    for number, layer in enumerate(decoder_layers(model)):
        if width is not None:
            split_rows(layer, width)
        node = _Node(layer, folder / f"layer-{number}")
        layer.forward = node.forward


def _width_of(model: Any) -> int | None:
    """The length of a hidden state; None: the model's config does not say."""
    width = getattr(model.config, "hidden_size", None)
    return width if isinstance(width, int) else None


class _Node:
    """A layer whose frozen weights are in a file but while it computes."""

    def __init__(self, layer: nn.Module, place: Path) -> None:
        self._compute = layer.forward
        weights = (*layer.named_parameters(), *layer.named_buffers())
        self._frozen = [each for name, each in weights if not each.requires_grad and "lora_" not in name]
        self._trains = any(each.requires_grad for each in layer.parameters())
        self._shapes = [(each.shape, each.dtype) for each in self._frozen]
        self._weights, self._inputs = place.with_suffix(".weights"), place
        self._waiting = 0
        """How many inputs wait for their way back: more than one where a layer is used more than once."""
        self._anchor = torch.zeros(0, requires_grad=True)
        """Has autograd come back here, although the first layer's input needs no gradient."""
        _write(self._weights, self._frozen)
        self._free()

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer; see its own forward."""
        if not torch.is_grad_enabled() or not (self._trains or hidden.requires_grad):
            with self.loaded():
                return self._compute(hidden, *args, **kwargs)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.requires_grad:
                raise TrainingError("layers cannot be computed one by one: they share something that is trained")
        others: list[Any] = []
        out = _Recomputed.apply(self, hidden, self._anchor, args, kwargs, others)
        return (out, *others[0]) if others else out

    def compute(self, hidden: Tensor, args: Any, kwargs: Any) -> tuple[Tensor, tuple[Any, ...] | None]:
        """The layer's hidden states, and what else it returns; None: it returns the former alone."""
        with self.loaded():
            out = self._compute(hidden, *args, **kwargs)
        return (out[0], out[1:]) if isinstance(out, tuple) else (out, None)

    def shelve(self, hidden: Tensor) -> Path:
        """Write an input to disk."""
        self._waiting += 1
        place = self._inputs.with_suffix(f".{self._waiting}")
        _write(place, [hidden])
        return place

    def take(self, place: Path, like: tuple[torch.Size, torch.dtype]) -> Tensor:
        """Read an input again, and remove it."""
        (hidden,) = _read(place, [like])
        place.unlink()
        self._waiting -= 1
        return hidden

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Have the weights in memory while the context lasts."""
        if not self._frozen or self._frozen[0].numel():  # on the way back they are there already
            yield
            return
        for weight, value in zip(self._frozen, _read(self._weights, self._shapes), strict=True):
            weight.data = value
        try:
            yield
        finally:
            self._free()

    def _free(self) -> None:
        for weight in self._frozen:
            weight.data = torch.empty(0, dtype=weight.dtype)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, node: _Node, hidden: Tensor, anchor: Tensor, args: Any, kwargs: Any, others: list[Any]
    ) -> Tensor:
        ctx.node, ctx.args, ctx.kwargs = node, args, kwargs
        ctx.like = hidden.shape, hidden.dtype
        ctx.needs = hidden.requires_grad
        ctx.noise = torch.get_rng_state()
        ctx.place = node.shelve(hidden)
        out, rest = node.compute(hidden, args, kwargs)
        if rest is not None:
            others.append(rest)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        node: _Node = ctx.node
        hidden = node.take(ctx.place, ctx.like).requires_grad_(ctx.needs)
        after = torch.get_rng_state()
        torch.set_rng_state(ctx.noise)
        with node.loaded(), torch.enable_grad():
            out, _ = node.compute(hidden, ctx.args, ctx.kwargs)
            torch.autograd.backward(out, gradient)
        torch.set_rng_state(after)
        return None, hidden.grad, None, None, None, None


def _write(place: Path, tensors: list[Tensor]) -> None:
    try:
        with place.open("wb") as file:
            for tensor in tensors:
                file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    except OSError as error:
        place.unlink(missing_ok=True)
        raise cannot_write(place, error) from error


def _read(place: Path, likes: list[tuple[torch.Size, torch.dtype]]) -> list[Tensor]:
    tensors = []
    with place.open("rb") as file:
        for shape, dtype in likes:
            values = np.fromfile(file, np.uint8, shape.numel() * dtype.itemsize)
            tensors.append(torch.from_numpy(values).view(dtype).reshape(shape))
    return tensors
