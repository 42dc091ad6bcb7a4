"""Connections on their way to become links: those that a rank dials until they succeed, and those it accepts.

All of them go on side by side, as far as the bytes that are there reach, so a stranger that talks nonsense, or nothing,
delays nobody: it is refused and logged.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

from ..errors import UsageError
from .link import Link, Waitable, close_gently, tune
from .listening import Listener, join_address, split_address
from .security import Plain, Stream, Tls, explain
from .wire import Handshake, Membership, Purpose, Refusal

log = logging.getLogger(__name__)

MAX_RANKS = 64
"""Ranks of a mesh at most: every pair has links."""
MAX_SESSION = 256
"""Longest id of a session, in bytes: it must fit in a handshake."""
REDIAL_S = 0.1
"""Pause before a dial that was refused is tried again: the peer may still be starting."""
ANSWER_S = 8.0
"""A machine that has not even refused a connection for so long cannot be reached, nor can a name that was looked up for
so long."""
REPEAT_S = 2.0
"""A connection that nothing has answered for so long is tried anew, at another of the name's addresses if there are."""
STRANGER_S = 5.0
"""How long an accepted connection may take for its handshake."""
LOG_LINES, LOG_S = 20, 60.0
"""So many refused connections at most are logged one by one in so many seconds; others are counted."""
MAX_STRANGERS = 64
"""Accepted connections in their handshake at one time; a further one takes the place of the oldest."""


def check_membership(membership: Membership) -> None:
    """Refuse a membership with which no handshake could succeed.

    Raises:
        UsageError: which of its fields is wrong, and why.
    """
    if not 0 <= membership.rank < membership.size <= MAX_RANKS:
        raise UsageError(f"rank {membership.rank} of {membership.size}: ranks are 0 to size - 1, at most {MAX_RANKS}")
    if not 0 <= membership.epoch < 1 << 32:
        raise UsageError(f"epoch {membership.epoch} is not a 32-bit number")
    if len(membership.agreement) != 32:
        raise UsageError(f"the agreement is a SHA-256 digest of 32 bytes, not {len(membership.agreement)}")
    if len(membership.secret) < 16:
        raise UsageError(f"a secret of {len(membership.secret)} bytes can be guessed; use at least 16 random ones")
    if len(membership.session.encode()) > MAX_SESSION:
        raise UsageError(f"the session id is longer than {MAX_SESSION} bytes")


class Arrival(NamedTuple):
    """A connection has become a link."""

    purpose: Purpose
    link: Link


class Failure(NamedTuple):
    """A peer cannot be reached: it has `refused` this rank for good, nothing answers there, or its time is over."""

    rank: int
    reason: str
    refused: bool = False


@dataclass(eq=False)
class _Dial:
    """A peer that is to be reached."""

    rank: int
    purpose: Purpose
    address: str
    deadline: float
    due: float = 0.0
    """When to try next; never, while a connection is under way."""
    targets: Iterator[tuple[Any, ...]] | None = None
    answer_s: float = REPEAT_S
    """How long a connection may take until the peer's system answers."""
    first_answer_by: float = math.inf
    """When something there must have answered, be it with a refusal; never, once it has."""
    refused_s: float = math.inf
    """How long it may be refused and nothing else."""
    refused_by: float = math.inf
    """When it has been refused for that long; never, while it is not."""

    @property
    def next_step(self) -> float:
        """When there is something to do for it, unless something comes before."""
        return min(self.due, self.deadline, self.first_answer_by, self.refused_by)


@dataclass(eq=False)
class _Attempt:
    """A connection on its way to become a link."""

    socket: socket.socket
    stream: Stream
    """What the handshake is spoken through: the socket, or what encrypts it."""
    address: str
    handshake: Handshake
    dial: _Dial | None
    """Who is at the other end if this rank dialled; the peer has yet to say who it is otherwise."""
    expires: float
    connecting: bool
    authenticated: bool = False

    def fileno(self) -> int:
        """The descriptor of the connection, for the system's poll."""
        return self.socket.fileno()

    def heard_system(self) -> None:
        """Note that the system at the other end has answered."""
        self.expires = math.inf  # the dial's own deadline counts
        if self.dial is not None:
            self.dial.first_answer_by = math.inf

    def advance(self, security: Tls | Plain) -> int:
        """Go on as far as the bytes that are there reach; the peer's proven rank when the handshake is done.

        Raises:
            BlockingIOError: the peer has to say more.
            OSError, Refusal: it has failed.
        """
        if self.connecting:
            self._check_connected()
        if not self.authenticated:
            self.handshake.certified = security.authenticate(self.stream)
            self.authenticated = True
            self._say(self.handshake.start())
        while self.handshake.peer is None:
            data = self.stream.recv(self.handshake.missing)
            if not data:
                raise ConnectionResetError("it closed the connection during the handshake")
            self._say(self.handshake.receive(data))
        return self.handshake.peer

    def refuse(self, refusal: Refusal) -> None:
        """Tell the peer why, as far as it can understand that, and close the connection."""
        if self.authenticated or self.stream is self.socket:
            with suppress(OSError):
                self._say(refusal.reply)
        close_gently(self.stream)

    def _say(self, words: bytes) -> None:
        """Send all of these few words, for which a connection always has room."""
        try:
            sent = self.stream.send(memoryview(words)) if words else 0
        except BlockingIOError:
            sent = 0
        if sent < len(words):
            raise ConnectionAbortedError("it does not take even a handshake")

    def _check_connected(self) -> None:
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, _told(error))
        if self.socket.getsockname() == self.socket.getpeername():
            raise ConnectionRefusedError("nobody listens there")  # TCP met itself: a simultaneous open
        self.connecting = False
        self.heard_system()
        if self.dial is not None:
            self.dial.refused_by = math.inf


def _told(error: int) -> str:
    """What a number of an error of a socket means, which Windows' C library does not know: "Unknown error"."""
    if sys.platform == "win32":
        from ctypes import FormatError

        return FormatError(error).strip().rstrip(".")
    else:
        return os.strerror(error)


class Connector:
    """All connections of a rank that are on their way to become links.

    Its owner waits for `readers` and `writers`, at most until `due`, and calls `step` with those that are ready.

    Attributes:
        trouble: per rank, what went wrong last.
    """

    def __init__(
        self,
        membership: Membership,
        security: Tls | Plain,
        listener: Listener | None,
        expected: Collection[tuple[int, Purpose]],
        wrap: Callable[[int, Stream], Stream] | None,
    ) -> None:
        """
        Args:
            listener: stays the caller's; None accepts nobody.
            expected: who may dial this rank, and what for; may change. Nobody is accepted while it is empty.
            wrap: see `connect_mesh`.
        """
        self.trouble: dict[int, str] = {}
        self._membership = membership
        self._security = security
        self._listener = listener
        self._expected = expected
        self._wrap = wrap
        self._dials: dict[int, _Dial] = {}
        self._targets: dict[str, list[tuple[Any, ...]]] = {}
        """By address, what it has resolved to: that is asked once, for the answer may block."""
        self._attempts: set[_Attempt] = set()
        self._logged_since = -math.inf
        self._logged = 0  # strangers that were refused since then

    def dial(
        self,
        rank: int,
        purpose: Purpose,
        address: str,
        deadline: float = math.inf,
        answer_s: float = REPEAT_S,
        refused_s: float = math.inf,
    ) -> None:
        """Reach peer `rank` at `address` from the next `step` on, trying again until `deadline` (monotonic, seconds).

        For one purpose at a time: the link for the other is dialled when that for the first is there.

        Args:
            deadline: it fails earlier, if nothing at all answers there for `ANSWER_S`, or the name is not known.
            answer_s: try again when the peer's system has not answered for so many seconds. The system itself repeats
                what is lost, but at ever longer intervals.
            refused_s: it fails when every connection has been refused for so many seconds: endless where the peer may
                still be starting.

        Raises:
            UsageError: it is no address.
        """
        split_address(address)
        self.trouble.pop(rank, None)
        first_answer_by = time.monotonic() + ANSWER_S
        self._dials[rank] = _Dial(
            rank, purpose, address, deadline, answer_s=answer_s, first_answer_by=first_answer_by, refused_s=refused_s
        )

    def turn_to(self, listener: Listener | None, expected: Collection[tuple[int, Purpose]]) -> None:
        """Accept others from now on, and elsewhere; what is on its way is given up."""
        self.close()
        self._listener, self._expected = listener, expected

    def cancel(self, rank: int) -> None:
        """Give up reaching peer `rank`, if it is being reached."""
        dial = self._dials.pop(rank, None)
        for attempt in [attempt for attempt in self._attempts if dial is not None and attempt.dial is dial]:
            self._drop(attempt)

    def is_dialling(self, rank: int) -> bool:
        """Whether this peer is being reached."""
        return rank in self._dials

    @property
    def busy(self) -> bool:
        """Some connection is on its way."""
        return bool(self._attempts or self._dials)

    @property
    def readers(self) -> list[Waitable]:
        """What has something to read when `step` can go on."""
        reading: list[Waitable] = [attempt for attempt in self._attempts if not attempt.connecting]
        if self._listener is not None and self._expected:
            reading.append(self._listener.socket)
        return reading

    @property
    def writers(self) -> list[Waitable]:
        """What has room to write when `step` can go on."""
        return [attempt for attempt in self._attempts if attempt.connecting]

    @property
    def due(self) -> float:
        """When to call `step` at the latest, by the monotonic clock."""
        expiries = (attempt.expires for attempt in self._attempts)
        return min((*expiries, *(dial.next_step for dial in self._dials.values())), default=math.inf)

    def step(self, ready: Container[Waitable]) -> Iterator[Arrival | Failure]:
        """Go on with all that is ready or due; yields what comes of it, one by one, as it happens."""
        if self._listener is not None and self._listener.socket in ready:
            self._accept()
        for attempt in [attempt for attempt in self._attempts if attempt in ready]:
            yield from self._advance(attempt)
        now = time.monotonic()
        for attempt in [attempt for attempt in self._attempts if attempt.expires <= now]:
            if attempt.dial is not None:
                self._drop(attempt)
                attempt.dial.due = now
                continue
            self._turn_away(attempt, attempt.handshake.refusal(f"no handshake within {STRANGER_S:g} s", retry=True))
        for dial in [dial for dial in self._dials.values() if dial.next_step <= now]:
            trouble = self.trouble.get(dial.rank, "no answer")
            if dial.deadline <= now:
                self.cancel(dial.rank)
                yield Failure(dial.rank, f"it could not be reached in time: {trouble} ({dial.address})")
            elif dial.first_answer_by <= now:
                self.cancel(dial.rank)
                why = f"nothing has answered at {dial.address} for {ANSWER_S:g} s ({trouble})"
                yield Failure(dial.rank, f"{why}; is that machine on, and do the firewalls let the two connect?")
            elif dial.refused_by <= now:
                self.cancel(dial.rank)
                why = f"{dial.address} has refused all connections for {dial.refused_s:g} s ({trouble})"
                yield Failure(dial.rank, f"{why}; has that rank ended, or does a firewall turn this one away?")
            elif (unknown := self._dial(dial)) is not None:
                self.cancel(dial.rank)
                yield Failure(dial.rank, unknown)

    def close(self) -> None:
        """Close all connections that are no links."""
        self._dials.clear()
        for attempt in tuple(self._attempts):
            self._drop(attempt)

    def _dial(self, dial: _Dial) -> str | None:
        """Begin a connection; the reason if that will never be possible."""
        try:
            if dial.targets is None:
                dial.targets = cycle(self._resolve(dial.address))
            family, kind, protocol, _, target = next(dial.targets)
            connection = socket.socket(family, kind, protocol)
        except socket.gaierror as error:
            if error.errno == socket.EAI_NONAME:
                host, _ = split_address(dial.address)
                return f"this machine knows nobody by the name {host!r} ({error.strerror}); use its address instead"
            self._redial(dial, f"its name cannot be looked up: {error.strerror}")
            return None
        except OSError as error:
            self._redial(dial, str(error))
            return None
        tune(connection)
        stream = self._security.protect(connection, dials=True)
        handshake = Handshake(self._membership, {(dial.rank, dial.purpose)}, dials_for=dial.purpose)
        expires = time.monotonic() + dial.answer_s
        attempt = _Attempt(connection, stream, dial.address, handshake, dial, expires, connecting=True)
        self._attempts.add(attempt)
        dial.due = math.inf
        try:
            connection.connect(target)
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(attempt)
            self._failed(attempt, dial, error)
        return None

    def _resolve(self, address: str) -> list[tuple[Any, ...]]:
        if address not in self._targets:
            host, port = split_address(address)
            self._targets[address] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return self._targets[address]

    def _failed(self, attempt: _Attempt, dial: _Dial, error: OSError) -> None:
        """A connection could not be made, or did not last; dial once more."""
        if isinstance(error, ConnectionRefusedError):
            attempt.heard_system()
            dial.refused_by = min(dial.refused_by, time.monotonic() + dial.refused_s)
        self._redial(dial, str(error))

    def _redial(self, dial: _Dial, why: str) -> None:
        self.trouble[dial.rank] = why
        dial.due = time.monotonic() + REDIAL_S

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.socket.accept()
            address = _peer_address(connection)
        except OSError:  # it has gone already
            return
        strangers = [attempt for attempt in self._attempts if attempt.dial is None]
        if len(strangers) >= MAX_STRANGERS:  # whoever has waited longest is least likely to be a rank
            oldest = min(strangers, key=lambda attempt: attempt.expires)
            self._turn_away(oldest, oldest.handshake.refusal("too many connections at a time", retry=True))
        tune(connection)
        stream = self._security.protect(connection, dials=False)
        handshake = Handshake(self._membership, self._expected)
        expires = time.monotonic() + STRANGER_S
        self._attempts.add(_Attempt(connection, stream, address, handshake, None, expires, connecting=False))

    def _advance(self, attempt: _Attempt) -> Iterator[Arrival | Failure]:
        try:
            arrival = self._complete(attempt, attempt.advance(self._security))
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            attempt.stream = attempt.socket  # TLS has sent its alert; a peer that knows nothing of TLS is told as well
            yield from self._refuse(attempt, attempt.handshake.refusal(explain(error)))
        except OSError as error:
            self._drop(attempt)
            if attempt.dial is not None:
                self._failed(attempt, attempt.dial, error)
        except Refusal as refusal:
            yield from self._refuse(attempt, refusal)
        else:
            yield arrival

    def _complete(self, attempt: _Attempt, rank: int) -> Arrival:
        purpose = attempt.handshake.purpose
        assert purpose is not None
        if attempt.dial is None and (rank, purpose) not in self._expected:  # two claimed it and both hold the secret
            raise attempt.handshake.refusal(f"rank {rank} is connected already")
        is_local = attempt.socket.getpeername()[0] == attempt.socket.getsockname()[0]
        stream = attempt.stream if self._wrap is None else self._wrap(rank, attempt.stream)
        self._attempts.remove(attempt)
        if attempt.dial is not None:
            del self._dials[rank]
        return Arrival(purpose, Link(self._membership.rank, rank, attempt.address, stream, is_local=is_local))

    def _refuse(self, attempt: _Attempt, refusal: Refusal) -> Iterator[Failure]:
        """Tell the peer why, log it, and go on - unless the peer is one that this rank needs and cannot have."""
        dial = attempt.dial
        if dial is None:
            self._turn_away(attempt, refusal)
            return
        self._attempts.discard(attempt)
        attempt.refuse(refusal)
        if refusal.retry:
            self._redial(dial, str(refusal))
        else:
            log.error("%s cannot use rank %d at %s: %s", self._membership, dial.rank, attempt.address, refusal)
            del self._dials[dial.rank]
            yield Failure(dial.rank, f"{refusal} ({attempt.address})", refused=True)

    def _turn_away(self, stranger: _Attempt, refusal: Refusal) -> None:
        self._attempts.discard(stranger)
        stranger.refuse(refusal)
        claimed = stranger.handshake.claimed
        if claimed is not None:
            self.trouble[claimed] = f"refused: {refusal}"
        now = time.monotonic()
        if now - self._logged_since > LOG_S:
            if self._logged > LOG_LINES:
                log.warning("%s refused %d more connections", self._membership, self._logged - LOG_LINES)
            self._logged_since, self._logged = now, 0
        self._logged += 1
        if self._logged <= LOG_LINES:
            log.warning("%s refused the connection from %s: %s", self._membership, stranger.address, refusal)

    def _drop(self, attempt: _Attempt) -> None:
        self._attempts.discard(attempt)
        close_gently(attempt.stream)


def _peer_address(connection: socket.socket) -> str:
    host, port, *_ = connection.getpeername()
    return join_address(host, port)
