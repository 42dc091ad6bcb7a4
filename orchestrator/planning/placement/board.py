"""A placement in the making: which expert is on which host, what is free there, and how busy each host is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from motley.orchestrator.planning.placement.terms import Expert, Host, Move, Placement

DEALS = 8000
"""Partial deals looked at for one placement, at most."""


class Board:
    """A placement in the making. Experts and hosts are numbers here, in the order of their keys and names."""

    def __init__(self, experts: Sequence[Expert], hosts: Sequence[Host], row_bytes: int, replicas: int) -> None:
        self.experts = experts
        self.hosts = hosts
        zones = sorted({host.zone for host in hosts})
        self.zone = np.array([zones.index(host.zone) for host in hosts])
        self.size = np.array([expert.bytes for expert in experts], dtype=np.int64)
        self.load = np.array([expert.load for expert in experts])
        self.free = np.array([host.memory for host in hosts], dtype=np.int64)
        link = np.array([host.latency + row_bytes / host.bandwidth for host in hosts])
        speed = np.array([host.speed for host in hosts])
        self.rate: NDArray[np.float64] = 1 / (link + self.size[:, None] / speed)
        """Inverse answer times, f64[experts, hosts]."""

        self.holders: list[list[int]] = [[] for _ in experts]
        self.holds = np.zeros((len(experts), len(hosts)), dtype=bool)
        self.in_zone = np.zeros((len(experts), len(zones)), dtype=np.int64)
        """Replicas of every expert in every zone."""
        self.rates = np.zeros(len(experts))
        """Sum of `rate` over the holders."""
        self.seconds = np.zeros(len(hosts))
        """How long every host is occupied per token."""

        roomy = {host.zone for host in hosts if host.memory >= self.size.min()}
        self.quota = math.ceil(replicas / max(1, len(roomy)))
        """Replicas of an expert in one zone, at most, while that is possible."""
        self.spreads = True
        """As far as is known, there is room, or room can be made, for replicas in different zones."""

        self.deals = DEALS
        """Partial deals that may still be looked at."""
        self.moves: list[Move] = []
        self.stays_put = False
        """There is a previous placement: moves cost something, and must be possible one after the other."""
        self.fetched = np.zeros_like(self.holds)
        """Replicas that were not there before."""

    @property
    def fetches(self) -> int:
        return sum(1 for move in self.moves if move.action == "fetch")

    def assign(self, expert: int, holders: Sequence[int]) -> None:
        """Make these, and no others, the holders of this expert: first what is fetched, then what is dropped."""
        before = self.holders[expert]
        if before:
            self.seconds[before] -= self.load[expert] / self.rates[expert]
        for host in [host for host in holders if host not in before]:
            self._change(expert, host, "fetch")
        for host in [host for host in before if host not in holders]:
            self._change(expert, host, "drop")
        self.holders[expert] = list(holders)
        if holders:
            self.rates[expert] = self.rate[expert, holders].sum()
            self.seconds[holders] += self.load[expert] / self.rates[expert]

    def _change(self, expert: int, host: int, action: Literal["fetch", "drop"]) -> None:
        sign = 1 if action == "fetch" else -1
        self.holds[expert, host] = self.fetched[expert, host] = sign > 0
        self.in_zone[expert, self.zone[host]] += sign
        self.free[host] -= sign * self.size[expert]
        if self.stays_put:
            self.moves.append(Move(action, self.experts[expert].key, self.hosts[host].name))

    def replace(self, expert: int, source: int, target: int) -> None:
        self.assign(expert, [target if host == source else host for host in self.holders[expert]])

    def placement(self) -> Placement:
        names = [host.name for host in self.hosts]
        hosts = {
            expert.key: tuple(
                names[host] for host in sorted(holders, key=lambda host: (-self.rate[number, host], host))
            )
            for number, (expert, holders) in enumerate(zip(self.experts, self.holders, strict=True))
        }
        rows = np.where(self.holds, self.load[:, None] * self.rate / self.rates[:, None], 0.0)
        seconds = np.where(self.holds, (self.load / self.rates)[:, None], 0.0)
        everything = tuple(Move("fetch", key, name) for key, holders in hosts.items() for name in holders)
        return Placement(
            hosts=hosts,
            bytes=dict(zip(names, (self.size @ self.holds).tolist(), strict=True)),
            load=dict(zip(names, rows.sum(axis=0).tolist(), strict=True)),
            seconds=dict(zip(names, seconds.sum(axis=0).tolist(), strict=True)),
            moves=tuple(self.moves) if self.stays_put else everything,
        )
