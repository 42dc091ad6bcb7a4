"""The leader of a chain: it runs the model's own code, and what its layers elsewhere are handed crosses to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from motley.training.chain.crossing import Chain, receive, send
from motley.training.chain.cut import forget
from motley.training.chain.part import squared_norm, trained_of, walk
from motley.training.chain.state import State, names_of, restore, state_of
from motley.training.errors import TrainingError
from motley.training.examples import IGNORED, Example, batch_of
from motley.training.files import Point
from motley.training.memory.layers import decoder_layers
from motley.training.settings import Settings, rate_at
from motley.training.training import summed_loss


class Leader:
    """Rank 0 of a chain. Its model computes as ever, forward and backward, with some of its layers elsewhere."""

    def __init__(self, chain: Chain, model: nn.Module, parts: Sequence[range], weight_decay: float) -> None:
        """
        Args:
            model: with adapters, drawn from the same seed at every rank; layers of other ranks are freed.
            parts: the layers of each rank, see `motley.training.chain.cut.cut`. Those after the last part are the
                leader's, too.

        Raises:
            TrainingError: the model has no list of layers.
        """
        self._chain, self._model, self._parts = chain, model, parts
        layers = list(decoder_layers(model))
        self._elsewhere = layers[parts[0].stop : parts[-1].stop]
        self._widths = _widths(model, self._elsewhere)
        adapters = [trained_of(layers[part.start : part.stop]) for part in parts[1:]]
        self._named = [dict(zip(names_of(model, weights), weights, strict=True)) for weights in adapters]
        forget(self._elsewhere)
        self._trained = trained_of([model])
        self._names = names_of(model, self._trained)
        self._optimiser = torch.optim.AdamW(self._trained, weight_decay=weight_decay)
        self._anchor = torch.zeros(0, requires_grad=True)
        self._calls: list[tuple[Any, Any]] = []
        self._hidden: Tensor | None = None
        for index, layer in enumerate(self._elsewhere):
            layer.forward = self._stand_in(index)

    def step(self, rate: float, clip: float) -> float:
        """Go a step at all ranks along the gradients, whose norm over all of them is clipped; returns that norm. If it
        is no number, nobody goes."""
        self._tell_all({"do": "norm"})
        norm = sqrt(squared_norm(self._trained) + sum(receive(self._chain, rank) for rank in self._others))
        if not isfinite(norm):
            return norm
        self._tell_all({"do": "step", "rate": rate, "scale": _scale(clip, norm)})
        self.walk(rate, clip, norm)
        return norm

    def walk(self, rate: float, clip: float, norm: float) -> None:
        """Go a step here alone, along gradients of which all ranks together have this norm."""
        walk(self._optimiser, self._trained, rate, _scale(clip, norm))

    def hand_on(self, to: int) -> None:
        """Have the other ranks follow another leader from now on: a rank of the mesh."""
        self._tell_all({"do": "follow", "rank": to})

    @property
    def gradients(self) -> list[Tensor | None]:
        """Of the weights that are trained here, in an order that is the same for leaders with the same layers."""
        return [weight.grad for weight in self._trained]

    @gradients.setter
    def gradients(self, gradients: Sequence[Tensor | None]) -> None:
        for weight, gradient in zip(self._trained, gradients, strict=True):
            weight.grad = gradient

    @property
    def own_state(self) -> State:
        """What is learnt here alone."""
        return state_of(self._names, self._trained, self._optimiser)

    @own_state.setter
    def own_state(self, state: State) -> None:
        restore(state, self._names, self._trained, self._optimiser)

    def state(self) -> State:
        """What all ranks have learnt so far, from which another chain can go on."""
        self._tell_all({"do": "state"})
        told = self.own_state
        for rank in self._others:
            told |= receive(self._chain, rank)
        return told

    def restore(self, state: State) -> None:
        """Have all ranks go on from what `state` has told, of a chain that may have been cut otherwise.

        Raises:
            TrainingError: it is of another training.
        """
        self.own_state = state
        for rank, named in zip(self._others, self._named, strict=True):
            own = {name: state[name] for name in named if name in state}
            send(self._chain, {"do": "restore", "state": own}, rank)

    def end(self) -> None:
        """Fetch the adapters of all ranks into the model, which can be saved then, and dismiss the others."""
        state = self.state()
        for named in self._named:
            for name, weight in named.items():
                weight.data = state[name][0]
        self._tell_all({"do": "end"})
        self._chain.flush()

    @property
    def _others(self) -> range:
        return range(1, self._chain.size)

    def _tell_all(self, what: dict[str, Any]) -> None:
        for rank in self._others:
            send(self._chain, what, rank)

    def _stand_in(self, index: int) -> Callable[..., Any]:
        """What a layer does that is elsewhere: it notes what it is handed; the last one has all of them computed."""

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if index == 0:
                self._calls, self._hidden = [], hidden
            elif hidden is not self._hidden:
                raise TrainingError("this model changes what goes from layer to layer: it cannot be cut between them")
            self._calls.append((args, kwargs))
            if index == len(self._elsewhere) - 1:
                trains = torch.is_grad_enabled()
                hidden = _Crossing.apply(self, hidden, self._anchor) if trains else self.cross(hidden, trains=False)
            width = self._widths[index]
            return hidden if width is None else (hidden, *[None] * (width - 1))

        return forward

    def cross(self, hidden: Tensor, *, trains: bool) -> Tensor:
        """Have the layers that are elsewhere computed for hidden states, which come back from the last rank."""
        noise = int(torch.randint(1 << 31, ()))
        first = self._parts[1].start
        for rank, part in enumerate(self._parts[1:], 1):
            calls = self._calls[part.start - first : part.stop - first]
            send(self._chain, {"do": "forward", "calls": calls, "trains": trains, "noise": noise + rank}, rank)
        send(self._chain, hidden, 1)
        came: Tensor = receive(self._chain, self._chain.size - 1)
        return came

    def cross_back(self, gradient: Tensor) -> Tensor:
        """The gradient of what crossed, given that of what came back."""
        self._tell_all({"do": "backward"})
        send(self._chain, gradient, self._chain.size - 1)
        came: Tensor = receive(self._chain, 1)
        return came


class _Crossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leader: Leader, hidden: Tensor, anchor: Tensor) -> Tensor:
        ctx.leader = leader
        return leader.cross(hidden, trains=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        return None, ctx.leader.cross_back(gradient), None


def _widths(model: nn.Module, layers: Sequence[nn.Module]) -> list[int | None]:
    """How many values each layer returns; None: hidden states alone, in no tuple."""
    told: list[int | None] = []

    def hear(layer: nn.Module, args: Any, out: Any) -> None:
        told.append(len(out) if isinstance(out, tuple) else None)

    hooks = [layer.register_forward_hook(hear) for layer in layers]
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return told


def _scale(clip: float, norm: float) -> float:
    """By what a gradient of some norm is multiplied, so that it is clipped."""
    return min(1.0, clip / (norm + 1e-6))


@dataclass(frozen=True)
class Record:
    """What becomes of a training while it goes on.

    Attributes:
        told: called with the point of every step.
        kept: called every `keep_every` steps, and after the last one, with how many were done and what was learnt.
        evaluate: the loss of what is held out, by the chain; None: nothing is.
    """

    told: Callable[[Point], None] = lambda point: None
    kept: Callable[[int, State], None] = lambda done, state: None
    keep_every: int = 20
    evaluate: Callable[[], float] | None = None

    def evaluated(self, point: Point, settings: Settings, since: int | None = None) -> Point:
        """A step's point, with the loss of what is held out where that is due.

        Args:
            since: the latest step before it after which it could have been evaluated, if that was due; None: the one
                before it.
        """
        every, before = settings.evaluate_every, point.step - 1 if since is None else since
        due = point.step == settings.steps or (every and point.step // every > before // every)
        if self.evaluate is None or not due:
            return point
        return replace(point, held_out=self.evaluate())

    def is_due(self, done: int, settings: Settings) -> bool:
        """Whether what was learnt is to be kept after so many steps."""
        return done % self.keep_every == 0 or done == settings.steps


def lead(
    leader: Leader, model: nn.Module, learnt: Sequence[Example], settings: Settings, record: Record, begin_at: int = 0
) -> None:
    """Train over a chain as `motley.training.training.train` does in one process.

    Args:
        begin_at: steps that were done before. Who has led all of them calls `Leader.end`.

    Raises:
        TrainingError: losses are no numbers any more.
        motley.transport.TransportError: a rank is gone.
    """
    for step in range(begin_at, settings.steps):
        point = go_a_step(leader, model, learnt, settings, step, step)
        record.told(record.evaluated(point, settings))
        if record.is_due(point.step, settings):
            record.kept(point.step, leader.state())


def go_a_step(
    leader: Leader, model: nn.Module, learnt: Sequence[Example], settings: Settings, step: int, own: int
) -> Point:
    """Go a step of a training over a chain.

    Args:
        own: how many steps have learnt from these examples before.

    Raises:
        TrainingError: losses are no numbers any more.
    """
    chosen = examples_of(learnt, settings, own)
    total = add_gradients(model, chosen, settings, step, learnt_in(chosen))
    rate = rate_at(step, settings)
    if not isfinite(total) or not isfinite(leader.step(rate, settings.clip)):
        raise no_number(step)
    return Point(step + 1, total, rate, tokens=sum(len(example.tokens) for example in chosen))


def examples_of(learnt: Sequence[Example], settings: Settings, step: int) -> list[Example]:
    """The examples of a step."""
    size = settings.batch * settings.accumulate
    return [learnt[index] for index in batch_of(step, size, len(learnt), settings.seed)]


def learnt_in(examples: Sequence[Example]) -> int:
    """How many tokens of some examples are learnt."""
    return sum(int((example.labels != IGNORED).sum()) for example in examples)


def add_gradients(model: nn.Module, chosen: Sequence[Example], settings: Settings, step: int, tokens: int) -> float:
    """Add the gradients of some examples' part of a step's loss, the mean over so many tokens; returns that part."""
    model.train()
    torch.manual_seed((settings.seed << 32) ^ step)
    total = 0.0
    for begin in range(0, len(chosen), settings.batch):
        loss = summed_loss(model, chosen[begin : begin + settings.batch]) / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def no_number(step: int) -> TrainingError:
    """What is wrong where losses are no numbers any more."""
    return TrainingError(f"step {step + 1}: the loss is no number any more; try a lower rate")
