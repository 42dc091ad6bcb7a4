"""What is known of the links between nodes: a table of ordered pairs. Pure: the clock is given, nothing is sent.

Ranks dial each other, the higher the lower one, so a pair is looked at in both directions: a machine behind a firewall
reaches others and is not reached. A pair is of use to a session only if both can reach each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import NamedTuple

from motley.orchestrator.mesh.nodes import Node

AGAIN_S = 1800.0
"""A link that was measured so long ago is measured again, while neither node serves."""
RETRY_S = 60.0
"""A link that could not be made so long ago is tried again, whatever its nodes do."""
UNKNOWN_LATENCY_S, UNKNOWN_BANDWIDTH = 2e-4, 1.1e8
"""What a link is taken for that was not measured: a cable of 1 Gbit/s in a house."""
OWN_LATENCY_S, OWN_BANDWIDTH = 1e-5, 4e9
"""What two ranks of one node are taken to have."""


class Pair(NamedTuple):
    """Ids of two nodes: `dialler` is to reach `listener`."""

    dialler: str
    listener: str


@dataclass(frozen=True)
class Link:
    """What one node has found of its way to another.

    Attributes:
        latency_s: seconds one way.
        bandwidth: bytes/s.
        failure: why it cannot reach the other; empty: it can.
        measured: when that was, by the table's clock.
        before: whether that was before one of them went and came back, so that it is to be measured anew.
    """

    latency_s: float = 0.0
    bandwidth: float = 0.0
    failure: str = ""
    measured: float = 0.0
    before: bool = False


Place = tuple[str, str]
"""A node's name and address, by which it is known when it comes back."""


class _Pairs:
    """A set of pairs in which those among a few nodes are found without a look at all others."""

    def __init__(self) -> None:
        self._listeners: dict[str, set[str]] = {}
        """Of every dialler that has any."""

    def add(self, pair: Pair) -> None:
        self._listeners.setdefault(pair.dialler, set()).add(pair.listener)

    def discard(self, pair: Pair) -> None:
        if (listeners := self._listeners.get(pair.dialler)) is not None:
            listeners.discard(pair.listener)
            if not listeners:
                del self._listeners[pair.dialler]

    def among(self, node_ids: Collection[str]) -> Iterator[Pair]:
        """The pairs of which both are among some nodes, in the order of those."""
        for dialler in node_ids:
            if listeners := self._listeners.get(dialler):
                yield from (Pair(dialler, listener) for listener in node_ids if listener in listeners)


class LinkTable:
    """All links that were measured between nodes that are there, and those that are to be."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nodes: dict[str, Node] = {}
        self._links: dict[Pair, Link] = {}
        self._unknown: set[Pair] = set()
        """Pairs of which nothing is known."""
        self._waiting = _Pairs()
        """Pairs that are to be measured, ..."""
        self._old = _Pairs()
        """... and those that are as soon as neither serves."""
        self._successes: deque[tuple[float, Pair]] = deque()
        """When pairs were measured that are not old yet; what was measured again since stands here twice, ..."""
        self._failures: deque[tuple[float, Pair]] = deque()
        """... and when pairs have failed that are not tried again yet."""
        self._before: dict[tuple[Place, Place], Link] = {}
        """Good links of nodes that have gone: of the dialler and the listener."""

    def measured(self, pair: Pair, latency_s: float, bandwidth: float) -> None:
        """The dialler of a pair has reached the other."""
        self._note(pair, Link(latency_s, bandwidth, measured=self._clock()))

    def failed(self, pair: Pair, why: str) -> None:
        """The dialler of a pair has not."""
        self._note(pair, Link(failure=why, measured=self._clock()))

    def _note(self, pair: Pair, link: Link) -> None:
        self._links[pair] = link
        self._unknown.discard(pair)
        self._waiting.discard(pair)
        self._old.discard(pair)
        (self._failures if link.failure else self._successes).append((link.measured, pair))

    def left(self, node: Node) -> None:
        """A node is gone. What was measured between it and others is kept for when it comes back."""
        oldest = self._clock() - AGAIN_S
        self._before = {places: link for places, link in self._before.items() if link.measured > oldest}
        self._nodes.pop(node.id, None)
        for other in self._nodes.values():
            for dialler, listener in permutations((node, other)):
                pair = Pair(dialler.id, listener.id)
                link = self._links.pop(pair, None)
                if link is not None and not link.failure:
                    self._before[_place(dialler), _place(listener)] = link
                self._unknown.discard(pair)
                self._waiting.discard(pair)
                self._old.discard(pair)

    def joined(self, node: Node) -> None:
        """A node is there. If it was before, its links count as they were until they are measured anew: else it would
        be planned for by guess, and again a moment later."""
        oldest = self._clock() - AGAIN_S
        for other in self._nodes.values():
            for dialler, listener in permutations((node, other)):
                pair = Pair(dialler.id, listener.id)
                link = self._before.pop((_place(dialler), _place(listener)), None)
                if link is not None and link.measured > oldest:
                    self._links[pair] = replace(link, before=True)
                else:
                    self._unknown.add(pair)
                self._waiting.add(pair)
        self._nodes[node.id] = node

    def of(self, dialler: Node, listener: Node) -> Link | None:
        """What is known of the way from one node to another; None: it was not measured."""
        return self._links.get(Pair(dialler.id, listener.id))

    def due(self, free: Collection[str], resting: Collection[str]) -> Iterator[Pair]:
        """Pairs of nodes that are to be measured now: those that were not since both are there, those that failed a
        while ago, and old ones.

        Args:
            free: ids of the nodes that may measure now, ...
            resting: ... and of those that serve nothing as well, so that old links are measured again.
        """
        self._age(self._failures, RETRY_S, self._waiting)
        self._age(self._successes, AGAIN_S, self._old)
        yield from self._waiting.among(free)
        yield from self._old.among(resting)

    def _age(self, latest: deque[tuple[float, Pair]], after_s: float, pairs: _Pairs) -> None:
        """Move what was found more than so long ago, and not again since, to some pairs."""
        now = self._clock()
        while latest and now - latest[0][0] > after_s:
            measured, pair = latest.popleft()
            link = self._links.get(pair)
            if link is not None and link.measured == measured and not link.before:
                pairs.add(pair)

    def broken(self, nodes: Sequence[Node]) -> list[str]:
        """Tell which of some nodes cannot reach which, each pair as a sentence without its full stop; but for those for
        which there is a relay."""
        found = []
        for one, other in permutations(nodes, 2):
            link = self.of(one, other)
            if link is not None and link.failure and not self.relay(one, other):
                found.append(f"{one.name} cannot reach {other.name}: {link.failure}")
        return found

    def fails(self, dialler: Node, listener: Node) -> bool:
        """Whether a node is known not to reach another."""
        link = self.of(dialler, listener)
        return link is not None and bool(link.failure)

    def are_apart(self, one: Node, other: Node) -> bool:
        """Whether one of two nodes is known not to reach the other."""
        return self.fails(one, other) or self.fails(other, one)

    def relay(self, one: Node, other: Node) -> str | None:
        """The id of the node by which two that are apart meet soonest: it is known to reach both, and to be reached;
        None: there is none."""
        ways = {}
        for third in self._nodes.keys() - {one.id, other.id}:
            legs = [self._leg(one.id, third), self._leg(other.id, third)]
            if all(legs):
                ways[third] = sum(latency for latency, _ in filter(None, legs))
        return min(ways, key=lambda third: (ways[third], third), default=None)

    def _leg(self, node: str, third: str) -> tuple[float, float] | None:
        """Latency and bandwidth between two nodes that reach each other both ways; None: they do not, as is known."""
        links = [self._links.get(pair) for pair in (Pair(node, third), Pair(third, node))]
        good = [link for link in links if link is not None and not link.failure]
        if len(good) < 2:
            return None
        return max(link.latency_s for link in good), min(link.bandwidth for link in good)

    def all_known(self, nodes: Sequence[Node]) -> bool:
        """Whether every pair of some nodes was measured, in both directions."""
        ids = {node.id for node in nodes}
        if len(ids) > 1 and not ids <= self._nodes.keys():
            return False
        return not any(pair.dialler in ids and pair.listener in ids for pair in self._unknown)

    def between(self, one: Node, other: Node) -> tuple[float, float]:
        """Latency (s, one way) and bandwidth (bytes/s) between two ranks on some nodes, as the slower direction has it,
        or a relay where they are apart, or as a cable in a house if that was not measured."""
        if one.id == other.id:
            return OWN_LATENCY_S, OWN_BANDWIDTH
        if self.are_apart(one, other) and (third := self.relay(one, other)):
            legs = [leg for leg in (self._leg(one.id, third), self._leg(other.id, third)) if leg]
            return sum(leg[0] for leg in legs), min(leg[1] for leg in legs)
        ways = [link for link in (self.of(one, other), self.of(other, one)) if link is not None and not link.failure]
        if not ways:
            return UNKNOWN_LATENCY_S, UNKNOWN_BANDWIDTH
        return max(link.latency_s for link in ways), min(link.bandwidth for link in ways)


def _place(node: Node) -> Place:
    return node.name, node.address
