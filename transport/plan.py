"""A schedule compiled for one rank: which frames it sends and receives in each step, with all the memory they need.

Terms of a sum arrive in scratch, header and payload in one read; sums arrive in place. Small payloads are staged behind
their header, so that one system call sends both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .link import Incoming, Link
from .schedule import Schedule, Transfer
from .wire import HEADER_SIZE

STAGED_BYTES = 64 << 10
"""Payloads up to this size are copied behind their header: cheaper than a second system call."""

Array = npt.NDArray[Any]


class Outgoing:
    """The frame of one part of the buffer, which goes to some links."""

    __slots__ = ("_frame", "_header", "_links", "_payload", "length", "part")

    def __init__(self, part: slice, dtype: np.dtype[Any], links: Sequence[Link]) -> None:
        self.part = part
        self.length: int = (part.stop - part.start) * dtype.itemsize
        staged = self.length if self.length <= STAGED_BYTES else 0
        frame = np.empty(HEADER_SIZE + staged, np.uint8)
        self._frame = frame.data
        self._header = self._frame[:HEADER_SIZE]
        self._payload = frame[HEADER_SIZE:].view(dtype)
        self._links = links

    def sends(self, header: bytes, values: Array) -> list[tuple[Link, memoryview]]:
        """What to send for this header and the values of the part, which must stay until all is sent."""
        self._header[:] = header
        if self.length <= STAGED_BYTES:
            self._payload[:] = values
            return [(link, self._frame) for link in self._links]
        payload = values.view(np.uint8).data
        return [piece for link in self._links for piece in ((link, self._frame), (link, payload))]


@dataclass(frozen=True, slots=True)
class Sum:
    """A part of the buffer that becomes the sum of terms, in rank order; the rank's own goes to ``terms[own]``."""

    part: slice
    terms: list[Array]
    own: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does in one step of a schedule: send, receive, then sum."""

    number: int
    outgoing: Sequence[Outgoing]
    terms: Sequence[tuple[int, Incoming]]
    """Terms that arrive in scratch, with the bytes of each payload."""
    totals: Sequence[tuple[Link, slice]]
    """Sums that arrive in place."""
    sums: Sequence[Sum]


class Compiler:
    """Compiles schedules for one rank. Its plans share scratch memory, so one runs at a time."""

    def __init__(self, rank: int, links: Mapping[int, Link]) -> None:
        self._rank = rank
        self._links = links
        self._scratch = np.empty(0, np.uint8)

    def compile(self, schedule: Schedule, dtype: np.dtype[Any]) -> list[Step]:
        steps = (
            [transfer for transfer in transfers if self._rank in (transfer.source, transfer.target)]
            for transfers in schedule.steps()
        )
        return [self._step(schedule, transfers, dtype) for transfers in steps if transfers]

    def _step(self, schedule: Schedule, transfers: Sequence[Transfer], dtype: np.dtype[Any]) -> Step:
        sent: dict[range, list[Link]] = {}
        added: dict[range, list[Transfer]] = {}
        totals = []
        for transfer in transfers:
            if transfer.source == self._rank:
                sent.setdefault(transfer.part, []).append(self._links[transfer.target])
            elif schedule.is_final(transfer):
                totals.append((self._links[transfer.source], _slice(transfer.part)))
            else:
                added.setdefault(transfer.part, []).append(transfer)

        arriving = [transfer for group in added.values() for transfer in group]
        frames = self._frames([len(transfer.part) * dtype.itemsize for transfer in arriving])
        terms = [
            (len(frame) - HEADER_SIZE, Incoming(self._links[transfer.source], [frame.data]))
            for transfer, frame in zip(arriving, frames, strict=True)
        ]
        values = {
            (transfer.source, transfer.part): frame[HEADER_SIZE:].view(dtype)
            for transfer, frame in zip(arriving, frames, strict=True)
        }
        sums = []
        for part, group in added.items():
            group.sort(key=lambda transfer: transfer.terms.start)
            ordered = [values[transfer.source, part] for transfer in group]
            own = sum(transfer.terms.start < self._rank for transfer in group)
            ordered.insert(own, np.empty(0, dtype))  # the place of the rank's own values
            sums.append(Sum(_slice(part), ordered, own))
        outgoing = [Outgoing(_slice(part), dtype, links) for part, links in sent.items()]
        return Step(transfers[0].step, outgoing, terms, totals, sums)

    def _frames(self, lengths: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Scratch for frames with payloads of these lengths, each payload aligned to a cache line."""
        strides = [-(-(HEADER_SIZE + length) // 64) * 64 for length in lengths]
        needed = sum(strides) + 64
        if needed > len(self._scratch):
            # Older plans keep the older scratch alive; doubling bounds what they hold together.
            self._scratch = np.empty(max(needed, 2 * len(self._scratch)), np.uint8)
        start = -(self._scratch.ctypes.data + HEADER_SIZE) % 64
        frames = []
        for length, stride in zip(lengths, strides, strict=True):
            frames.append(self._scratch[start : start + HEADER_SIZE + length])
            start += stride
        return frames


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
