"""How a wait passes its time: it spins on non-blocking looks for a bounded time, and then sleeps.

A rank that spins sees bytes sooner than one that has to be woken (9 us for an 8 KiB exchange against 31 us with
blocking sockets, between two processes of one machine), but it uses a core meanwhile. `Patience` decides how long that
is worth it, and `Spin` is what every waiting loop asks after a look that found nothing: look again, or sleep?
"""

from __future__ import annotations

import os
import sys
import time
from time import thread_time_ns

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

if sys.platform == "linux":
    give_way = os.sched_yield
else:

    def give_way() -> None:
        """Let another process have this core, if one wants it."""
        time.sleep(0)


class Patience:
    """How long a wait spins before it sleeps, by how long waits took lately and whether the core is shared.

    Pure: times come in, decisions come out. That ranks outnumber the cores is known from the beginning; that somebody
    else wants the core is seen in spins that got less processor time than they lasted.

    Attributes:
        budget_ns: how long to spin, in nanoseconds.
        crowded: give way to others while spinning.
    """

    __slots__ = ("_core", "_fixed_ns", "_outnumbered", "_typical_ns", "budget_ns", "crowded")

    def __init__(self, *, outnumbered: bool, spin_s: float | None = None) -> None:
        """
        Args:
            outnumbered: there are more ranks than cores.
            spin_s: spin for so many seconds, whatever happens, but at most `PARK_S`: only a rank that sleeps looks at
                its deadline, and for data that got lost. None: learn it.
        """
        self.crowded = self._outnumbered = outnumbered
        self._core = 1.0  # the part of its core that this rank gets
        self._typical_ns = 0.0
        self._fixed_ns = None if spin_s is None else int(min(spin_s, PARK_S) * 1e9)
        self._decide()

    def waited(self, nanoseconds: int) -> None:
        """Learn that a wait has taken so long, spun and slept."""
        # A single long wait is no habit: as it is clipped, it takes three in a row to be one.
        self._typical_ns += (min(nanoseconds, 4e9 * SPIN_S) - self._typical_ns) / 8
        self._decide()

    def spun(self, nanoseconds: int, processor_ns: int) -> None:
        """Learn that a part of a spin has lasted `nanoseconds` and got `processor_ns` of the processor."""
        self._core += (min(1.0, processor_ns / nanoseconds) - self._core) / 8
        # A rank that gives way gets less of a shared core: the gap keeps the answer from flapping.
        self.crowded = self._outnumbered or self._core < (0.9 if self.crowded else 0.75)
        self._decide()

    def _decide(self) -> None:
        spin_s = CROWDED_SPIN_S if self.crowded else SPIN_S
        if self._typical_ns > SPIN_S * 1e9:
            spin_s = FUTILE_SPIN_S
        self.budget_ns = int(spin_s * 1e9) if self._fixed_ns is None else self._fixed_ns


class Spin:
    """The spinning part of a thread's waits, one wait after another.

    A loop that waits calls `goes_on` after every look that found nothing, sleeps where that says no, and calls `end`
    when the wait is over. `now` is always the time by `perf_counter_ns`.
    """

    __slots__ = ("_patience", "_probed_ns", "_probed_processor_ns", "_probes")

    def __init__(self, *, outnumbered: bool, spin_s: float | None = None) -> None:
        """`outnumbered`, `spin_s`: see `Patience`."""
        self._patience = Patience(outnumbered=outnumbered, spin_s=spin_s)
        # Windows counts in 16 ms: too coarse to see anything.
        self._probes = not outnumbered and time.get_clock_info("thread_time").resolution < 1e-6
        self._probed_ns = self._probed_processor_ns = 0  # when the present probe began; 0: there is none

    def goes_on(self, now: int, idle_ns: int) -> bool:
        """Whether to look again at once, nothing having come for `idle_ns`; False: sleep until something comes.

        Lets others have the core before the next look, if it is shared.
        """
        patience = self._patience
        if idle_ns >= patience.budget_ns:
            if self._probed_ns:
                self._end_probe(now)
            return False
        if idle_ns > PROBE_NS and self._probes and not self._probed_ns:
            self._probed_ns, self._probed_processor_ns = now, thread_time_ns()
        if patience.crowded:
            give_way()
        return True

    def end(self, now: int, waited_ns: int | None) -> None:
        """Learn from a wait that is over.

        Args:
            waited_ns: how long it took; None: that says nothing about how long the next waits will take.
        """
        if waited_ns is not None:
            self._patience.waited(waited_ns)
        if self._probed_ns:
            self._end_probe(now)

    def _end_probe(self, now: int) -> None:
        """See how much of the core this rank got since the probe began."""
        lasted_ns = now - self._probed_ns
        if lasted_ns > PROBE_NS // 2:
            self._patience.spun(lasted_ns, thread_time_ns() - self._probed_processor_ns)
        self._probed_ns = 0
