"""A rank of a chain that is not the leader: it computes a run of layers for it, and trains their adapters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from motley.training.chain.crossing import receive, send
from motley.training.chain.cut import keep_only
from motley.training.errors import TrainingError
from motley.transport import Communicator

LEADER = 0


def serve_part(communicator: Communicator, model: nn.Module, part: range, weight_decay: float) -> None:
    """Compute and train some layers of a model with adapters, until the leader has had enough.

    Args:
        communicator: of the chain; the rank before this one has the layers before `part`.
        model: drawn from the same seed as the leader's; all but `part` of it is freed.

    Raises:
        motley.transport.TransportError: another rank is gone.
        TrainingError: the leader asks for what there is not.
    """
    _Part(communicator, keep_only(model, part), weight_decay).serve()


class _Part:
    def __init__(self, communicator: Communicator, layers: list[nn.Module], weight_decay: float) -> None:
        self._communicator, self._layers = communicator, layers
        rank, size = communicator.rank, communicator.size
        self._before, self._after = rank - 1, (rank + 1) % size
        self._trained = trained_of(layers)
        self._optimiser = torch.optim.AdamW(self._trained, weight_decay=weight_decay)
        self._under_way: tuple[Tensor, Tensor] | None = None
        """What came in and what went out, until the gradient of the latter comes."""

    def serve(self) -> None:
        while True:
            asked = receive(self._communicator, LEADER)
            kind = asked["do"]
            if kind == "forward":
                self._forward(asked)
            elif kind == "backward":
                self._backward()
            elif kind == "norm":
                send(self._communicator, squared_norm(self._trained), LEADER)
            elif kind == "step":
                walk(self._optimiser, self._trained, asked["rate"], asked["scale"])
            elif kind == "adapters":
                send(self._communicator, [weight.detach() for weight in self._trained], LEADER)
            elif kind == "end":
                self._communicator.flush()
                return
            else:
                raise TrainingError(f"the leader asks for {kind!r}, which no part does")

    def _forward(self, asked: dict[str, Any]) -> None:
        for layer in self._layers:
            layer.train(asked["trains"])
        torch.manual_seed(asked["noise"])
        hidden: Tensor = receive(self._communicator, self._before)
        with torch.set_grad_enabled(asked["trains"]):
            out = hidden.requires_grad_(asked["trains"])
            for layer, (args, kwargs) in zip(self._layers, asked["calls"], strict=True):
                told = layer(out, *args, **kwargs)
                out = told[0] if isinstance(told, tuple) else told
        self._under_way = (hidden, out) if asked["trains"] else None
        send(self._communicator, out, self._after)

    def _backward(self) -> None:
        if self._under_way is None:
            raise TrainingError("the leader asks for gradients of nothing")
        (hidden, out), self._under_way = self._under_way, None
        torch.autograd.backward(out, receive(self._communicator, self._after))
        send(self._communicator, hidden.grad, self._before)


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
