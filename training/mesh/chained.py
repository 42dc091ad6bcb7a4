"""Workers of a chain: each has some of a model's layers, the owner's the first ones, the data and the labels.

When a rank is gone all of them end; the job begins anew, on the nodes that are left, from the owner's last checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from motley.training.base import load_base, save_adapter, with_adapters
from motley.training.chain.crossing import receive, send
from motley.training.chain.cut import cut
from motley.training.chain.leader import Leader, lead
from motley.training.chain.part import serve_part
from motley.training.chain.state import State
from motley.training.dealing import RUNTIME_BYTES
from motley.training.errors import TrainingError
from motley.training.files import CURVE, Checkpoints, Curve, Point, written_whole
from motley.training.memory.layers import decoder_layers
from motley.training.mesh.order import LEADER, WorkerOrder
from motley.training.mesh.pipe import Pipe
from motley.training.mesh.ticket import Ticket, read_settings
from motley.training.placement import assign
from motley.training.settings import Settings
from motley.training.training import config_digest, mean_loss, perplexity_of, read_data
from motley.transport import Communicator, connect_mesh

CONNECT_S = 120.0
PEERS_S = 6 * 3600.0
"""The others may have to fetch the model, or to wait for their devices."""
LOOK_S = 0.2
OWN = "adapter-is-own"
"""A file in the job's folder, once an adapter that stands in the ticket's `out` can only be the job's own."""


class InOrder:
    """The ranks of a mesh, numbered along a chain: a `motley.training.chain.crossing.Chain`."""

    def __init__(self, mesh: Communicator, order: list[int]) -> None:
        """
        Args:
            order: the rank in the mesh of each rank of the chain.
        """
        self._mesh, self._order = mesh, order
        self.rank, self.size = order.index(mesh.rank), len(order)

    def send(self, data: bytes | memoryview, to: int, /) -> None:
        self._mesh.send(data, self._order[to])

    def recv(self, source: int, timeout: float, /) -> bytes:
        return self._mesh.recv(self._order[source], timeout)

    def flush(self) -> None:
        self._mesh.flush()


def take_part(order: WorkerOrder, pipe: Pipe) -> None:
    """Be a rank of a chain, until the training is done.

    Raises:
        TrainingError: the model, the data, the folder or the disk is not as it must be.
        motley.transport.TransportError: another rank is gone.
    """
    folder, ticket = order.model_folder, order.ticket
    data = None
    if ticket is not None:
        _claim(ticket.out / "adapter", order.folder / OWN)
        data = read_data(folder, ticket.data, ticket.settings, held_out=ticket.held_out, template=ticket.template)
    with closing(order.listener()) as listener:
        pipe.say(listening=listener.port)
        peers = _peers(pipe)
        addresses = [each["address"] for each in sorted(peers, key=lambda each: int(each["member"]))]
        with connect_mesh(listener, order.membership, addresses, CONNECT_S, security=order.security) as mesh:
            if ticket is None or data is None:
                _join(order, pipe, mesh)
            else:
                _Led(order, ticket, pipe, mesh, peers).train(data.learnt, data.evaluated)


def _claim(adapter: Path, mark: Path) -> None:
    """See that the job may write its adapter; note that it may, so that it can begin anew after it was written.

    Raises:
        TrainingError: there is one of somebody else, or the disk is full.
    """
    if mark.exists():
        return
    if adapter.exists():
        raise TrainingError(f"{adapter} exists already: choose another --out")
    with written_whole(mark) as partial:
        partial.touch()


def _peers(pipe: Pipe) -> list[dict[str, Any]]:
    until = time.monotonic() + PEERS_S
    while time.monotonic() < until:
        for told in pipe.told():
            peers: list[dict[str, Any]] = told["peers"]
            return peers
        time.sleep(LOOK_S)
    raise TrainingError(f"the other nodes were not there within {PEERS_S / 3600:.0f} hours")


def _join(order: WorkerOrder, pipe: Pipe, mesh: Communicator) -> None:
    """Compute some layers for the leader."""
    plan = receive(mesh, LEADER)
    digest = config_digest(order.model_folder)
    send(mesh, digest, LEADER)
    settings = read_settings(plan["settings"])
    model = _model(order, settings)
    steps = plan["begin_at"]

    def stepped(rate: float) -> None:
        nonlocal steps
        steps += 1
        pipe.progress(Point(steps, rate=rate), settings.steps)

    serve_part(InOrder(mesh, plan["order"]), model, range(*plan["part"]), settings.weight_decay, stepped)
    pipe.say(done="{}")


def _model(order: WorkerOrder, settings: Settings) -> nn.Module:
    """The model with adapters, which are the same at every rank."""
    base = load_base(order.model_folder)
    torch.manual_seed(settings.seed)
    return with_adapters(base, settings.rank, settings.alpha, settings.dropout, settings.targets)


class _Led:
    """The leader's part of a chain."""

    def __init__(
        self, order: WorkerOrder, ticket: Ticket, pipe: Pipe, mesh: Communicator, peers: list[dict[str, Any]]
    ) -> None:
        self._order, self._ticket, self._pipe, self._mesh = order, ticket, pipe, mesh
        self._peers = {int(each["member"]): each for each in peers}
        self._checkpoints = Checkpoints(order.folder / "checkpoints")
        self._curve = Curve(order.folder / CURVE)

    def train(self, learnt: list[Any], evaluated: list[Any]) -> None:
        """Train from the latest checkpoint to the end, and write the adapter."""
        settings, ticket = self._ticket.settings, self._ticket
        model = _model(self._order, settings)
        latest = self._checkpoints.latest()
        begin_at = 0 if latest is None else latest[0]
        parts, ranks = place(self._peers, len(decoder_layers(model)), sum(each.numel() for each in model.parameters()))
        self._tell_parts(parts, ranks, begin_at)
        chain = InOrder(self._mesh, ranks)
        leader = Leader(chain, model, parts, settings.weight_decay)
        if latest is not None:
            leader.restore(_read(latest[1]))
            self._pipe.say(says=f"the chain goes on from step {begin_at}")
        points = self._curve.go_back_to(begin_at if latest is not None else -1)
        if latest is None and evaluated:
            self._add(Point(0, held_out=mean_loss(model, evaluated, settings.batch)), points)

        def told(point: Point) -> None:
            every = settings.evaluate_every
            if evaluated and (point.step == settings.steps or (every and point.step % every == 0)):
                point = replace(point, held_out=mean_loss(model, evaluated, settings.batch))
            self._add(point, points)
            if point.step % ticket.keep_every == 0 or point.step == settings.steps:
                state = leader.state()
                self._checkpoints.save(point.step, lambda folder: torch.save(state, folder / "state.pt"))

        lead(leader, model, learnt, settings, told, begin_at)
        leader.end()
        with written_whole(ticket.out / "adapter") as partial:
            save_adapter(model, partial)
        Curve(ticket.out / CURVE).write(points)
        held_out = [point.held_out for point in points if point.held_out is not None]
        layers = {self._peers[rank]["node"]: [part.start, part.stop] for rank, part in zip(ranks, parts, strict=True)}
        report = {"adapter": str(ticket.out / "adapter"), "learnt": len(learnt), "held_out": len(evaluated)}
        report["perplexity"] = perplexity_of(held_out)
        self._pipe.say(done=json.dumps(report | {"layers": layers}))

    def _add(self, point: Point, points: list[Point]) -> None:
        self._curve.add(point)
        points.append(point)
        self._pipe.progress(point, self._ticket.settings.steps)

    def _tell_parts(self, parts: list[range], ranks: list[int], begin_at: int) -> None:
        """
        Raises:
            TrainingError: a rank has another model.
        """
        own = config_digest(self._order.model_folder)
        for part, rank in list(zip(parts, ranks, strict=True))[1:]:
            plan = {"settings": asdict(self._ticket.settings), "part": [part.start, part.stop], "order": ranks}
            send(self._mesh, plan | {"begin_at": begin_at}, rank)
            self._pipe.say(says=f"{self._peers[rank]['node']} has layers {part.start} to {part.stop - 1}")
        for rank in ranks[1:]:
            if receive(self._mesh, rank) != own:
                node = self._peers[rank]["node"]
                raise TrainingError(f"node {node!r} has other files of {self._order.model!r} than the data's owner")


def place(peers: Mapping[int, Mapping[str, Any]], layers: int, weights: int) -> tuple[list[range], list[int]]:
    """Which layers there are in each part, and which rank has it: the leader the first, the others as a linear program
    assigns them, so that the time of a step is least. Every rank loads the whole model before it frees the rest, so
    that is what each must have room for.

    Args:
        peers: by rank: its `node`, `memory_bytes` and `speed`.
        weights: of the whole model with its adapters.

    Raises:
        TrainingError: there are more ranks than layers, or nodes lack the memory.
    """
    need = RUNTIME_BYTES + 4 * weights
    if lacking := [
        f"{each['node']} gives {each['memory_bytes']}" for each in peers.values() if each["memory_bytes"] < need
    ]:
        raise TrainingError(f"each node of a chain needs {need} bytes of memory for this model: {', '.join(lacking)}")
    others = sorted(rank for rank in peers if rank != LEADER)
    speeds = np.array([peers[rank]["speed"] for rank in others])
    parts = cut(layers, [peers[LEADER]["speed"], *sorted(speeds, reverse=True)])
    lengths = np.array([len(part) for part in parts[1:]])
    room = np.ones(len(others))  # for one part each, as was seen above
    chosen = assign(-lengths[:, None] / speeds[None, :], room, room)
    return parts, [LEADER, *(others[index] for index in chosen)]


def _read(folder: Any) -> State:
    try:
        state: State = torch.load(folder / "state.pt", weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise TrainingError(
            f"{folder}: the checkpoint cannot be read: {error}; stop the job, and begin it anew"
        ) from error
    return state
