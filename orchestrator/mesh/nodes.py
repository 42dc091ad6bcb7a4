"""Who is in the mesh: a table of registered nodes. Pure: the clock is given, nothing is awaited or sent.

A node is *alive* from its Hello until it says that it leaves (it has *left*), its stream ends or it stops showing life
(it is *lost*), for good. The same machine that returns is a new node, which takes the place of the one of that name.
"""

from __future__ import annotations

import math
import secrets
import time
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from motley.orchestrator.mesh.flapping import Flapping
from motley.protocol.devices import covers, device_words
from motley.protocol.mesh_pb2 import Budget, Capabilities, Gpu, Hello, JobEvent, Lease, RankEvent

HEARTBEAT_S = 1.0
"""How often a node shows life."""
SILENCE_S = 8.0
"""A node that has been silent for this long is lost. After a network was cut, TCP repeats what was lost only when up to
twice as long has passed: a cut of 3 s, with beats a second apart, is a silence of 7."""
MISSED_S = 2.5 * HEARTBEAT_S
"""A node that has been silent for so long has missed a beat: its connection may be of no use any more."""
STANDSTILL_S = 1.0
"""If nobody asked for so long who is overdue, this process stood still: its machine slept, say."""
FORGIVEN_S = 600.0
"""For so long an engine that has failed with a model is not chosen for it again: its GPU may just have been full."""
FORGET_S = 600.0
"""A lost node is listed for so long, and for as long as a session would start workers on it again."""
FORGET_LEFT_S = 120.0
"""A node that has left is listed for so long: whoever ended its daemon knows of it."""
LEFT = "its daemon was ended there"
"""The reason of a node that has said itself that it leaves."""
REVOKED = "it was revoked (`motley nodes revoke`)"
"""The reason of a node that somebody has shut out."""
CONNECTION_ENDED = "its connection ended"
"""The reason of a node whose stream is no more, without a word: its daemon was killed, say, or the network was cut."""
COLOURS = 8
"""How many colours the page has for nodes."""


class HelloError(Exception):
    """A Hello that cannot be accepted; the message says why."""


class NameTakenError(Exception):
    """A live node has this name already."""


class EngineFailure(NamedTuple):
    """An engine has failed: when, and what it has said."""

    at: float
    why: str


@dataclass
class Node:
    """A registered node: what it has said of itself, and whether it is still there."""

    id: str
    name: str
    address: str
    version: str
    capabilities: Capabilities
    colour: int
    """One of `COLOURS`, for as long as the table knows the name."""
    joined: float
    last_sign: float
    """When it last said anything."""
    process: str = ""
    """Random, of its daemon, which tells that from another on the same machine; empty: it has not told."""
    protocol: int = 0
    """The newest version of the protocol that it speaks."""
    memory_available: int = 0
    """Bytes free on the machine by its last heartbeat; 0: not told yet."""
    gpus: Sequence[Gpu] = ()
    """Its GPUs, as of then."""
    failed_engines: dict[tuple[str, str, str], EngineFailure] = field(default_factory=dict)
    """By engine, model and the format of caches: what has failed there lately, and is not chosen again for a while."""
    lease: Lease = field(default_factory=Lease)
    """How a device there stands that somebody takes back for a while."""
    jobs: Sequence[JobEvent] = ()
    """Of every training worker that ran there when it joined, how it stood."""
    kept_jobs: Sequence[str] = ()
    """Jobs of which files were kept there then."""
    failed: Sequence[RankEvent] = ()
    """Failures of ranks there, of which some may not have been heard before it joined."""
    lost: str = ""
    """Why the node is lost; empty while it is alive."""
    lost_at: float = 0.0

    @property
    def alive(self) -> bool:
        return not self.lost

    @property
    def left(self) -> bool:
        """Whether the node is gone because somebody ended its daemon."""
        return self.lost == LEFT

    def taken_back(self, on_gpu: bool) -> str:
        """Why ranks may not compute on its GPU, or else its processor, as somebody has taken it back; empty: they
        may. To follow the name of the node."""
        lease = self.lease
        if lease.state not in ("draining", "leased") or not covers(lease.device, on_gpu):
            return ""
        what_for = f" for {lease.reason}" if lease.reason else ""
        until = time.strftime("%H:%M", time.localtime(lease.expires_at))
        return f"has lent {device_words(lease.device)} to {lease.holder!r}{what_for} until {until}"

    @property
    def state(self) -> str:
        """For people: ``alive``, ``left`` or ``lost``."""
        return "alive" if self.alive else "left" if self.left else "lost"


def what_became(reason: str) -> str:
    """``has left: ...`` or ``is lost: ...``, to follow the name of a node in messages.

    Args:
        reason: why the node is lost.
    """
    return f"{'has left' if reason == LEFT else 'is lost'}: {reason}"


class NodeTable:
    """All nodes that are in the mesh, or were until lately."""

    def __init__(self, clock: Callable[[], float], elapsed: Callable[[], float] | None = None) -> None:
        """
        Args:
            clock: monotonic, in seconds.
            elapsed: likewise, but goes on while this machine sleeps; None: `clock` does.
        """
        self._clock = clock
        self._elapsed = elapsed or clock
        self._nodes: dict[str, Node] = {}
        self._flapping = Flapping(clock)
        self._looked: tuple[float, float] | None = None
        """When somebody last looked, by both clocks: until then this process did not stand still."""
        self._resumed = -math.inf
        """When this process was last seen to have stood still, ..."""
        self._still_s = 0.0
        """... and for how long."""

    def __iter__(self) -> Iterator[Node]:
        """All nodes, lost ones too, in the order they first joined."""
        return iter(self._nodes.values())

    def known_as(self, name: str) -> Node | None:
        """The node of a name, whether it is alive or not."""
        return next((node for node in self if node.name == name), None)

    def check(self, hello: Hello) -> None:
        """Make sure that a node could be registered now.

        Raises:
            HelloError: a field is missing or makes no sense.
            NameTakenError: a live node has the name.
        """
        bandwidth = hello.capabilities.memory_bandwidth
        joins = set("+@") & set(hello.name)  # the names of a group; what is asked of a node, and its name
        if not hello.name or not hello.name.isprintable() or len(hello.name) > 64 or joins or hello.name in (".", ".."):
            what = "1 to 64 printable characters, none of them + or @, and is not . or .."
            raise HelloError(f"a node's name has {what}, not {hello.name!r}; use --name")
        if not hello.address:
            raise HelloError("the Hello has no address under which other nodes reach this one")
        zone = hello.capabilities.zone
        if not zone.isprintable() or len(zone) > 64:
            raise HelloError(f"a zone has up to 64 printable characters, not {zone!r}; use --zone")
        if not (math.isfinite(bandwidth) and bandwidth > 0):
            raise HelloError(f"the measured memory bandwidth must be above 0 bytes/s, not {bandwidth}")
        engines = hello.capabilities.engines
        for each in chain(hello.capabilities.speeds, *(engine.speeds for engine in engines)):
            if not all(math.isfinite(speed) and speed > 0 for speed in (each.bytes_per_s, each.row_bytes_per_s)):
                raise HelloError(f"the measured speeds of {each.format!r} must be above 0 bytes/s")
        if not 0 <= hello.capabilities.call_s < 1:
            raise HelloError(f"a small operation takes from 0 to 1 s, not {hello.capabilities.call_s}")
        for engine in engines:
            if not all(0 <= seconds < math.inf for seconds in (engine.layer_s, engine.host_s)):
                what = f"what a layer and a way to the host take engine {engine.name!r} is not below 0 s"
                raise HelloError(f"{what}, but {engine.layer_s} and {engine.host_s} were told")
        self.check_free(hello.name)

    def check_free(self, name: str) -> None:
        """Raise NameTakenError if a live node has this name."""
        namesake = self.known_as(name)
        if namesake is not None and namesake.alive:
            raise NameTakenError(
                f"a node named {name!r} is in the mesh already (at {namesake.address}). If that is this machine,"
                " `motley up` or `motley join` runs on it already, or has just ended: its name is free in at most"
                f" {SILENCE_S:.0f} s then. If it is another one, choose a name with --name"
            )

    def cut_off(self, name: str, process: str) -> Node | None:
        """The live node of a name, if its machine that comes back does so from a connection that is of no use any more:
        the daemon that comes is the one that had it, or it has missed a beat.

        Args:
            process: of the daemon that comes; empty: it has not told.
        """
        self._notice_standstill()
        node = self.named(name)
        if node is None or not (self.silence_s(node) > MISSED_S or (process and process == node.process)):
            return None
        return node

    def join(self, hello: Hello) -> Node:
        """Register a node; errors as `check`."""
        self.check(hello)
        namesake = self.known_as(hello.name)
        now = self._clock()
        node = Node(
            id=secrets.token_hex(4),
            name=hello.name,
            address=hello.address,
            version=hello.version,
            process=hello.process,
            protocol=hello.protocol,
            capabilities=hello.capabilities,
            colour=namesake.colour if namesake is not None else self._free_colour(hello.name),
            joined=now,
            last_sign=now,
            gpus=hello.capabilities.gpus,
            lease=hello.lease,
            jobs=hello.jobs,
            kept_jobs=hello.kept_jobs,
            failed=hello.failed,
        )
        if namesake is None:
            self._nodes[node.id] = node
        else:
            self._nodes = {one.id: one for one in (node if old is namesake else old for old in self)}
        return node

    def named(self, name: str) -> Node | None:
        """The live node of this name, if there is one."""
        return next((node for node in self if node.alive and node.name == name), None)

    def show_life(self, node_id: str) -> None:
        """A node has said something, whatever that is."""
        self._nodes[node_id].last_sign = self._clock()

    def heartbeat(self, node_id: str, memory_available: int, gpus: Sequence[Gpu] = ()) -> None:
        """A node tells what is free there; `gpus`: as they are now, empty if it does not tell."""
        node = self._nodes[node_id]
        node.memory_available = memory_available
        node.gpus = gpus or node.gpus

    def offer(self, node_id: str, budget: Budget) -> None:
        """A node lets ranks have so much memory from now on."""
        capabilities = self._nodes[node_id].capabilities
        capabilities.memory_bytes, capabilities.gpu_bytes = budget.memory_bytes, budget.gpu_bytes

    def overdue(self) -> list[Node]:
        """Live nodes that have been silent for `SILENCE_S`."""
        self._notice_standstill()
        latest = self._clock() - SILENCE_S
        return [node for node in self if node.alive and node.last_sign < latest]

    def lose(self, node_id: str, reason: str) -> None:
        """A node is gone."""
        node, now = self._nodes[node_id], self._clock()
        self._notice_standstill()
        if reason != LEFT and now - self._resumed < SILENCE_S:
            reason += f", after the orchestrator itself had stood still for {self._still_s:.0f} s (was it asleep?)"
        node.lost, node.lost_at = reason, now
        self._flapping.went(node.name)

    def _notice_standstill(self) -> None:
        """If this process itself stood still (a laptop asleep, say), that is not the nodes' silence."""
        now = self._clock(), self._elapsed()
        before, self._looked = self._looked or now, now
        if now[1] - before[1] > STANDSTILL_S:
            self._resumed, self._still_s = now[0], now[1] - before[1]
            for node in self:
                node.last_sign += now[0] - before[0]

    def note_failed_engine(self, node_id: str, engine: str, why: str, model: str, cache_format: str) -> None:
        """Have no request get an engine for a model with such caches on a node for `FORGIVEN_S`, but those that name
        it."""
        if (node := self._nodes.get(node_id)) is not None:
            node.failed_engines[engine, model, cache_format] = EngineFailure(self._clock(), why)

    def forget(self, wanted: Container[str]) -> None:
        """Drop the nodes that have been gone for `FORGET_S` or `FORGET_LEFT_S`, but those `wanted` by name; and what
        engines have failed with, after `FORGIVEN_S`."""
        for node in list(self):
            for key, failure in list(node.failed_engines.items()):
                if self._clock() - failure.at > FORGIVEN_S:
                    del node.failed_engines[key]
            patience = FORGET_LEFT_S if node.left else FORGET_S
            if not node.alive and self.gone_s(node) > patience and node.name not in wanted:
                del self._nodes[node.id]

    def aside_s(self, node: Node) -> float:
        """For how many seconds more a node is set aside, as it comes and goes; 0: it is not."""
        return self._flapping.aside_s(node.name)

    def set_aside(self, named: Container[str]) -> set[str]:
        """Ids of the live nodes that are to take no part as they come and go, unless all do.

        Args:
            named: names of nodes that take part all the same.
        """
        alive = [node for node in self if node.alive]
        aside = {node.id for node in alive if node.name not in named and self.aside_s(node)}
        return aside if len(aside) < len(alive) else set()

    def silence_s(self, node: Node) -> float:
        """Seconds since the node last said anything."""
        return max(0.0, self._clock() - node.last_sign)

    def gone_s(self, node: Node) -> float:
        """Seconds since a node left or was lost."""
        return self._clock() - node.lost_at

    def _free_colour(self, name: str) -> int:
        """The colour that a name asks for, which is the same in every mesh, or the next that no other node has."""
        taken = {node.colour for node in self}
        first = zlib.crc32(name.encode())
        return next((c for i in range(COLOURS) if (c := (first + i) % COLOURS) not in taken), first % COLOURS)
