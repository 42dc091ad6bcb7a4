"""One rank's end of a mesh: messages between two ranks, whether the others live, and how the mesh ends.

The collectives are built on it (`motley.transport.collectives`).
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self

from .errors import PeerLost, PeerTimeout, TransportError, UsageError
from .exchange import Exchange
from .links.link import LAST_WORDS_S, IncomingMessage, Link, part_in_peace, part_with_blame
from .links.liveness import BEAT_S, Pulse
from .links.wire import MAX_MESSAGE, Op, pack_abort, pack_frame
from .stats import Stats

DEADLINE_S = 600.0
"""How long a peer may be silent in a collective if nobody says otherwise: one that lives, but never comes."""


class Endpoint:
    """One rank's end of a mesh. Not thread-safe: one thread owns it.

    Every method that talks to a peer raises `PeerLost` when any peer is gone, `PeerTimeout` when one is silent beyond
    the deadline, `ProtocolError` when one sends what it must not, and `UsageError` when called wrongly. After any but a
    `UsageError` the mesh is broken: all links are closed, the peers have been told whom to blame, and every later call
    raises the same error.

    As a context it ends with `close`, or, if an error leaves it, by telling the peers that this rank gave up.

    Attributes:
        deadline_s: seconds that a peer may be silent in a collective.
        stats: where the time of this rank goes.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], pulse: Pulse | None, spin_s: float | None) -> None:
        """
        Args:
            links: a link to every other rank, by rank.
            pulse: finds peers that are dead; None: only the links themselves tell.
            spin_s: how many seconds a wait spins before it sleeps; None: as long as that is likely to be worth it.
        """
        self.deadline_s = DEADLINE_S
        self.stats = Stats(rank, len(links) + 1)
        self._rank = rank
        self._size = len(links) + 1
        self._links = dict(sorted(links.items()))
        self._pulse = pulse
        self._exchange = Exchange(list(self._links.values()), pulse, spin_s, outnumbered=True)
        self._started: deque[Any] = deque()
        """Collectives that must be finished before any call but that which starts another one, the first one first."""
        self._broken: TransportError | None = None

    def __repr__(self) -> str:
        state = "open" if self._broken is None else f"closed: {self._broken}"
        return f"<{type(self).__name__} rank {self._rank} of {self._size}, {state}>"

    @property
    def rank(self) -> int:
        """Which of the ranks this one is, from 0 on."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks the mesh has."""
        return self._size

    def share_cores(self, *, outnumbered: bool) -> None:
        """Say whether there are more ranks than cores here, which decides how calls wait; assumed until told."""
        self._exchange.share_cores(outnumbered=outnumbered)

    # -- messages ---------------------------------------------------------------------------------------------------

    def send(self, data: bytes | bytearray | memoryview, to: int) -> None:
        """Send a message of up to `MAX_MESSAGE` bytes to rank `to`, which must `recv` it before the next collective.

        Never waits for the receiver: what the system does not take at once is kept and leaves during later calls.
        """
        self.stats.enter()
        link = self._link(to)
        payload = memoryview(data).cast("B")
        if len(payload) > MAX_MESSAGE:
            raise UsageError(f"a message of {len(payload)} bytes; at most {MAX_MESSAGE} can be sent")
        frame = pack_frame(Op.MESSAGE, payload, link.messages_out)
        link.messages_out += 1
        try:
            link.push(memoryview(frame))
        except BaseException as error:
            self._give_up(error)
        self.stats.restart()

    def flush(self) -> None:
        """Wait until the messages that were sent have left: they need not wait then for this rank's next call."""
        self.stats.enter()
        self._check_open()
        links = list(self._links.values())
        if any(link.unsent for link in links):
            try:
                self._exchange.run([], None, links, self.deadline_s, "sending a message")
            except BaseException as error:
                self._give_up(error)
        self.stats.restart()

    def recv(self, source: int, deadline_s: float | None) -> bytes:
        """Receive the next message of rank `source`, which may be silent for `deadline_s` seconds; None: for ever."""
        self.stats.enter()
        return self._recv(source, deadline_s)

    def wait_message(self, source: int, seconds: float) -> bool:
        """Wait up to `seconds` until rank `source` has sent something, which `recv` then gets; returns whether it has.

        The time of this call counts nowhere in `stats`.

        Raises:
            PeerLost: any peer is gone.
        """
        link = self._link(source)
        try:
            return self._exchange.wait(link, seconds)
        except BaseException as error:
            self._give_up(error)
        finally:
            self.stats.restart()

    def broadcast_message(
        self, data: bytes | bytearray | memoryview | None, root: int, deadline_s: float | None
    ) -> bytes:
        """Hand a message of rank `root` to all ranks: the root gives `data`, the others None, and all get it.

        The others wait for it up to `deadline_s` seconds; None: for ever. The time before and in this call counts
        nowhere in `stats`: a step begins here, and ranks idle until then.
        """
        self.stats.restart()
        if root != self._rank:
            return self._recv(root, deadline_s)
        if data is None:
            raise UsageError("broadcast_message: the root must give the message")
        for rank in self._links:
            self.send(data, rank)
        self.stats.restart()
        return bytes(data)

    def _recv(self, source: int, deadline_s: float | None) -> bytes:
        link = self._link(source)
        try:
            incoming = IncomingMessage(link)
            self._exchange.run([incoming], None, (), deadline_s, "waiting for a message")
        except BaseException as error:
            self._give_up(error)
        link.messages_in += 1
        self.stats.restart()
        return bytes(incoming.payload)

    # -- life -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Look whether all peers are still there, while nothing is expected of them.

        Raises:
            PeerLost: one is gone.
        """
        self._check_open()
        try:
            for link in self._links.values():
                link.has_words()
            if self._pulse is not None:
                self._pulse.raise_if_lost()
        except BaseException as error:
            self._give_up(error)

    def close(self) -> None:
        """Leave the mesh and close all sockets; peers that expect more of this rank raise `PeerLost`."""
        if self._broken is None:
            self._broken = UsageError("this communicator is closed")
            try:
                part_in_peace(list(self._links.values()))
            finally:
                if self._pulse is not None:
                    self._pulse.close()

    def interrupt(self) -> None:
        """Let a call that another thread is in fail at once, as if all peers had gone; `close` it afterwards."""
        for link in list(self._links.values()):
            with suppress(OSError):  # it is gone already
                link.socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._broken is None:
            self._break(error)
        self.close()

    # -- what a call is checked for ---------------------------------------------------------------------------------

    def _link(self, rank: int) -> Link:
        """The link to a peer, for a call that begins now."""
        self._check_open()
        link = self._links.get(rank)
        if link is None:
            raise UsageError(f"rank {rank} is no peer of rank {self._rank} in a mesh of {self._size}")
        return link

    def _check_open(self) -> None:
        """Refuse a call on a mesh that is closed or busy with a collective."""
        if self._broken is not None:
            raise self._broken
        if self._started:
            raise UsageError("a collective that was started must be finished before the next call")

    # -- how it ends ------------------------------------------------------------------------------------------------

    def _give_up(self, error: BaseException) -> NoReturn:
        """Break the mesh and raise `error`, or the loss that is behind it."""
        if self._broken is None:
            error = self._truth(error)
            self._break(error)
        raise error

    def _truth(self, error: BaseException) -> BaseException:
        """`error`, but of the rank that is to blame: a connection that ended may be that of a survivor, who gave up."""
        if self._pulse is not None and isinstance(error, PeerLost):
            loss = self._pulse.first_loss(LAST_WORDS_S)
            if loss is not None and loss.rank != error.rank:
                return loss
        return error

    def _hindmost(self, error: PeerTimeout) -> PeerTimeout:
        """`error`, but of the rank that is behind in its calls: who is waited for may wait for it itself, as in a ring.

        Beats older than the wait would tell of the calls before: a deadline must leave time for new ones.
        """
        if self._pulse is None or error.seconds < 2 * BEAT_S:
            return error
        last = self._pulse.last(error.rank)
        if last == error.rank:
            return error
        return PeerTimeout(last, error.seconds, f"it is behind in its calls; {error.what} of rank {error.rank}")

    def _break(self, error: BaseException) -> None:
        """Close all links for good and tell the peers whom to blame."""
        of_python = type(error).__module__ == "builtins"  # whose words say little without the name
        why = repr(error) if of_python else str(error) or repr(error)
        if isinstance(error, TransportError):
            self._broken = error
        else:
            self._broken = UsageError(f"the communicator was closed: {why}")
        blamed, finder = self._broken.rank, getattr(self._broken, "finder", None)
        if blamed is None or (self._pulse is not None and self._pulse.accused):  # or peers would be told two names
            blamed, finder = self._rank, None
        try:
            if self._pulse is not None:  # first: its connections are never full
                self._pulse.close(pack_abort(blamed, why, finder))
        finally:
            part_with_blame(list(self._links.values()), blamed, why, finder)
