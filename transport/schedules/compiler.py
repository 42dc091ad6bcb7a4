"""Compiles schedules into the plans of one rank, with all the memory that these need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..formats import Bytes, Codec, Codecs, Exact
from ..links.link import Incoming, Link
from ..links.wire import HEADER_SIZE, Op
from .forecast import Choice
from .plan import (
    Action,
    Arrival,
    CodedSum,
    Copied,
    Decoding,
    Element,
    Encoded,
    ExactSum,
    Layout,
    Outgoing,
    Place,
    Plan,
)
from .progress import NOW, Duty, Progress
from .schedule import SUMMED, Operation, Transfer

STAGED_BYTES = 64 << 10
"""Payloads up to this size are copied behind their header: cheaper than a second system call."""


class Compiler:
    """Compiles schedules for one rank. Its plans share scratch memory, so one runs at a time."""

    def __init__(self, rank: int, links: Mapping[int, Link], codecs: Codecs) -> None:
        self._rank = rank
        self._links = links
        self._codecs = codecs
        self._scratch = np.empty(0, np.uint8)

    def compile(self, op: Op, element: Element, choice: Choice, layout: Layout) -> Plan:
        """The plan by which this rank does its part of a schedule."""
        goal = choice.schedule.goal
        duty = Duty(choice.schedule, self._rank)
        summed = goal.operation in SUMMED
        native, wire, partial = self._codecs.of(element.name) if summed else (Exact(element.storage),) * 3
        decodes = wire is not native
        """Terms and totals do not travel as they lie in the arrays."""
        in_place = not decodes and isinstance(native, Exact)
        """Sums need no decoding either."""

        def codec(t: Transfer) -> Codec:
            return partial if summed and 1 < len(t.terms) < goal.ranks else wire

        # Memory: frames of what does not arrive in place, and room for two terms in the type that sums are taken in.
        scratched = [decodes or duty.gates[gate].summed for gate in duty.receive_gates]
        sizes = [
            codec(t).size(len(t.part)) if needed else 0 for t, needed in zip(duty.receives, scratched, strict=True)
        ]
        longest = 0 if in_place else max((len(t.part) for t in (*duty.receives, *duty.sends)), default=0)
        *frames, total, spare = self._frames([*sizes, *[longest * native.accumulator.itemsize] * 2])
        wide = [frame[HEADER_SIZE:].view(native.accumulator) for frame in (total, spare)]

        # What comes.
        arrivals: dict[Link, list[Arrival]] = {}
        payloads: dict[Transfer, Bytes] = {}
        for index, t in enumerate(duty.receives):
            link, incoming, place = self._links[t.source], None, None
            if scratched[index]:
                incoming = Incoming(link, [frames[index].data])
                payloads[t] = frames[index][HEADER_SIZE:]
            else:
                place = Place(t.part, layout.taken)
            nbytes = codec(t).size(len(t.part))
            arrivals.setdefault(link, []).append(Arrival(index, t.step, nbytes, incoming, place))

        # What leaves. The same values for several ranks are one frame.
        outgoing: dict[tuple[int, int, int, int], Outgoing] = {}
        left: dict[int, Outgoing] = {}  # by gate: what an action has to leave there
        terms: dict[tuple[int, int], Outgoing] = {}  # by part: the rank's own term as it travels
        sends = []
        for t, gate in zip(duty.sends, duty.send_gates, strict=True):
            bounds = t.part.start, t.part.stop
            key = (t.step, gate, *bounds)
            if key not in outgoing:
                nbytes = codec(t).size(len(t.part))
                if gate == NOW:
                    place = Place(t.part, layout.given)
                    if decodes:
                        frame: Outgoing = Encoded(t.step, place, native, wire, wide[0][: len(t.part)])
                    else:
                        staged = nbytes <= STAGED_BYTES or goal.operation is Operation.ALL_TO_ALL
                        staged = staged or any(each.summed and _overlap(each.part, t.part) for each in duty.gates)
                        frame = Copied(t.step, nbytes, place, element.storage, own=True, staged=staged)
                    terms[bounds] = frame
                elif decodes or (summed and len(t.terms) < goal.ranks):
                    frame = left[gate] = Outgoing(t.step, nbytes)
                else:
                    place = Place(t.part, layout.taken)
                    staged = nbytes <= STAGED_BYTES
                    frame = Copied(t.step, nbytes, place, element.storage, own=False, staged=staged)
                outgoing[key] = frame
            sends.append((self._links[t.target], outgoing[key]))

        # What happens in between.
        actions: list[Action | None] = []
        for gate, opening in enumerate(duty.gates):
            size, passed = len(opening.part), left.get(gate)
            if not opening.summed:
                (t,) = opening.arrivals
                place = Place(opening.part, layout.taken)
                goes_on = None if passed is None else passed.payload
                actions.append(Decoding(wire, payloads[t], native, place, goes_on, wide[0][:size]) if decodes else None)
                continue
            own = sum(t.terms.start < self._rank for t in opening.arrivals)
            ends = sum(len(t.terms) for t in opening.arrivals) + 1 == goal.ranks
            taken = Place(opening.part, layout.taken) if ends else None
            given = Place(opening.part, layout.given)
            if in_place:
                vectors = [payloads[t].view(native.accumulator) for t in opening.arrivals]
                vectors.insert(own, vectors[0])  # the place of the rank's own term
                goes_on = None if passed is None else passed.payload.view(native.accumulator)
                actions.append(ExactSum(vectors, own, given, taken, goes_on))
            else:
                coded = [(codec(t), payloads[t]) for t in opening.arrivals]
                travels = terms.get((opening.part.start, opening.part.stop)) if decodes else None
                coded.insert(own, coded[0] if travels is None else (wire, travels.payload))
                passes = None if passed is None else (wire if ends else partial, passed.payload)
                scratch = wide[0][:size], wide[1][:size]
                untravelled = given if travels is None else None
                actions.append(CodedSum(coded, own, untravelled, native, taken, passes, scratch))
        return Plan(op, element, choice, Progress(duty), sends, arrivals, actions, duty.send_gates)

    def _frames(self, lengths: Sequence[int]) -> list[Bytes]:
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


def _overlap(a: range, b: range) -> bool:
    return a.start < b.stop and b.start < a.stop
