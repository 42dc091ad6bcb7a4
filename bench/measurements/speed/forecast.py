"""How well the planner's forecast holds: what it says of plans on this machine, beside what they take.

A plan is some ranks with their shares, on processors of which each has a part of a core, behind an emulated network.
What the forecast rests on is measured as nodes do it: how fast a core computes, and the link between two ranks by
connecting them. Ranks that are to be on machines of their own share the memory of this one. They begin to compute
together, after a sum, and whoever has the least is done first: so each is as fast as a core is with all at work for a
while, then with fewer. What is compared is the median token.

For every set of machines of these plans, the planner is asked what it would choose; that is run, too, and compared with
the best that was run there.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from motley.bench.measurements.speed.latency import measure_latency
from motley.bench.meshes.emulator import LinkSpec, Nic, sleep_exactly
from motley.bench.meshes.local_mesh import MeshError, MeshSpec, StageSpec, staged_plans
from motley.bench.meshes.rank_processes import TIMEOUT_S, RankProcesses
from motley.daemon.machine.compute_speed import ComputeSpeed
from motley.daemon.machine.processor import usable_cores
from motley.daemon.node.survey.describe import describe
from motley.daemon.node.survey.speeds import measured_apart
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.choosing.arrangement import Choice
from motley.orchestrator.planning.choosing.choice import Chooser
from motley.orchestrator.planning.choosing.stages import ranks_by_stage
from motley.orchestrator.planning.cost import Forecast, Workload, forecast
from motley.orchestrator.planning.cutting.shares import Candidate
from motley.plugins.engine import FormatSpeed
from motley.protocol import mesh_pb2 as pb
from motley.transport import Listener, Membership, Plain, connect_mesh
from motley.transport.schedules.forecast import Network

TARGET = 0.15
"""A forecast is to be no farther off than this part of what was measured."""


@dataclass(frozen=True)
class Case:
    """A plan that is forecast and run.

    Attributes:
        shares: of every rank, relative to the others'.
        fractions: the part of a core's speed that each rank has.
        link: the network between them, as `motley.bench.meshes.emulator.LinkSpec.parse` reads it; empty: that of this
            machine.
        stages: how many ranks each stage has; empty: every rank has a share of every layer.
        depths: how many layers each stage has; empty: about as many as the others.
    """

    shares: Sequence[float]
    fractions: Sequence[float]
    link: str = ""
    stages: Sequence[int] = ()
    depths: Sequence[int] = ()

    def staged(self, layers: int) -> list[StageSpec]:
        """Its stages of a model of so many layers."""
        if self.depths:
            return [StageSpec(*each) for each in zip(self.stages, self.depths, strict=True)]
        ends = [layers * at // max(1, len(self.stages)) for at in range(len(self.stages) + 1)]
        return [StageSpec(ranks, end - begin) for ranks, (begin, end) in zip(self.stages, pairwise(ends), strict=True)]


CASES = (
    Case((1,), (1,)),
    Case((1,), (0.5,)),
    Case((1, 1), (0.5, 0.5)),
    Case((1, 1), (0.5, 0.5), "0.1ms,1Gbit"),
    Case((1, 1), (1, 1), "1ms,1Gbit"),
    Case((1, 1), (0.5, 0.5), "5ms,1Gbit"),
    Case((3, 1), (0.75, 0.25), "0.1ms,1Gbit"),
    Case((4, 1), (0.8, 0.2), "1ms,1Gbit"),
    Case((4, 1), (0.5, 0.5), "0.1ms,1Gbit"),
    Case((1, 1, 1), (0.33, 0.33, 0.33), "0.1ms,1Gbit"),
    Case((2, 1, 1), (0.5, 0.25, 0.25), "1ms,1Gbit"),
    Case((1, 1, 1, 1), (0.25, 0.25, 0.25, 0.25), "0.1ms,1Gbit"),
    Case((4, 2, 1, 1), (0.5, 0.25, 0.125, 0.125), "1ms,1Gbit"),
    Case((1, 1), (0.5, 0.5), "5ms,1Gbit", (1, 1)),
    Case((1, 1, 1), (0.5, 0.5, 0.5), "1ms,1Gbit", (1, 2)),
)
"""1 to 4 ranks, shares from equal to 4:1, whole cores and parts of them, three networks and none, and stages."""
TRIALS = 3
"""How often a processor's speed is measured."""
SHORT = (1, 3, 4, 6, 11)
"""Numbers of the cases that a short measurement has."""


@dataclass(frozen=True)
class Compared:
    """The forecast of a plan beside what it takes; times in milliseconds.

    Attributes:
        off: how far the forecast is above what was measured, as a part of that.
    """

    ranks: int
    shares: list[float]
    fractions: list[float]
    link: str
    stages: list[int]
    predicted_ms: float
    measured_ms: float
    off: float
    predicted: dict[str, float]
    measured: dict[str, float]
    ttft_predicted_ms: float
    ttft_measured_ms: float


@dataclass(frozen=True)
class Chosen:
    """What the planner chooses on some machines, beside the best that was run there; times in milliseconds.

    Attributes:
        fractions: of every machine, as in `Case`.
        plan: the plan that is chosen, as it was run; its shares are those of the weights.
        best: the quickest plan that was run on these machines or some of them, the chosen one among them.
        behind: how much longer than the best the chosen plan takes, as a part of that.
    """

    fractions: list[float]
    link: str
    plan: Compared
    best: Compared
    behind: float


class Forecasts:
    """Forecasts plans of a model, runs them, and asks the planner what it would choose.

    Attributes:
        rows: of the plans that were run.
    """

    def __init__(self, model: Path, quantisation: str, prompt: int, tokens: int, vocabulary: int) -> None:
        self.rows: list[Compared] = []
        self._model, self._quantisation = model, quantisation
        self._prompt, self._tokens, self._vocabulary = prompt, tokens, vocabulary
        self._speeds: dict[int, ComputeSpeed] = {}
        """Of a core, by how many compute."""
        self._networks: dict[str, tuple[float, float, float]] = {}
        """By link, what `measure_link` has found."""
        self._profile = pb.ModelProfile()

    async def measure(self, cases: Sequence[Case], progress: Callable[[int, int], None]) -> list[Chosen]:
        """Forecast and run each plan, one after the other, and what is chosen of each set of their machines.

        Args:
            progress: told how many of how many plans are done.

        Raises:
            motley.bench.meshes.local_mesh.MeshError: a rank failed, or this machine's speed cannot be measured.
        """
        spec = pb.ModelSpec(source=str(self._model), quantisation=self._quantisation, block=128)
        self._profile = (await asyncio.to_thread(describe, spec, None)).profile
        sets = list(dict.fromkeys((tuple(case.fractions), case.link) for case in cases if len(case.fractions) > 1))
        plans = len(cases) + len(sets)
        for number, case in enumerate(cases):
            progress(number, plans)
            self.rows.append(await self._compare(case))
        chosen = []
        for number, (fractions, link) in enumerate(sets, start=len(cases)):
            progress(number, plans)
            plan = await self._compare(await asyncio.to_thread(self._choice, fractions, link))
            self.rows.append(plan)
            chosen.append((fractions, link, plan))
        progress(plans, plans)
        return [beside_the_best(*each, self.rows) for each in chosen]

    async def _compare(self, case: Case) -> Compared:
        together = max(case.stages, default=len(case.shares))
        for busy in range(1, min(usable_cores(), together) + 1):
            if busy not in self._speeds:
                self._speeds[busy] = await _speed(busy)
        if case.link not in self._networks:
            self._networks[case.link] = await asyncio.to_thread(measure_link, case.link)
        mesh = MeshSpec(
            self._model,
            weights=case.shares,
            quantisation=self._quantisation,
            context=self._context,
            link=case.link,
            fractions=case.fractions,
            pin=True,
            stages=case.staged(self._profile.layers),
        )
        expected = self._forecast(mesh)
        (report,) = await measure_latency(mesh, [self._prompt], self._tokens, self._vocabulary)
        measured = report.ms_per_token["p50"]
        predicted = 1e3 * expected.token_s
        return Compared(
            ranks=len(case.shares),
            shares=list(case.shares),
            fractions=list(case.fractions),
            link=case.link,
            stages=list(case.stages),
            predicted_ms=round(predicted, 3),
            measured_ms=measured,
            off=round(predicted / measured - 1, 4),
            predicted={
                "compute_ms": round(1e3 * expected.compute_s, 3),
                "wire_ms": round(1e3 * expected.wire_s, 3),
                "wait_ms": round(1e3 * expected.wait_s, 3),
            },
            measured={"compute_ms": report.compute_ms, "wire_ms": report.wire_ms, "wait_ms": report.wait_ms},
            ttft_predicted_ms=round(1e3 * expected.first_s, 3),
            ttft_measured_ms=report.ttft_ms,
        )

    @property
    def _context(self) -> int:
        return self._prompt + self._tokens + 64

    @property
    def _room(self) -> int:
        return Caches(self._context, self._context).blocks(whole=False).room

    @property
    def _work(self) -> Workload:
        return Workload(position=self._prompt + self._tokens // 2, prompt=self._prompt)

    def _network(self, link: str, size: int) -> Network:
        latency, bandwidth, frame_s = self._networks[link]
        return Network([[latency] * size for _ in range(size)], [[bandwidth] * size for _ in range(size)], frame_s)

    def _candidates(self, fractions: Sequence[float], sizes: Sequence[int]) -> list[Candidate]:
        """Ranks that begin together, as fast as they are beside each other.

        Args:
            sizes: bytes that each has to read.
        """
        held = "int8" if self._quantisation == "stored" else self._quantisation  # floats of a checkpoint become int8
        among = {busy: speed for busy, speed in self._speeds.items() if busy <= len(sizes)}
        beside = {busy: speed.of(held) for busy, speed in among.items()}
        reading = beside_each_other(sizes, {busy: own.bytes_per_s for busy, own in beside.items()})
        multiplying = beside_each_other(sizes, {busy: own.row_bytes_per_s for busy, own in beside.items()})
        call_s = among[max(among)].call_s
        return [
            Candidate(str(rank), own * part, 1 << 60, row_speed=own_rows * part, call_s=call_s / part)
            for rank, (part, own, own_rows) in enumerate(zip(fractions, reading, multiplying, strict=True))
        ]

    def _forecast(self, mesh: MeshSpec) -> Forecast:
        size = len(mesh.weights)
        by_hand = [Candidate(str(rank), weight, 1 << 60) for rank, weight in enumerate(mesh.weights)]
        plans = staged_plans(mesh.stages, self._profile, by_hand, self._room)
        candidates: list[Candidate] = []
        for ranks in ranks_by_stage(plans):
            sizes = [plans[rank].weight_bytes for rank in ranks]
            candidates += self._candidates(mesh.fractions[ranks.start : ranks.stop], sizes)
        return forecast([self._profile] * size, candidates, plans, self._network(mesh.link, size), self._work)

    def _choice(self, fractions: Sequence[float], link: str) -> Case:
        """The planner's plan for some machines, all of which compute as fast as they do beside each other."""
        size = len(fractions)
        candidates = self._candidates(fractions, [1] * size)
        best = Chooser([self._profile] * size, candidates, self._room, self._network(link, size), self._work).best()
        return case_of(best, fractions, link)


def case_of(choice: Choice, fractions: Sequence[float], link: str) -> Case:
    """A choice as a plan that can be run: every rank has about the part of its stage that it was given."""
    stages = ranks_by_stage(choice.plans)
    layers = [choice.plans[ranks.start].layers for ranks in stages]
    return Case(
        [max(1, plan.weight_bytes) for plan in choice.plans],
        [fractions[member] for member in choice.members],
        link if len(choice.members) > 1 else "",
        [len(ranks) for ranks in stages] if len(stages) > 1 else (),
        [len(own) for own in layers if own is not None] if len(stages) > 1 else (),
    )


def beside_the_best(fractions: Sequence[float], link: str, plan: Compared, rows: Sequence[Compared]) -> Chosen:
    """What was chosen on some machines beside the best of the plans that were run on them, or on some of them."""
    there = Counter(fractions)
    able = [row for row in rows if Counter(row.fractions) <= there and (row.link == link or row.ranks == 1)]
    best = min([plan, *able], key=lambda row: row.measured_ms)
    return Chosen(list(fractions), link, plan, best, round(plan.measured_ms / best.measured_ms - 1, 4))


def summary(rows: Sequence[Compared], chosen: Sequence[Chosen] = ()) -> dict[str, float]:
    """How far the forecasts are off: the median, the worst, and the part of the plans within `TARGET`; and how far the
    worst of the plans that were chosen is behind the best that was run on its machines."""
    off = [abs(row.off) for row in rows]
    within = sum(each <= TARGET for each in off) / len(off)
    told = {"median_off": round(median(off), 4), "worst_off": max(off), "within_target": round(within, 3)}
    return told | ({"worst_behind": max(each.behind for each in chosen)} if chosen else {})


def beside_each_other(sizes: Sequence[float], speeds: Mapping[int, float]) -> list[float]:
    """The bytes/s that each of some ranks gets which begin together.

    Args:
        sizes: bytes that each has to read.
        speeds: bytes/s of each of so many ranks at work; of more than are there, as of the most that are.
    """
    found = [speeds[1]] * len(sizes)
    seconds = read = 0.0
    for done, rank in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        seconds += (sizes[rank] - read) / speeds[min(max(speeds), len(sizes) - done)]
        read = sizes[rank]
        if read:
            found[rank] = read / seconds
    return found


async def _speed(processes: int) -> ComputeSpeed:
    """How fast one thread computes while so many do: the best of some trials, as others may use the machine too.

    Raises:
        MeshError: it cannot be measured.
    """
    trials = [await _speed_now(processes) for _ in range(TRIALS)]
    formats = [
        FormatSpeed(
            alike[0].format, max(each.bytes_per_s for each in alike), max(each.row_bytes_per_s for each in alike)
        )
        for alike in zip(*(trial.formats for trial in trials), strict=True)
    ]
    return ComputeSpeed(formats, min(trial.call_s for trial in trials))


async def _speed_now(processes: int) -> ComputeSpeed:
    """As `_speed`, once."""
    found = [each for each in await asyncio.gather(*(measured_apart(1) for _ in range(processes))) if each is not None]
    if len(found) < processes:
        raise MeshError("how fast this machine computes could not be measured")
    formats = [
        replace(
            alike[0],
            bytes_per_s=fmean(each.bytes_per_s for each in alike),
            row_bytes_per_s=fmean(each.row_bytes_per_s for each in alike),
        )
        for alike in zip(*(each.formats for each in found), strict=True)
    ]
    return ComputeSpeed(formats, fmean(each.call_s for each in found))


def measure_link(link: str) -> tuple[float, float, float]:
    """Latency (s), bandwidth (bytes/s) and cost of a frame (s) between two ranks of this machine, as they measure it
    when they connect.

    Args:
        link: the network between them, as in `Case`.
    """
    secret = secrets.token_bytes(32)
    members = [Membership("forecast", 0, rank, 2, secret, bytes(32)) for rank in range(2)]
    with RankProcesses([partial(_linked_rank, link, member) for member in members]) as pair:
        pair.exchange_addresses()
        found: tuple[float, float, float] = pair.hear()[0]
    return found


def _linked_rank(link: str, member: Membership, pipe: Any) -> None:
    sleep_exactly()
    listener = Listener("127.0.0.1")
    pipe.send(listener.port)
    wrap = Nic(LinkSpec.parse(link), seed=member.rank).wrap if link else None
    with connect_mesh(listener, member, pipe.recv(), TIMEOUT_S, security=Plain(), wrap=wrap) as mesh:
        network = mesh.network
        pipe.send((network.latency[0][1], network.bandwidth[0][1], network.frame_s))
        pipe.recv()
    listener.close()
