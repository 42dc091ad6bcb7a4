"""Many links at once: send these frames, receive those, in whatever order the network likes.

Every wait of a mesh after bootstrap is a call of `Exchange`. It spins on non-blocking reads for a bounded time
(`motley.transport.links.waiting`) and then sleeps in the system's poll, where it also notices the end of any other
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns

from .errors import PeerTimeout
from .links.link import Incoming, Link, Waitable, wait_ready
from .links.liveness import Pulse
from .links.waiting import PARK_S, Spin


def _have_to_send(senders: Sequence[Link], marks: Mapping[Link, int] | None) -> bool:
    """Whether links have to send more, see `Exchange.run`."""
    if marks is None:
        return any(link.unsent for link in senders)
    return any(link.sent < mark for link, mark in marks.items())


class Exchange:
    """Moves frames over the links of one rank.

    Attributes:
        heard_ns: per rank, when it brought its first byte in the last run, by `perf_counter_ns`; 0 if it did not.
        prompt: all ranks that were to bring something had done so when the last run began.
    """

    def __init__(
        self,
        links: Sequence[Link],
        pulse: Pulse | None = None,
        spin_s: float | None = None,
        *,
        outnumbered: bool,
    ) -> None:
        """
        Args:
            links: to all peers of this rank.
            pulse: finds peers that are dead; None: only the links themselves tell.
            spin_s, outnumbered: see `motley.transport.links.waiting.Patience`.
        """
        self._links = tuple(links)
        self._pulse = pulse
        self._spin_s = spin_s
        self.share_cores(outnumbered=outnumbered)
        self._nobody = [0] * (1 + max((link.rank for link in links), default=0))
        self.heard_ns = self._nobody.copy()
        self.prompt = True

    def share_cores(self, *, outnumbered: bool) -> None:
        """Say whether there are more ranks than cores on this machine, and forget what waits have taught so far."""
        self._spin = Spin(outnumbered=outnumbered, spin_s=self._spin_s)

    def run(
        self,
        waiting: list[Incoming],
        follow: Callable[[Incoming], Incoming | None] | None,
        senders: Sequence[Link],
        deadline_s: float | None,
        what: str,
        beside: list[Incoming] | None = None,
        follow_beside: Callable[[Incoming], Incoming | None] | None = None,
        marks: Mapping[Link, int] | None = None,
    ) -> None:
        """Receive these frames and what follows them, and send what the links have, interleaved so that no size can
        deadlock.

        Args:
            waiting: at most one frame per link; holds those that are still to come, so that it is empty in the end.
            follow: called with each complete frame, returns the next one of its link; may push to links.
            senders: the links that must have sent all when this ends.
            deadline_s: longest time without a byte from or to any link, in seconds; None waits forever.
            what: the doing, for error messages.
            beside: frames of other links that are received too, as they come, but not waited for; `follow` may add to
                them.
            follow_beside: `follow` for these.
            marks: in place of `senders`: how many bytes links must have sent, ever, when this ends.

        Raises:
            PeerTimeout, PeerLost, ProtocolError
        """
        links, spin, pulse = self._links, self._spin, self._pulse
        heard = self.heard_ns
        heard[:] = self._nobody
        unheard = sum(not incoming.begun for incoming in waiting)
        self.prompt = False
        first = True
        idle_since = longest = 0
        quiet: set[Link] = set()  # links that have nothing to do here, and something to read for later
        while True:
            moved = False
            for incoming in tuple(waiting):
                begun = incoming.begun
                try:
                    complete = incoming.pull()
                except BlockingIOError:
                    continue
                moved = True
                if not begun and not heard[incoming.link.rank]:
                    heard[incoming.link.rank] = perf_counter_ns()
                    unheard -= 1
                if complete:
                    waiting.remove(incoming)
                    if follow is not None and (following := follow(incoming)) is not None:
                        waiting.append(following)
            if beside and self._pull(beside, follow_beside):
                moved = True
            if first:
                self.prompt = not unheard
                first = False
            unsent = [link for link in links if link.unsent]
            for link in unsent:
                moved |= link.flush()
            if moved or not idle_since:
                now = perf_counter_ns()
                if idle_since:
                    longest = max(longest, now - idle_since)
                if not waiting and not (unsent and _have_to_send(senders, marks)):
                    break
                idle_since = 0 if moved else now
                continue
            if pulse is not None and pulse.lost:
                pulse.raise_if_lost()
            now = perf_counter_ns()
            idle = now - idle_since
            if spin.goes_on(now, idle):
                continue
            remaining = PARK_S
            if deadline_s is not None:
                remaining = min(PARK_S, deadline_s - idle / 1e9)
                if remaining <= 0:
                    late = waiting[0].link if waiting else next(link for link in senders if link.unsent)
                    raise PeerTimeout(late.rank, deadline_s, f"{what} ({late.address})")
            if pulse is not None:
                pulse.awaited = lambda: [link for link in links if link not in quiet]
            self._park([incoming.link for incoming in (*waiting, *(beside or ()))], unsent, quiet, remaining)
        if pulse is not None:
            pulse.awaited = tuple
        spin.end(now, longest)

    def advance(self, coming: list[Incoming], follow: Callable[[Incoming], Incoming | None]) -> None:
        """Receive what is there of these frames and of those that follow them, and send what can leave; never waits.

        Args:
            coming, follow: as `waiting` and `follow` of `run`.

        Raises:
            PeerLost, ProtocolError
        """
        while self._pull(coming, follow):
            pass
        for link in self._links:
            if link.unsent:
                link.flush()

    def _pull(self, coming: list[Incoming], follow: Callable[[Incoming], Incoming | None] | None) -> bool:
        """Read once of each frame, and go on to those that follow; returns whether any byte came."""
        moved = False
        for incoming in tuple(coming):
            try:
                complete = incoming.pull()
            except BlockingIOError:
                continue
            moved = True
            if complete:
                coming.remove(incoming)
                if follow is not None and (following := follow(incoming)) is not None:
                    coming.append(following)
        return moved

    def wait(self, link: Link, seconds: float) -> bool:
        """Wait up to `seconds` until `link` has something to receive; returns whether it has.

        What is unsent leaves meanwhile, and other peers may send. How long this takes teaches nothing about how long to
        spin: it is up to whoever has the next step to do, not to the network.

        Raises:
            PeerLost: any peer is gone.
        """
        spin, pulse, started = self._spin, self._pulse, perf_counter_ns()
        quiet: set[Link] = set()
        while not (came := link.has_words()):
            if pulse is not None:
                pulse.raise_if_lost()
            unsent = [peer for peer in self._links if peer.unsent]
            for peer in unsent:
                peer.flush()
            now = perf_counter_ns()
            waited = now - started
            if waited >= seconds * 1e9:
                break
            if spin.goes_on(now, waited):
                continue
            if pulse is not None:
                pulse.awaited = lambda: [link]
            self._park([link], unsent, quiet, min(PARK_S, seconds - waited / 1e9))
        if pulse is not None:
            pulse.awaited = tuple
        spin.end(perf_counter_ns(), None)
        return came

    def _park(self, busy: Sequence[Link], unsent: Sequence[Link], quiet: set[Link], seconds: float) -> None:
        """Sleep until a busy link can go on; raise `PeerLost` if any other peer goes meanwhile."""
        others = [link for link in self._links if link not in busy and link not in quiet]
        watched: list[Waitable] = [*busy, *others] if self._pulse is None else [*busy, *others, self._pulse]
        ready = wait_ready(watched, [link for link in unsent if link.unsent], seconds)
        for link in others:
            if link in ready and link.has_words():
                quiet.add(link)
