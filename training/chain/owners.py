"""Several owners of one chain: each has examples of its own and the leader's layers; those elsewhere are one for all.

*In turn* each leads for some steps, and what it has trained of its layers moves on to the next one; what is frozen,
each has. *At once* each computes a part of every step from its own examples, and all go along the sum of everybody's
gradients, so that their layers stay equal. No example moves: owners tell each other how many tokens they learn, losses,
gradients, and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from motley.training.chain.crossing import Chain, receive, send
from motley.training.chain.leader import (
    Leader,
    Record,
    add_gradients,
    examples_of,
    go_a_step,
    learnt_in,
    no_number,
)
from motley.training.examples import Example
from motley.training.files import Point
from motley.training.settings import Settings, rate_at

MAIN = 0
"""The owner whose training it is: it keeps what was learnt, and all ranks follow it at the beginning and at the end."""


class Owners:
    """The owners, as one of them sees them."""

    def __init__(self, mesh: Chain, ranks: Sequence[int], leader: Leader, model: nn.Module) -> None:
        """
        Args:
            mesh: in which owners reach each other.
            ranks: theirs in the mesh; all owners have them in the same order.
            leader: this owner's end of the chain.
        """
        self._mesh, self._ranks, self._leader, self._model = mesh, list(ranks), leader, model
        self._own = self._ranks.index(mesh.rank)

    def lead_in_turn(
        self, learnt: Sequence[Example], settings: Settings, turn: int, record: Record, begin_at: int = 0
    ) -> None:
        """Train: one owner after the other leads for `turn` steps. An evaluation that is due while another one leads
        than the main owner follows the first step after which that leads again.

        Args:
            record: the main owner is told of all steps, the others of their own.

        Raises:
            TrainingError: losses are no numbers any more.
            motley.transport.TransportError: a rank is gone.
        """
        leads, seen = MAIN, last_led(begin_at, turn, len(self._ranks))
        for step in range(begin_at, settings.steps):
            leads = self._moved(leads, step // turn % len(self._ranks))
            done, due, after = step + 1, record.is_due(step + 1, settings), leads
            if self._own == leads:
                own = step // (turn * len(self._ranks)) * turn + step % turn
                point = go_a_step(self._leader, self._model, learnt, settings, step, own)
                if leads != MAIN:
                    record.told(point)
                    send(self._mesh, [vars(point), self._leader.state() if due else None], self._ranks[MAIN])
            elif self._own == MAIN:
                told, state = receive(self._mesh, self._ranks[leads])
                point = Point(**told)
            if done == settings.steps:
                after = self._moved(leads, MAIN)
            if self._own == MAIN:
                record.told(record.evaluated(point, settings, seen) if after == MAIN else point)
                seen = done if after == MAIN else seen
                if due:
                    record.kept(done, self._leader.state() if leads == MAIN else state)
            leads = after

    def _moved(self, before: int, leads: int) -> int:
        """Have what one owner has trained move on to the next, which leads then."""
        if before != leads and self._own == before:
            self._leader.hand_on(self._ranks[leads])
            send(self._mesh, self._leader.own_state, self._ranks[leads])
        elif before != leads and self._own == leads:
            self._leader.own_state = receive(self._mesh, self._ranks[before])
        return leads

    def lead_at_once(self, learnt: Sequence[Example], settings: Settings, record: Record, begin_at: int = 0) -> None:
        """Train: every step learns from a step's examples of each owner.

        Args:
            record: all owners are told of all steps; the main one keeps and evaluates.

        Raises:
            TrainingError: losses are no numbers any more.
            motley.transport.TransportError: a rank is gone.
        """
        leader, main = self._leader, self._own == MAIN
        if main:
            for rank in self._ranks[1:]:
                send(self._mesh, leader.own_state, rank)
        else:
            leader.own_state = receive(self._mesh, self._ranks[MAIN])
        for step in range(begin_at, settings.steps):
            chosen = examples_of(learnt, settings, step)
            told = self._all_of([learnt_in(chosen), sum(len(example.tokens) for example in chosen)])
            total = add_gradients(self._model, chosen, settings, step, sum(tokens for tokens, _ in told))
            leader.hand_on(self._ranks[(self._own + 1) % len(self._ranks)])
            every = self._all_of([total, leader.gradients])
            total, rate = sum(each for each, _ in every), rate_at(step, settings)
            leader.gradients = [_sum(some) for some in zip(*(gradients for _, gradients in every), strict=True)]
            if not isfinite(total):
                raise no_number(step)
            norm = self._norm(rate, settings.clip)
            if not isfinite(norm):
                raise no_number(step)
            point = Point(step + 1, total, rate, tokens=sum(read for _, read in told))
            record.told(record.evaluated(point, settings) if main else point)
            if main and record.is_due(step + 1, settings):
                record.kept(step + 1, leader.state())

    def _norm(self, rate: float, clip: float) -> float:
        """Have all ranks go a step along the gradients; returns their norm, which is no number if nobody went."""
        if self._own == MAIN:
            norm = self._leader.step(rate, clip)
            for rank in self._ranks[1:]:
                send(self._mesh, norm, rank)
            return norm
        told: float = receive(self._mesh, self._ranks[MAIN])
        if isfinite(told):
            self._leader.walk(rate, clip, told)
        return told

    def _all_of(self, value: Any) -> list[Any]:
        """What each owner has for all of them, in their order."""
        for rank in self._ranks:
            if rank != self._mesh.rank:
                send(self._mesh, value, rank)
        return [value if rank == self._mesh.rank else receive(self._mesh, rank) for rank in self._ranks]


def last_led(done: int, turn: int, owners: int) -> int:
    """Of `done` steps in turn, how many there were when the main owner had led one last; 0: it has led none."""
    return next((step + 1 for step in reversed(range(done)) if step // turn % owners == MAIN), 0)


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of some owners' gradients, in their order; None: nobody has one."""
    there = [each for each in gradients if each is not None]
    return torch.stack(there).sum(0) if there else None
