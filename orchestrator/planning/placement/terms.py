"""The words in which experts are placed: an expert, a host, a move, a placement, and the two ways to refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ExpertKey = tuple[int, int]
"""Layer and index within it."""


class PlacementError(Exception):
    """The asked-for replicas do not fit; the message says what is missing: bytes, nodes, and for which experts."""


class PlacementInputError(ValueError):
    """A number that cannot be (negative, NaN), or a name that is there twice."""


@dataclass(frozen=True)
class Expert:
    """What one expert needs."""

    layer: int
    index: int
    bytes: int
    """Bytes of its weights, in the format in which they are held."""
    load: float
    """Rows per token, 0 or more: `num_experts_per_tok / num_experts` until measured."""

    def __post_init__(self) -> None:
        name = expert_name(self.key)
        require(self.layer >= 0 and self.index >= 0, f"{name}: layer and index are 0 or more")
        require(self.bytes > 0, f"{name}: has {self.bytes} bytes; it must have some")
        require(math.isfinite(self.load) and self.load >= 0, f"{name}: load {self.load} is not a number >= 0")

    @property
    def key(self) -> ExpertKey:
        return self.layer, self.index


@dataclass(frozen=True)
class Host:
    """A node's offer to hold experts."""

    name: str
    memory: int
    """Bytes left for experts."""
    speed: float
    """Bytes of weights per second, in the experts' format."""
    zone: str = ""
    latency: float = 0.0
    """Seconds from the trunk to this node and back; 0: the trunk's own node."""
    bandwidth: float = math.inf
    """Bytes per second between the trunk and this node."""

    def __post_init__(self) -> None:
        require(bool(self.name), "a host has no name")
        require(self.memory >= 0, f"{self.name}: memory {self.memory} is negative")
        require(math.isfinite(self.speed) and self.speed > 0, f"{self.name}: speed {self.speed} is not a number > 0")
        require(
            math.isfinite(self.latency) and self.latency >= 0,
            f"{self.name}: latency {self.latency} is not >= 0 seconds",
        )
        require(self.bandwidth > 0, f"{self.name}: bandwidth {self.bandwidth} is not > 0 bytes per second")


@dataclass(frozen=True)
class Move:
    """One thing for a node to do. In the order of `Placement.moves` memory is never exceeded, and an expert that has
    a living host at the start has one all the time."""

    action: Literal["fetch", "drop"]
    expert: ExpertKey
    host: str


@dataclass(frozen=True)
class Placement:
    """Who holds what, and what that is expected to cost."""

    hosts: dict[ExpertKey, tuple[str, ...]]
    """Of every expert, the names of its hosts, the one with the shortest answer time first."""
    bytes: dict[str, int]
    """Of every host: memory its replicas take."""
    load: dict[str, float]
    """Of every host: expected rows per token, over all layers."""
    seconds: dict[str, float]
    """Of every host: how long its rows occupy it per token."""
    moves: tuple[Move, ...]
    """From the previous placement to this, to be done in this order."""

    @property
    def held(self) -> dict[str, tuple[ExpertKey, ...]]:
        """The same by host: the experts that each holds, of those with none, too."""
        return {name: tuple(key for key, own in self.hosts.items() if name in own) for name in self.bytes}

    @property
    def seconds_per_token(self) -> float:
        """The cost: no more than one token per so many seconds, however many requests there are."""
        return max(self.seconds.values())


def require(condition: bool, message: str) -> None:
    """Check what the planner is asked.

    Raises:
        PlacementInputError: with this message, if the condition does not hold.
    """
    if not condition:
        raise PlacementInputError(message)


def expert_name(key: ExpertKey) -> str:
    """``layer 3 expert 7``: for messages."""
    return f"layer {key[0]} expert {key[1]}"
