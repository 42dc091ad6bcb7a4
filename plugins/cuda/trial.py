"""Which way for a stream to call the host makes the quickest steps here. Pure: it is told how long steps took."""

from __future__ import annotations

from collections.abc import Sequence

from motley.transport.cuda.host_step import HostStep

UNTOLD = 3
"""First steps of a form that do not count: kernels are loaded, and a graph is captured."""
COUNTED = 8


class Trial:
    """Forms take turns, so many real steps each; what counts is a form's quickest one, as steps also wait for peers.

    Attributes:
        form: the one to take for the next step; in the end the quickest.
        least_s: seconds of the quickest step of each form that has had its turn.
    """

    def __init__(self, forms: Sequence[HostStep]) -> None:
        """`forms`: at least one; if it is one, nothing is tried."""
        self.form, *self._waiting = forms
        self._open = bool(self._waiting)
        self._steps = 0
        self.least_s: dict[HostStep, float] = {}

    def took(self, seconds: float) -> bool:
        """Hear how long a step took with `form`; returns whether that is another one from now on."""
        if not self._open:
            return False
        before = self.form
        self._steps += 1
        if self._steps > UNTOLD:
            self.least_s[before] = min(seconds, self.least_s.get(before, seconds))
        if self._steps == UNTOLD + COUNTED:
            self._steps = 0
            self._open = bool(self._waiting)
            self.form = self._waiting.pop(0) if self._waiting else min(self.least_s, key=self.least_s.__getitem__)
        return self.form is not before
