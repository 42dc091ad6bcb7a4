"""Ranks as threads of one process: real sums in rank order and gathers, without sockets."""

from __future__ import annotations

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import BrokenBarrierError, Lock
from typing import Any

import numpy as np
import numpy.typing as npt


class LocalGroup:
    """`size` ranks that meet at a barrier; each of them takes the `member` of its number.

    A `threading.Barrier` wakes every thread twice, once to take its lock, which is most of what tiny models take.
    """

    def __init__(self, size: int, deadline_s: float = 30.0) -> None:
        self.size = size
        self._deadline_s = deadline_s
        self._lock = Lock()
        self._here: list[npt.NDArray[Any] | None] = [None] * size
        """What those who have arrived have brought."""
        self._arrived = 0
        self._told: list[SimpleQueue[list[Any]]] = [SimpleQueue() for _ in range(size)]
        """For each rank: what all have brought, once they have."""
        self._broken = False

    def member(self, rank: int) -> LocalMember:
        return LocalMember(self, rank)

    def abort(self) -> None:
        """Release everyone who waits with `threading.BrokenBarrierError`: a rank is gone."""
        self._broken = True
        for told in self._told:
            told.put([])

    def all_reduce(self, rank: int, buffer: npt.NDArray[Any]) -> None:
        first, *others = self._meet(rank, buffer.copy())
        buffer[...] = first
        for other in others:
            buffer += other

    def all_gather(self, rank: int, local: npt.NDArray[Any], out: Sequence[npt.NDArray[Any]]) -> None:
        for taken, given in zip(out, self._meet(rank, local.copy()), strict=True):
            taken[...] = given

    def _meet(self, rank: int, brought: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """What every rank brings to this meeting."""
        with self._lock:
            self._here[rank] = brought
            self._arrived += 1
            everything = self._here if self._arrived == self.size else None
            if everything:
                self._here, self._arrived = [None] * self.size, 0
        if everything:
            for number, told in enumerate(self._told):
                if number != rank:
                    told.put(everything)
        else:
            try:
                everything = self._told[rank].get(timeout=self._deadline_s)
            except Empty:
                self.abort()
        if self._broken:
            raise BrokenBarrierError
        return everything


class LocalMember:
    """One rank's side of the group: `motley.plugins.engine.Collectives`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = group.size
        self._pending: list[LocalPending] = []
        self.advances = 0
        """How often a sum that was under way has been looked after."""

    def all_reduce(self, buffer: npt.NDArray[Any]) -> None:
        self.all_reduce_start(buffer).finish()

    def all_gather(self, local: npt.NDArray[Any], out: Sequence[npt.NDArray[Any]]) -> None:
        assert not self._pending, "a gathering beside a sum"
        self._group.all_gather(self.rank, local, out)

    def all_reduce_start(self, buffer: npt.NDArray[Any]) -> LocalPending:
        assert len(self._pending) < 2, "two sums at a time"
        self._pending.append(LocalPending(self, buffer))
        return self._pending[-1]

    def finish(self, pending: LocalPending) -> None:
        assert self._pending[0] is pending, "finished twice, or before one that was started earlier"
        self._pending.pop(0)
        self._group.all_reduce(self.rank, pending.buffer)


class LocalPending:
    """A sum that has been started: `motley.plugins.engine.Pending`."""

    def __init__(self, member: LocalMember, buffer: npt.NDArray[Any]) -> None:
        self._member = member
        self.buffer = buffer
        self._given = buffer.copy()

    def advance(self) -> None:
        assert self._member._pending[0] is self, "another was started before"
        self._member.advances += 1

    def finish(self) -> None:
        assert np.array_equal(self.buffer, self._given), "the buffer was touched while its sum was under way"
        self._member.finish(self)
