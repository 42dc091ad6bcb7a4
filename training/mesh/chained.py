"""Workers of a chain: each has some of a model's layers; those of owners have the first ones, data and labels.

When a rank is gone all of them end; the job begins anew, on the nodes that are left, from the owner's last checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from motley.protocol import LEADER
from motley.training.base import load_base, save_adapter, with_adapters
from motley.training.chain.crossing import InOrder, receive, send
from motley.training.chain.cut import cut
from motley.training.chain.leader import Leader, Record, lead
from motley.training.chain.owners import Owners
from motley.training.chain.part import serve_part
from motley.training.chain.state import State
from motley.training.dealing import RUNTIME_BYTES
from motley.training.errors import TrainingError
from motley.training.files import CURVE, Checkpoints, Curve, Point, written_whole
from motley.training.memory.layers import decoder_layers
from motley.training.mesh.claim import claim
from motley.training.mesh.order import WorkerOrder
from motley.training.mesh.pipe import Pipe
from motley.training.mesh.talk import pack_files, unpack_files
from motley.training.mesh.ticket import Ticket, read_settings
from motley.training.placement import assign
from motley.training.settings import Settings
from motley.training.training import ADAPTER, config_digest, mean_loss, perplexity_of, read_data
from motley.transport import Communicator, connect_mesh

CONNECT_S = 120.0
PEERS_S = 6 * 3600.0
"""The others may have to fetch the model, or to wait for their devices."""
LOOK_S = 0.2


def take_part(order: WorkerOrder, pipe: Pipe) -> None:
    """Be a rank of a chain, until the training is done.

    Raises:
        TrainingError: the model, the data, the folder or the disk is not as it must be.
        motley.transport.TransportError: another rank is gone.
    """
    folder, ticket = order.model_folder, order.ticket
    data = None
    if ticket is not None:
        claim(ticket.out, order.job_folder)
    if ticket is not None and order.member == LEADER:
        data = read_data(folder, ticket.data, ticket.settings, held_out=ticket.held_out, template=ticket.template)
    with closing(order.listener()) as listener:
        pipe.say(listening=listener.port)
        peers = _peers(pipe)
        addresses = [each["address"] for each in sorted(peers, key=lambda each: int(each["member"]))]
        with connect_mesh(listener, order.membership, addresses, CONNECT_S, security=order.security) as mesh:
            if ticket is None:
                _join(order, pipe, mesh)
            elif data is None:
                _own(order, ticket, pipe, mesh)
            else:
                _Led(order, ticket, pipe, mesh, peers).train(data.learnt, data.evaluated)


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


def _own(order: WorkerOrder, ticket: Ticket, pipe: Pipe, mesh: Communicator) -> None:
    """Learn from data of one's own, beside the job's leader."""
    plan = receive(mesh, LEADER)
    folder = order.model_folder
    send(mesh, config_digest(folder), LEADER)
    settings = read_settings(plan["settings"])
    alone = replace(settings, held_out=0.0)  # the leader evaluates
    data = read_data(folder, ticket.data, alone, template=ticket.template)
    pipe.say(says=f"{len(data.learnt)} examples to learn; {data.cut} cut")
    model = _model(order, settings)
    chain = InOrder(mesh, [order.member, *plan["order"][1:]])
    leader = Leader(chain, model, [range(*part) for part in plan["parts"]], settings.weight_decay)
    record = Record(lambda point: pipe.progress(point, settings.steps), keep_every=plan["keep_every"])
    owners = Owners(mesh, plan["owners"], leader, model)
    _lead(owners, data.learnt, settings, plan["turn"], record, plan["begin_at"])
    files = unpack_files(receive(mesh, LEADER).numpy().tobytes(), ADAPTER)
    with written_whole(ticket.out / "adapter") as partial:
        partial.mkdir()
        for name, content in files.items():
            (partial / name).write_bytes(content)
    send(mesh, True, LEADER)
    mesh.flush()
    pipe.say(done="{}")


def _lead(owners: Owners, learnt: list[Any], settings: Settings, turn: int, record: Record, begin_at: int) -> None:
    if turn:
        owners.lead_in_turn(learnt, settings, turn, record, begin_at)
    else:
        owners.lead_at_once(learnt, settings, record, begin_at)


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
        owners = [LEADER, *(rank for rank, each in self._peers.items() if each["owns"])]
        weights = sum(each.numel() for each in model.parameters())
        depth = len(decoder_layers(model))
        if ticket.last >= depth:
            raise TrainingError(f"--last {ticket.last}: the model has {depth} layers; others are to have some, too")
        parts, ranks = place(self._peers, owners, depth - ticket.last, weights)
        self._tell_parts(parts, ranks, owners, begin_at)
        leader = Leader(InOrder(self._mesh, ranks), model, parts, settings.weight_decay)
        if latest is not None:
            leader.restore(_read(latest[1]))
            self._pipe.say(says=f"the chain goes on from step {begin_at}")
        points = self._curve.go_back_to(begin_at if latest is not None else -1)
        if latest is None and evaluated:
            self._add(Point(0, held_out=mean_loss(model, evaluated, settings.batch)), points)

        def keep(done: int, state: State) -> None:
            self._checkpoints.save(done, lambda folder: torch.save(state, folder / "state.pt"))

        record = Record(
            told=lambda point: self._add(point, points),
            kept=keep,
            keep_every=ticket.keep_every,
            evaluate=(lambda: mean_loss(model, evaluated, settings.batch)) if evaluated else None,
        )
        if len(owners) == 1:
            lead(leader, model, learnt, settings, record, begin_at)
        else:
            _lead(Owners(self._mesh, owners, leader, model), learnt, settings, ticket.turn, record, begin_at)
        leader.end()
        adapter = ticket.out / "adapter"
        with written_whole(adapter) as partial:
            save_adapter(model, partial)
        Curve(ticket.out / CURVE).write(points)
        packed = torch.frombuffer(bytearray(pack_files([adapter / name for name in ADAPTER])), dtype=torch.uint8)
        for rank in owners[1:]:
            send(self._mesh, packed, rank)
        self._mesh.flush()
        for rank in owners[1:]:
            receive(self._mesh, rank)  # it has written the adapter: when the job is done, all its workers are ended
        held_out = [point.held_out for point in points if point.held_out is not None]
        layers = {self._peers[rank]["node"]: [part.start, part.stop] for rank, part in zip(ranks, parts, strict=True)}
        report = {"adapter": str(adapter), "learnt": len(learnt), "held_out": len(evaluated)}
        report["perplexity"] = perplexity_of(held_out)
        report["owners"] = [self._peers[rank]["node"] for rank in owners]
        self._pipe.say(done=json.dumps(report | {"layers": layers}))

    def _add(self, point: Point, points: list[Point]) -> None:
        self._curve.add(point)
        points.append(point)
        self._pipe.progress(point, self._ticket.settings.steps)

    def _tell_parts(self, parts: list[range], ranks: list[int], owners: list[int], begin_at: int) -> None:
        """
        Raises:
            TrainingError: a rank has another model.
        """
        own, ticket = config_digest(self._order.model_folder), self._ticket
        common = {"settings": asdict(ticket.settings), "order": ranks, "begin_at": begin_at, "owners": owners}
        common |= {"turn": ticket.turn, "keep_every": ticket.keep_every}
        common["parts"] = [[part.start, part.stop] for part in parts]
        for part, rank in list(zip(parts, ranks, strict=True))[1:]:
            send(self._mesh, common | {"part": [part.start, part.stop]}, rank)
            self._pipe.say(says=f"{self._peers[rank]['node']} has layers {part.start} to {part.stop - 1}")
        for rank in owners[1:]:
            send(self._mesh, common, rank)
        for rank in (*ranks[1:], *owners[1:]):
            if receive(self._mesh, rank) != own:
                node = self._peers[rank]["node"]
                raise TrainingError(f"node {node!r} has other files of {self._order.model!r} than the data's owner")


def place(
    peers: Mapping[int, Mapping[str, Any]], owners: Collection[int], layers: int, weights: int
) -> tuple[list[range], list[int]]:
    """Which layers there are in each part, and which rank has it: owners the first, the others as a linear program
    assigns them, so that the time of a step is least. Every rank loads the whole model before it frees the rest, so
    that is what each must have room for.

    Args:
        peers: by rank: its `node`, `memory_bytes` and `speed`.
        owners: the ranks with data, the leader among them.
        layers: that are cut.
        weights: of the whole model with its adapters.

    Raises:
        TrainingError: all ranks have data, there are more parts than layers, or nodes lack the memory.
    """
    need = RUNTIME_BYTES + 4 * weights
    if lacking := [
        f"{each['node']} gives {each['memory_bytes']}" for each in peers.values() if each["memory_bytes"] < need
    ]:
        raise TrainingError(f"each node of a chain needs {need} bytes of memory for this model: {', '.join(lacking)}")
    others = sorted(rank for rank in peers if rank not in owners)
    if not others:
        raise TrainingError("a chain wants a node beside those that have data, to which layers can go")
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
