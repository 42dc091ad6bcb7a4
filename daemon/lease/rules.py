"""When a lease is taken by itself: others use the GPU or the processor, or a full-screen program runs. Pure.

What is seen must last for a moment before a device is taken back, and be over for a while before it is given again: a
game that loads a level must not bring the mesh back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from motley.protocol.devices import ALL, CPU, GPU

LASTS_S = 4.0
"""What is seen for so long is no accident."""
CALM_S = 30.0
"""What was not seen for so long is over."""

_CPU = re.compile(r"cpu=(\d{1,3})%?")


@dataclass(frozen=True)
class YieldTo:
    """To what a machine's devices are given by themselves.

    Attributes:
        gpu: other programs that use the GPU.
        full_screen: a program that has the whole screen; seen on Windows only.
        cpu: other programs that use more than this part of the processor; 0: they may.
    """

    gpu: bool = False
    full_screen: bool = False
    cpu: float = 0.0

    def __bool__(self) -> bool:
        return self.gpu or self.full_screen or self.cpu > 0

    @classmethod
    def parse(cls, text: str) -> YieldTo:
        """Read ``gpu,full-screen,cpu=50``; empty: to nothing.

        Raises:
            ValueError: it is no such text; the message says what is wrong.
        """
        gpu = full_screen = False
        cpu = 0.0
        for word in filter(None, (part.strip().lower() for part in text.split(","))):
            if word == "gpu":
                gpu = True
            elif word == "full-screen":
                full_screen = True
            elif (given := _CPU.fullmatch(word)) and 0 < int(given[1]) <= 100:
                cpu = int(given[1]) / 100
            else:
                raise ValueError(f"{word!r} is none of gpu, full-screen and cpu=PERCENT, such as cpu=50")
        return cls(gpu, full_screen, cpu)


@dataclass(frozen=True)
class Seen:
    """What other programs do on a machine now.

    Attributes:
        on_gpu: who uses the GPU, for people; empty: nobody.
        full_screen: whether a program has the whole screen.
        cpu: the part of the processor that they use.
    """

    on_gpu: str = ""
    full_screen: bool = False
    cpu: float = 0.0


@dataclass
class _Lasting:
    """Whether something is so, without its short beginnings and ends."""

    holds: bool = False
    since: float | None = None
    """When it was first seen to be otherwise; None: it is not."""

    def see(self, is_so: bool, now: float) -> bool:
        if is_so == self.holds:
            self.since = None
            return self.holds
        self.since = now if self.since is None else self.since
        if now - self.since >= (LASTS_S if is_so else CALM_S):
            self.holds, self.since = is_so, None
        return self.holds


@dataclass
class Rules:
    """What follows from what is seen, time after time."""

    to: YieldTo
    _gpu: _Lasting = field(default_factory=_Lasting)
    _full_screen: _Lasting = field(default_factory=_Lasting)
    _cpu: _Lasting = field(default_factory=_Lasting)
    _who: str = ""
    """Who was seen on the GPU last."""

    def wanted(self, seen: Seen, now: float) -> tuple[str, str] | None:
        """The device to be taken back, and why; None: none.

        Args:
            now: by a clock that only goes on.
        """
        self._who = seen.on_gpu or self._who
        gpu = self._gpu.see(self.to.gpu and bool(seen.on_gpu), now)
        full_screen = self._full_screen.see(self.to.full_screen and seen.full_screen, now)
        cpu = self._cpu.see(0 < self.to.cpu < seen.cpu, now)
        if full_screen:
            return ALL, "a full-screen program"
        if not (gpu or cpu):
            return None
        on_gpu, on_cpu = f"{self._who} on the GPU", f"other programs on more than {self.to.cpu:.0%} of the processor"
        if gpu and cpu:
            return ALL, f"{on_gpu}, {on_cpu}"
        return (f"{GPU}0", on_gpu) if gpu else (CPU, on_cpu)
