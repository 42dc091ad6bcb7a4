"""A node's daemon: measure the machine, join the mesh, stay in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from motley.daemon.lease.file import LeaseFile
from motley.daemon.lease.lease import LIMIT_S
from motley.daemon.lease.rules import YieldTo
from motley.daemon.node.joining.control import AskedToLeave, Control, NameTaken, OrchestratorLost, TokenRefused, ask_in
from motley.daemon.node.joining.membership import Membership, find, forget
from motley.daemon.node.joining.trust import CERTIFICATE_NAME, JoinToken, NotThere, TrustError, check_name, open_channel
from motley.daemon.node.network.relaying import Relays
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.survey.capabilities import measure, tell_when
from motley.daemon.node.survey.engines import installed_engines
from motley.daemon.node.survey.speeds import compute_speed
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.training import Trainings, cannot_train, tickets_of
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb
from motley.protocol.address import parse_address

logger = logging.getLogger(__name__)

KEEP_S = 3600.0
"""An orchestrator that has been away for so long is not waited for any more: the memory is wanted."""
RETRY_S = (1.0, 2.0, 4.0, 8.0)
"""Seconds between attempts to return to an orchestrator that was lost; the last pause repeats."""


@dataclass(frozen=True)
class DaemonConfig:
    """How a daemon runs.

    Attributes:
        orchestrator: ``host:port`` of the orchestrator's control plane.
        token: a join token, or what `motley.daemon.node.joining.membership` has in its place.
        meshes: folder for what is kept of meshes that this machine belongs to; None: nothing is.
        name: unique in the mesh; by default the host's name.
        advertise: the address under which other nodes reach this one; by default that of the interface which leads
            to the orchestrator.
        zone: what fails together with this machine; empty: nothing is known to.
        memory_limit: bytes that ranks may use here; by default what is available.
        threads: compute threads; by default every usable core.
        ports: the first and the last of those that rank workers listen on; (0, 0): any that are free.
        models: folder in which model names are looked up.
        cache: where shares are kept, on a real disk.
        keep_s: how long ranks are kept while the orchestrator is away, in seconds.
        wait_s: how long an orchestrator is waited for that is not there yet, in seconds.
        gpu_limit: bytes that ranks may use of its first GPU; 0: what is free there.
        lease: the file in which programs take devices back; by default the usual one of this user.
        lease_limit_s: a lease lasts so long at most, in seconds.
        yield_to: to what other programs a lease is taken by itself.
    """

    orchestrator: str
    token: str
    name: str = ""
    advertise: str = ""
    zone: str = ""
    memory_limit: int | None = None
    threads: int = 0
    ports: tuple[int, int] = (0, 0)
    models: Path | None = None
    cache: ShareCache = field(default_factory=ShareCache)
    keep_s: float = KEEP_S
    meshes: Path | None = None
    wait_s: float = 0.0
    gpu_limit: int = 0
    lease: LeaseFile = field(default_factory=LeaseFile)
    lease_limit_s: float = LIMIT_S
    yield_to: YieldTo = field(default_factory=YieldTo)

    @property
    def node_name(self) -> str:
        """What the node is called."""
        return self.name or socket.gethostname()


class Observer:
    """Watches a daemon, which calls these methods; override what is of interest."""

    def joined(self, node_id: str, settings: NodeSettings) -> None:
        """The orchestrator has welcomed this node."""

    def waits(self, why: str, retry_s: float, left_s: float) -> None:
        """The orchestrator is not there yet; another attempt follows, and more for `left_s` seconds."""

    def lost(self, why: str, retry_s: float) -> None:
        """The orchestrator is gone; another attempt follows."""

    def dismissed(self) -> None:
        """Somebody has asked this node to leave the mesh, and it does."""

    def rank(self, role: str, event: pb.RankEvent) -> None:
        """A rank or expert host of this node loads, is ready, or has ended.

        Args:
            role: ``rank 0``, say, or ``experts``.
            event: what the orchestrator is told of it.
        """


async def run_daemon(config: DaemonConfig, observer: Observer) -> None:
    """Join the mesh and stay until cancelled, or until somebody asks this node to leave; an orchestrator that is lost
    later is looked for again.

    Raises:
        TrustError: before this node has joined, nobody answers for as long as it waits, or somebody else does.
        JoinRefused: the orchestrator does not take this node.
        CacheError: the folder for shares cannot be used.
    """
    host, port = parse_address(config.orchestrator)
    given = token = JoinToken.parse(config.token)
    if config.meshes and (kept := find(config.meshes, given.fingerprint, config.node_name)):
        token = JoinToken.parse(kept.token)
    await check_name(host)  # before anything that takes long
    await _ask_first(config, host, port, given, token, observer)
    address = config.advertise or await asyncio.to_thread(_address_towards, host, port)
    engines = await installed_engines()
    capabilities = await asyncio.to_thread(measure, engines, config.memory_limit, config.threads or None)
    capabilities.zone = config.zone
    capabilities.gpu_bytes = config.gpu_limit
    capabilities.cannot_train = cannot_train()
    tell_when(capabilities)
    await asyncio.to_thread(config.cache.prepare)
    if speed := await compute_speed(config.threads or capabilities.cores, config.cache.folder):
        capabilities.speeds.extend(pb.FormatSpeed(**asdict(each)) for each in speed.formats)
        capabilities.call_s = speed.call_s
    settings = NodeSettings(
        name=config.node_name,
        address=address,
        capabilities=capabilities,
        models=config.models,
        cache=config.cache,
        threads=config.threads or capabilities.cores,
        ports=config.ports,
    )
    attempt = 0
    joined_once = False
    alone_since = 0.0  # when the orchestrator was lost; 0: it is there

    certificate = ""

    def joined(welcome: pb.Welcome, settings: NodeSettings) -> None:
        nonlocal attempt, joined_once, alone_since, token
        attempt, joined_once, alone_since = 0, True, 0.0
        token = JoinToken(welcome.key or token.secret, token.fingerprint)
        if config.meshes:
            _keep(config, welcome, token, certificate, config.meshes)
        observer.joined(welcome.node_id, settings)

    ranks = Ranks(settings, observer.rank)
    shares = config.cache.folder
    leasing = Leasing(config.node_name, ranks, config.lease, config.lease_limit_s, config.yield_to, shares)
    relays = Relays()
    trainings = Trainings(settings, leasing, tickets_of(config.lease))
    await leasing.look()
    following = asyncio.create_task(leasing.follow())
    began = time.monotonic()
    try:
        while True:
            try:
                channel, certificate = await open_channel(host, port, token)
                async with channel:
                    await Control(settings, ranks, leasing, relays, trainings).stay(channel, token.secret, joined)
            except AskedToLeave:
                observer.dismissed()
                return
            except TokenRefused:
                if config.meshes and (kept := find(config.meshes, token.fingerprint, config.node_name)):
                    forget(config.meshes, kept)  # this machine was revoked: it needs a token, or a code
                if joined_once or token == given:
                    raise
                token = given
            except (TrustError, OrchestratorLost, NameTaken) as error:
                pause = RETRY_S[min(attempt, len(RETRY_S) - 1)]
                attempt += 1
                if not joined_once:
                    left_s = began + config.wait_s - time.monotonic() - pause
                    if not isinstance(error, NotThere) or left_s < 0:
                        raise
                    observer.waits(str(error), pause, left_s)
                    await asyncio.sleep(pause)
                    continue
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since >= config.keep_s:
                    await ranks.end()
                    await trainings.end()
                observer.lost(str(error), pause)
                await asyncio.sleep(pause)
    finally:
        await trainings.end()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await relays.end()
        await ranks.end()


async def _ask_first(
    config: DaemonConfig, host: str, port: int, given: JoinToken, token: JoinToken, observer: Observer
) -> None:
    """Raise at once what would be raised when this node joins; an orchestrator that is away may come back till then,
    which is said."""
    try:
        channel, _ = await open_channel(host, port, token)
        async with channel:
            await ask_in(channel, token.secret, config.node_name)
    except NotThere as error:
        if not config.wait_s:
            raise
        observer.waits(str(error), RETRY_S[0], config.wait_s)
    except TokenRefused:
        if token == given:
            raise
    except OrchestratorLost:
        pass


def _keep(config: DaemonConfig, welcome: pb.Welcome, token: JoinToken, certificate: str, folder: Path) -> None:
    """Write down by what this machine comes back, and how its commands reach the API."""
    membership = Membership(
        name=config.node_name,
        fingerprint=token.fingerprint,
        key=token.secret,
        orchestrator=config.orchestrator,
        api_url=welcome.api_url,
        api_trust=welcome.api_trust.decode() or certificate,
        api_name="" if welcome.api_trust else CERTIFICATE_NAME,
    )
    try:
        membership.keep(folder)
    except OSError as error:
        logger.warning("cannot keep in %s that this machine is a member of the mesh: %s", folder, error)


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the interface that leads to `host` (nothing is sent)."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    return socket.gethostname()
