"""A clock by which it is seen that this machine has slept."""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":

    def elapsed() -> float:
        """Seconds of a monotonic clock that goes on while the machine sleeps."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    elapsed = time.monotonic
