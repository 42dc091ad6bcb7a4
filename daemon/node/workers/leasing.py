"""Following the lease of this machine: its ranks make way for whoever takes a device back, and may come again after.

The mesh is told at once, and has a while to do without the device (`motley.daemon.lease.states`). Then its ranks are
ended here, so that a lease is also good where no orchestrator answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.lease import LIMIT_S, Holder, Lease, LeaseError
from motley.daemon.lease.rules import Rules, Seen, YieldTo
from motley.daemon.lease.states import Course, State
from motley.daemon.machine.others import OthersOnProcessor, family, has_full_screen, others_on_gpu
from motley.daemon.node.workers.ranks import Ranks
from motley.protocol import mesh_pb2 as pb
from motley.protocol.devices import covers, device_words, is_device

POLL_S = 0.5
"""How often the file is looked at, ..."""
RULES_S = 2.0
"""... and how often other programs, if they matter."""
LENT_S = 2.0
"""What is lent to something of the mesh itself is looked after so often, ..."""
LENT_LIMIT_S = 120.0
"""... taken for no longer than this at a time, ..."""
LENT_LEFT_S = 60.0
"""... and prolonged when so much is left."""
RENEW_S = 60.0
"""A rule's lease that ends so soon is taken again, if what it was taken for goes on."""

logger = logging.getLogger(__name__)


class Leasing:
    """The lease of this machine, for as long as the daemon lives."""

    def __init__(
        self,
        node: str,
        ranks: Ranks,
        file: LeaseFile,
        limit_s: float = LIMIT_S,
        yield_to: YieldTo | None = None,
        shares: Path | None = None,
    ) -> None:
        """
        Args:
            node: this node's name.
            ranks: that make way.
            limit_s: no lease lasts longer.
            yield_to: to what a lease is taken by itself; None: to nothing.
            shares: where this node keeps shares, for commands of this machine that ask; None: they are not told.
        """
        self._rules = Rules(yield_to or YieldTo())
        self._on_processor = OthersOnProcessor()
        self._node = node
        self._ranks = ranks
        self._file = file
        self._limit_s = limit_s
        self._shares = str(shares.absolute()) if shares else ""
        self._course = Course()
        self._lease: Lease | None = None
        self._trouble = ""

    @property
    def told(self) -> pb.Lease:
        """What the orchestrator is to know."""
        course, lease = self._course, self._lease
        told = pb.Lease(state=course.state, device=course.device, trouble=self._trouble)
        if lease is not None:
            told.holder, told.reason, told.expires_at = lease.holder.name, lease.reason, lease.end(self._limit_s)
        return told

    @asynccontextmanager
    async def lent_to(self, holder: str, device: str, waits: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        """Have a device of this machine for something of the mesh itself, as other programs have it by the file; wait
        until it is free, for as long as that takes, and until ranks have made way.

        Args:
            holder: for people; nobody else is called so.
            waits: called with the reason, while there is one.

        Yields:
            what is set when somebody else has ended the lease, and has the device.
        """
        while True:
            try:
                await asyncio.to_thread(self._lend, holder, device)
            except LeaseError as error:
                waits(str(error))
                await asyncio.sleep(LENT_S)
                continue
            lost = asyncio.Event()
            renewing = asyncio.create_task(self._renew(holder, device, waits, lost))
            try:
                while not lost.is_set():
                    if (self._course.state, self._course.device) == (State.LEASED, device):
                        break
                    await asyncio.sleep(POLL_S)
                if not lost.is_set():
                    yield lost
                    return
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
                with contextlib.suppress(LeaseError):
                    lease = await asyncio.to_thread(self._file.read)
                    if lease is not None and lease.holder.name == holder:
                        await asyncio.to_thread(self._file.give, lease)

    async def _renew(self, holder: str, device: str, waits: Callable[[str], None], lost: asyncio.Event) -> None:
        """Prolong what is lent, until somebody else has it: then set `lost`."""
        while not lost.is_set():
            await asyncio.sleep(LENT_S)
            try:
                await asyncio.to_thread(self._lend, holder, device)
            except LeaseError as error:
                waits(str(error))
                lost.set()

    def _lend(self, holder: str, device: str) -> None:
        """Take a lease for something of the mesh itself, or prolong it where it ends soon.

        Raises:
            LeaseError: somebody else has one.
        """
        who, now, lease = Holder(name=holder, pid=os.getpid()), time.time(), None
        with contextlib.suppress(LeaseError):
            lease = self._file.read()
        if lease is None or lease.holder != who or lease.end(self._limit_s) - now < LENT_LEFT_S:
            lease = Lease(holder=who, granted_at=now, expires_at=now + LENT_LIMIT_S, device=device)
            self._file.take(lease, self._limit_s)

    async def follow(self) -> None:
        """Look at the file, and at what other programs do, now and then, until cancelled."""
        before, rules_due = None, 0.0
        try:
            while True:
                try:
                    if self._rules.to and time.monotonic() >= rules_due:
                        rules_due = time.monotonic() + RULES_S
                        await asyncio.to_thread(self.obey_rules)
                    await self.look()
                except Exception:  # a fault of ours, which must not leave a lease without effect for ever
                    logger.exception("following the lease of this machine")
                if before != (before := self.told):
                    await asyncio.to_thread(self._write_state)
                    self._ranks.say(lease=before)
                await asyncio.sleep(POLL_S)
        finally:
            self._file.forget(os.getpid())

    async def order(self, order: pb.LeaseOrder) -> pb.Done:
        """Do as somebody at another machine wants, who asks by the orchestrator."""
        try:
            if order.give:
                await asyncio.to_thread(self._file.give)
            elif not is_device(order.device) or not 0 < order.seconds <= self._limit_s or not order.holder:
                raise LeaseError(f"a lease is of a device, has a holder, and lasts {self._limit_s:.0f} s at most")
            else:
                await asyncio.to_thread(self._file.take, _granted(order), self._limit_s)
        except (LeaseError, ValueError) as error:
            return pb.Done(id=order.id, failure=f"node {self._node!r}: {error}")
        return pb.Done(id=order.id)

    async def look(self) -> None:
        """See whether there is a lease, and what follows from it."""
        lease, trouble = await asyncio.to_thread(self._read)
        if trouble and trouble != self._trouble:
            logger.warning("the file of leases is not followed: %s", trouble)
        self._lease, self._trouble = lease, trouble
        before = self._course
        now = time.monotonic()
        self._course = before.next(lease.device if lease else "", lambda device: bool(self._on(device)), now)
        if self._course.state is not before.state:
            logger.info("%s: %s", device_words(self._course.device or before.device), self._course.state)
        if lease is not None and self._course.overdue(now):
            message = f"{lease.holder.name!r} has taken {device_words(lease.device)} of node {self._node!r} back"
            failure = pb.Failure(code="device_leased", message=message)
            await asyncio.gather(*(self._ranks.take_away(key, failure) for key in self._on(lease.device)))

    def obey_rules(self) -> None:
        """Take a lease, or end it, as other programs here have it; somebody else's is left alone."""
        own = family()
        to = self._rules.to
        seen = Seen(
            on_gpu=others_on_gpu(own) if to.gpu else "",
            full_screen=to.full_screen and has_full_screen(),
            cpu=self._on_processor.part(own) if to.cpu else 0.0,
        )
        wanted = self._rules.wanted(seen, time.monotonic())
        name = f"the rule of node {self._node}"[:200]
        mine = self._lease if self._lease and self._lease.holder == Holder(name=name, pid=os.getpid()) else None
        now = time.time()
        try:
            if wanted is None:
                if mine is not None:
                    self._file.give(mine)
            elif (mine is None and self._lease is None) or (mine is not None and self._is_stale(mine, wanted[0], now)):
                holder = Holder(name=name, pid=os.getpid())
                device, reason = wanted
                until = now + self._limit_s
                lease = Lease(holder=holder, granted_at=now, expires_at=until, device=device, reason=reason[:200])
                self._file.take(lease, self._limit_s)
        except (LeaseError, ValueError) as error:
            logger.warning("a rule cannot change the lease: %s", error)

    def _is_stale(self, lease: Lease, device: str, now: float) -> bool:
        """Whether a rule's lease must be written anew: it is of another device, or ends soon."""
        return lease.device != device or lease.end(self._limit_s) - now < RENEW_S

    def _on(self, device: str) -> list[tuple[str, int]]:
        """The ranks that compute on a device."""
        return [key for key, places in self._ranks.places().items() if any(covers(device, gpu) for gpu in places)]

    def _read(self) -> tuple[Lease | None, str]:
        """The lease that counts, and what is wrong with the file where it holds none. One that is over is removed."""
        try:
            lease = self._file.read()
            if lease is not None and (over := lease.over(time.time(), self._limit_s, began)):
                logger.warning("the lease of %s by %r is over: %s", device_words(lease.device), lease.holder.name, over)
                self._file.give(lease)
                lease = None
        except LeaseError as error:
            return None, str(error)
        return lease, ""

    def _write_state(self) -> None:
        course, own = self._course, (os.getpid(), began(os.getpid()) or 0.0)
        told = Told(self._node, course.state, course.device, *own, self._limit_s, self._trouble, self._shares)
        try:
            self._file.tell(told)
        except LeaseError as error:
            logger.warning("other programs cannot read how leases stand: %s", error)


def _granted(order: pb.LeaseOrder) -> Lease:
    now = time.time()
    holder = Holder(name=order.holder)
    return Lease(
        holder=holder, granted_at=now, expires_at=now + order.seconds, device=order.device, reason=order.reason
    )
