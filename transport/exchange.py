"""Many links at once: send these frames, receive those, in whatever order the network likes.

Every wait of the transport after bootstrap is one call of `Exchange.run`. It spins on non-blocking reads for a bounded
time (9 us for an 8 KiB exchange against 31 us with blocking sockets, between two processes of one machine) and then
parks in the system's poll, where it also notices the end of any other rank. How long it spins is learnt (`Patience`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from time import perf_counter_ns, thread_time_ns

from .errors import PeerTimeout
from .link import Incoming, Link, Waitable, give_way, wait_ready
from .liveness import Pulse

SPIN_S = 2e-3
"""How long to spin where this rank has a core to itself: longer than ranks that share a layer are usually apart."""
CROWDED_SPIN_S = 50e-6
"""The same where it has not: a spinning rank would steal the time of the one it waits for."""
FUTILE_SPIN_S = 10e-6
"""The same when waits have lately outlasted any spinning: a peer computes."""
PROBE_NS = 20_000
"""A spin that lasts longer is checked for how much of the core this rank got."""
PARK_S = 0.5
"""Longest uninterrupted sleep, so that Ctrl-C is noticed on every system."""


class Patience:
    """How long a wait spins before it sleeps, by how long waits took lately and whether the core is shared.

    Pure: times come in, decisions come out. That ranks outnumber the cores is known from the beginning; that somebody
    else wants the core is seen in spins that got less processor time than they lasted.

    Attributes:
        budget_ns: how long to spin.
        crowded: give way to others while spinning.
    """

    __slots__ = ("_core", "_fixed_ns", "_outnumbered", "_typical_ns", "budget_ns", "crowded")

    def __init__(self, *, outnumbered: bool, spin_s: float | None = None) -> None:
        """`outnumbered`: there are more ranks than cores. `spin_s`: spin for so long, whatever happens, but at most
        `PARK_S`: only a rank that parks looks at its deadline, and for data that got lost.
        """
        self.crowded = self._outnumbered = outnumbered
        self._core = 1.0  # the part of its core that this rank gets
        self._typical_ns = 0.0
        self._fixed_ns = None if spin_s is None else int(min(spin_s, PARK_S) * 1e9)
        self._decide()

    def waited(self, nanoseconds: int) -> None:
        """A wait has taken so long, spun and slept."""
        # A single long wait is no habit: as it is clipped, it takes three in a row to be one.
        self._typical_ns += (min(nanoseconds, 4e9 * SPIN_S) - self._typical_ns) / 8
        self._decide()

    def spun(self, nanoseconds: int, processor_ns: int) -> None:
        """A part of a spin has lasted so long and got so much of the processor."""
        self._core += (min(1.0, processor_ns / nanoseconds) - self._core) / 8
        # A rank that gives way gets less of a shared core: the gap keeps the answer from flapping.
        self.crowded = self._outnumbered or self._core < (0.9 if self.crowded else 0.75)
        self._decide()

    def _decide(self) -> None:
        spin_s = CROWDED_SPIN_S if self.crowded else SPIN_S
        if self._typical_ns > SPIN_S * 1e9:
            spin_s = FUTILE_SPIN_S
        self.budget_ns = int(spin_s * 1e9) if self._fixed_ns is None else self._fixed_ns


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
        """`outnumbered`, `spin_s`: see `Patience`."""
        self._links = tuple(links)
        self._pulse = pulse
        self._spin_s = spin_s
        self.share_cores(outnumbered=outnumbered)
        self._nobody = [0] * (1 + max((link.rank for link in links), default=0))
        self.heard_ns = self._nobody.copy()
        self.prompt = True

    def share_cores(self, *, outnumbered: bool) -> None:
        """Wait anew, as is right where there are more ranks than cores, or not."""
        self._patience = Patience(outnumbered=outnumbered, spin_s=self._spin_s)
        # Windows counts in 16 ms: too coarse to see anything.
        self._probes = not outnumbered and time.get_clock_info("thread_time").resolution < 1e-6

    def run(
        self,
        waiting: list[Incoming],
        follow: Callable[[Incoming], Incoming | None] | None,
        senders: Sequence[Link],
        deadline_s: float | None,
        what: str,
    ) -> None:
        """Receive these frames and what follows them, and send what the links have, interleaved so that no size can
        deadlock.

        Args:
            waiting: at most one frame per link; holds those that are still to come, so that it is empty in the end.
            follow: called with each complete frame, returns the next one of its link; may push to links.
            senders: the links that must have sent all when this ends.
            deadline_s: longest time without a byte from or to any link, in seconds; None waits forever.
            what: the doing, for error messages.

        Raises:
            PeerTimeout, PeerLost, ProtocolError
        """
        links, patience, pulse = self._links, self._patience, self._pulse
        heard = self.heard_ns
        heard[:] = self._nobody
        unheard = len(waiting)
        self.prompt = False
        first = True
        idle_since = longest = probed_ns = probed_processor_ns = 0
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
                if not waiting and not (unsent and any(link.unsent for link in senders)):
                    break
                idle_since = 0 if moved else now
                continue
            if pulse is not None and pulse.lost:
                pulse.raise_if_lost()
            now = perf_counter_ns()
            idle = now - idle_since
            if idle >= patience.budget_ns:
                if probed_ns:
                    self._probe(probed_ns, probed_processor_ns)
                    probed_ns = 0
                remaining = PARK_S
                if deadline_s is not None:
                    remaining = min(PARK_S, deadline_s - idle / 1e9)
                    if remaining <= 0:
                        late = waiting[0].link if waiting else next(link for link in senders if link.unsent)
                        raise PeerTimeout(late.rank, deadline_s, f"{what} ({late.address})")
                if pulse is not None:
                    pulse.awaited = lambda: [link for link in links if link not in quiet]
                self._park([incoming.link for incoming in waiting], unsent, quiet, remaining)
            else:
                if idle > PROBE_NS and not probed_ns and self._probes:
                    probed_ns, probed_processor_ns = now, thread_time_ns()
                if patience.crowded:
                    give_way()
        if pulse is not None:
            pulse.awaited = tuple
        patience.waited(longest)
        if probed_ns:
            self._probe(probed_ns, probed_processor_ns)

    def wait(self, link: Link, seconds: float) -> bool:
        """Wait up to so long until `link` has something to receive; any other peer may be heard meanwhile.

        Raises:
            PeerLost: any peer is gone.
        """
        started = perf_counter_ns()
        quiet: set[Link] = set()
        while not (came := link.has_words()):
            if self._pulse is not None:
                self._pulse.raise_if_lost()
            unsent = [peer for peer in self._links if peer.unsent]
            for peer in unsent:
                peer.flush()
            waited = perf_counter_ns() - started
            if waited >= seconds * 1e9:
                break
            if waited >= self._patience.budget_ns:
                if self._pulse is not None:
                    self._pulse.awaited = lambda: [link]
                self._park([link], unsent, quiet, min(PARK_S, seconds - waited / 1e9))
            elif self._patience.crowded:
                give_way()
        if self._pulse is not None:
            self._pulse.awaited = tuple
        return came

    def _probe(self, since_ns: int, processor_ns: int) -> None:
        lasted = perf_counter_ns() - since_ns
        if lasted > PROBE_NS // 2:
            self._patience.spun(lasted, thread_time_ns() - processor_ns)

    def _park(self, busy: Sequence[Link], unsent: Sequence[Link], quiet: set[Link], seconds: float) -> None:
        """Sleep until a busy link can go on; raise `PeerLost` if any other peer goes meanwhile."""
        others = [link for link in self._links if link not in busy and link not in quiet]
        watched: list[Waitable] = [*busy, *others] if self._pulse is None else [*busy, *others, self._pulse]
        ready = wait_ready(watched, [link for link in unsent if link.unsent], seconds)
        for link in others:
            if link in ready and link.has_words():
                quiet.add(link)
