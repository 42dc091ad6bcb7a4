"""A rank of a chain that is not the leader: it computes a run of layers for it, and trains their adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from motley.protocol import LEADER
from motley.training.chain.crossing import InOrder, receive, send
from motley.training.chain.cut import keep_only
from motley.training.chain.state import names_of, restore, state_of
from motley.training.errors import TrainingError


def serve_part(
    chain: InOrder,
    model: nn.Module,
    part: range,
    weight_decay: float,
    stepped: Callable[[float], None] = lambda rate: None,
) -> None:
    """Compute and train some layers of a model with adapters, until the leader, or the last of several, has had enough.

    Args:
        chain: the rank before this one has the layers before `part`.
        model: drawn from the same seed as the leader's; all but `part` of it is freed.
        stepped: called with the rate of every step.

    Raises:
        motley.transport.TransportError: another rank is gone.
        TrainingError: the leader asks for what there is not.
    """
    _Part(chain, model, keep_only(model, part), weight_decay, stepped).serve()


class _Part:
    def __init__(
        self,
        chain: InOrder,
        model: nn.Module,
        layers: list[nn.Module],
        weight_decay: float,
        stepped: Callable[[float], None],
    ) -> None:
        self._chain, self._layers, self._stepped = chain, layers, stepped
        rank, size = chain.rank, chain.size
        self._before, self._after = rank - 1, (rank + 1) % size
        self._trained = trained_of(layers)
        self._names = names_of(model, self._trained)
        self._optimiser = torch.optim.AdamW(self._trained, weight_decay=weight_decay)
        self._under_way: tuple[Tensor, Tensor] | None = None
        """What came in and what went out, until the gradient of the latter comes."""

    def serve(self) -> None:
        while True:
            asked = receive(self._chain, LEADER)
            kind = asked["do"]
            if kind == "forward":
                self._forward(asked)
            elif kind == "backward":
                self._backward()
            elif kind == "norm":
                send(self._chain, squared_norm(self._trained), LEADER)
            elif kind == "step":
                walk(self._optimiser, self._trained, asked["rate"], asked["scale"])
                self._stepped(asked["rate"])
            elif kind == "state":
                send(self._chain, state_of(self._names, self._trained, self._optimiser), LEADER)
            elif kind == "restore":
                restore(asked["state"], self._names, self._trained, self._optimiser)
            elif kind == "follow":
                self._chain.follow(asked["rank"])
            elif kind == "end":
                self._chain.flush()
                return
            else:
                raise TrainingError(f"the leader asks for {kind!r}, which no part does")

    def _forward(self, asked: dict[str, Any]) -> None:
        for layer in self._layers:
            layer.train(asked["trains"])
        torch.manual_seed(asked["noise"])
        hidden: Tensor = receive(self._chain, self._before)
        with torch.set_grad_enabled(asked["trains"]):
            out = hidden.requires_grad_(asked["trains"])
            for layer, (args, kwargs) in zip(self._layers, asked["calls"], strict=True):
                told = layer(out, *args, **kwargs)
                out = told[0] if isinstance(told, tuple) else told
        self._under_way = (hidden, out) if asked["trains"] else None
        send(self._chain, out, self._after)

    def _backward(self) -> None:
        if self._under_way is None:
            raise TrainingError("the leader asks for gradients of nothing")
        (hidden, out), self._under_way = self._under_way, None
        torch.autograd.backward(out, receive(self._chain, self._after))
        send(self._chain, hidden.grad, self._before)


def trained_of(modules: list[nn.Module]) -> list[Tensor]:
    """The weights of modules that are trained, in order."""
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]


def squared_norm(weights: list[Tensor]) -> float:
    """The sum of the squares of some weights' gradients."""
    return float(sum(weight.grad.double().square().sum() for weight in weights if weight.grad is not None))


def walk(optimiser: torch.optim.Optimizer, weights: list[Tensor], rate: float, scale: float) -> None:
    """Scale the gradients, go a step along them, and forget them."""
    for weight in weights:
        if weight.grad is not None:
            weight.grad.mul_(scale)
    for group in optimiser.param_groups:
        group["lr"] = rate
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
