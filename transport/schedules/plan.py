"""A schedule compiled for one rank: which frames it sends and receives, with all the memory they need.

Plans are made once per size and then only run: they own frames, headers and the scratch of the sums. Terms of a sum
arrive in scratch, header and payload in one read; what needs no decoding arrives in place. Small payloads are staged
behind their header, so that one system call sends both; so is what might be overwritten before it has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..formats import Bytes, Codec
from ..links.link import Incoming, Link
from ..links.wire import DTYPE_CODES, HEADER_SIZE, Op, pack_header
from ..reduce import sum_encoded, sum_in_order
from .forecast import Choice
from .progress import NOW, Progress

Array = npt.NDArray[Any]
Arrays = Sequence[Array]


class Element:
    """A type of elements that can travel: its name, its code on the wire, and how NumPy stores it here."""

    __slots__ = ("code", "name", "storage")

    def __init__(self, dtype: np.dtype[Any], storage: np.dtype[Any] | None = None) -> None:
        """`storage`: if they are stored in another way than NumPy's.

        Raises:
            KeyError: elements of this type cannot travel.
        """
        self.name = dtype.name if dtype.isnative else str(dtype)
        self.code = DTYPE_CODES[self.name]
        # NumPy's own types cover all but bfloat16, which is handled as bits so that no other package is needed.
        self.storage: np.dtype[Any] = storage or (np.dtype(np.uint16) if self.name == "bfloat16" else dtype)


@dataclass(frozen=True)
class Layout:
    """Where the elements of a goal lie: the range of each array that a rank gives from, and takes into."""

    given: Sequence[range]
    taken: Sequence[range]


class Place:
    """Where some elements lie: a part of one of several arrays, which differ from call to call."""

    __slots__ = ("_array", "_part", "_whole", "elements")

    def __init__(self, part: range, arrays: Sequence[range]) -> None:
        """`part`: the elements; `arrays`: which elements each of the arrays holds."""
        self._array, own = next(
            (index, own) for index, own in enumerate(arrays) if own.start <= part.start and part.stop <= own.stop
        )
        self._part = slice(part.start - own.start, part.stop - own.start)
        self._whole = part == own
        self.elements = len(part)

    def of(self, arrays: Arrays) -> Array:
        """The elements in these arrays, without a copy."""
        values = arrays[self._array]
        return values if self._whole else values[self._part]

    def bytes_of(self, arrays: Arrays) -> Bytes:
        """The same as bytes."""
        return self.of(arrays).view(np.uint8)


class Outgoing:
    """A frame that goes to one link or several.

    Attributes:
        payload: what is staged behind the header; empty if the payload is sent from where it lies.
        frame_bytes: memory that the frame owns.
        views: what to send, once the frame is made.
        made_for: the number of the collective that the frame was last made for.
    """

    __slots__ = ("frame_bytes", "header", "made_for", "nbytes", "payload", "step", "views")

    def __init__(self, step: int, nbytes: int, *, staged: bool = True) -> None:
        self.step = step
        self.nbytes = nbytes
        self.made_for = -1
        frame = np.empty(HEADER_SIZE + (nbytes if staged else 0), np.uint8)
        self.frame_bytes = frame.nbytes
        self.header = frame.data[:HEADER_SIZE]
        self.payload: Bytes = frame[HEADER_SIZE:]
        self.views: list[memoryview] = [frame.data]

    def load(self, given: Arrays, taken: Arrays) -> None:
        """Bring the payload from the arrays that the rank gives from and takes into; here an action has done it."""

    def unload(self) -> None:
        """Let go of the caller's arrays."""


_NOTHING = np.empty(0)
_NOTHING_BYTES = np.empty(0, np.uint8)


class Copied(Outgoing):
    """A frame whose payload is a part of an array, sent from where it lies."""

    __slots__ = ("_own", "_place", "_values")

    def __init__(
        self, step: int, nbytes: int, place: Place, storage: np.dtype[Any], *, own: bool, staged: bool
    ) -> None:
        """`own`: it is the rank's own term; otherwise a sum that it has taken and passes on."""
        super().__init__(step, nbytes, staged=staged)
        self._place = place
        self._own = own
        self._values = self.payload.view(storage) if staged else None

    def unload(self) -> None:
        if self._values is None:
            del self.views[1:]

    def load(self, given: Arrays, taken: Arrays) -> None:
        arrays = given if self._own else taken
        if self._values is not None:
            self._values[:] = self._place.of(arrays)
        else:
            self.views[1:] = [self._place.bytes_of(arrays).data]


class Encoded(Outgoing):
    """A frame whose payload is the rank's own term, converted to the wire format."""

    __slots__ = ("_codec", "_native", "_place", "_wide")

    def __init__(self, step: int, place: Place, native: Codec, codec: Codec, wide: Array) -> None:
        """`wide`: scratch for the values in the type that sums are taken in."""
        super().__init__(step, codec.size(place.elements))
        self._place = place
        self._native = native
        self._codec = codec
        self._wide = wide

    def load(self, given: Arrays, taken: Arrays) -> None:
        self._native.decode(self._place.bytes_of(given), self._wide)
        self._codec.encode(self._wide, self.payload)


class ExactSum:
    """What is done when a gate opens: terms that need no decoding are summed where they lie."""

    __slots__ = ("_given", "_own", "_passed", "_taken", "_terms")

    def __init__(self, terms: list[Array], own: int, given: Place, taken: Place | None, passed: Array | None) -> None:
        """
        Args:
            terms: in rank order; ``terms[own]`` is replaced by the rank's own, which lies at `given`.
            taken: where the sum goes; None: into `passed`, the payload of a frame.
        """
        self._terms = terms
        self._own = own
        self._given = given
        self._taken = taken
        self._passed = passed

    def run(self, given: Arrays, taken: Arrays) -> None:
        self._terms[self._own] = self._given.of(given)
        out = self._taken.of(taken) if self._taken is not None else self._passed
        assert out is not None
        sum_in_order(self._terms, self._own, out)
        self._terms[self._own] = _NOTHING


class CodedSum:
    """What is done when a gate opens: terms that must be decoded, or rounded in the end, are summed."""

    __slots__ = ("_given", "_native", "_own", "_passed", "_passes", "_scratch", "_taken", "_terms", "_total")

    def __init__(
        self,
        terms: list[tuple[Codec, Bytes]],
        own: int,
        given: Place | None,
        native: Codec,
        taken: Place | None,
        passes: tuple[Codec, Bytes] | None,
        scratch: tuple[Array, Array],
    ) -> None:
        """
        Args:
            given: the rank's own term, which becomes ``terms[own]``; None if that is there already.
            taken: where the sum goes, None if it is one of some terms only.
            passes: the sum also leaves, encoded like this, into this payload; it is then taken as it leaves.
        """
        self._terms = terms
        self._own = own
        self._given = given
        self._native = native
        self._taken = taken
        self._passes = passes
        self._total, self._scratch = scratch

    def run(self, given: Arrays, taken: Arrays) -> None:
        if self._given is not None:
            self._terms[self._own] = self._native, self._given.bytes_of(given)
        sum_encoded(self._terms, self._total, self._scratch)
        if self._given is not None:
            self._terms[self._own] = self._native, _NOTHING_BYTES
        if self._passes is not None:
            codec, payload = self._passes
            codec.encode(self._total, payload)
            if self._taken is not None:
                codec.decode(payload, self._total)
        if self._taken is not None:
            self._native.encode(self._total, self._taken.bytes_of(taken))


class Decoding:
    """What is done when a gate opens: a sum that has come encoded is decoded, and perhaps passed on as it came."""

    __slots__ = ("_codec", "_native", "_passed", "_payload", "_taken", "_total")

    def __init__(
        self, codec: Codec, payload: Bytes, native: Codec, taken: Place, passed: Bytes | None, total: Array
    ) -> None:
        self._codec = codec
        self._payload = payload
        self._native = native
        self._taken = taken
        self._passed = passed
        self._total = total

    def run(self, given: Arrays, taken: Arrays) -> None:
        if self._passed is not None:
            self._passed[:] = self._payload
        self._codec.decode(self._payload, self._total)
        self._native.encode(self._total, self._taken.bytes_of(taken))


class Arrival:
    """A frame that comes in a call, and where it goes."""

    __slots__ = ("incoming", "index", "nbytes", "place", "step")

    def __init__(self, index: int, step: int, nbytes: int, incoming: Incoming | None, place: Place | None) -> None:
        """It arrives in scratch, by `incoming`, or in an array, at `place`."""
        self.index = index
        self.step = step
        self.nbytes = nbytes
        self.incoming = incoming
        self.place = place


class _Lane:
    """The frames that one link brings in a call, in order, and how far it has come."""

    __slots__ = ("header", "link", "position", "queue")

    def __init__(self, link: Link, queue: Sequence[Arrival]) -> None:
        self.link = link
        self.queue = queue
        self.position = 0
        self.header = memoryview(bytearray(HEADER_SIZE))
        """Takes the headers of frames that arrive in an array."""


Action = ExactSum | CodedSum | Decoding


class Plan:
    """One rank's part of a schedule, ready to run on arrays again and again.

    Attributes:
        choice: the schedule and its forecast.
        senders: the links that this rank sends on.
        op: the collective...
        what: ...and its name.
        sequence: the number of the collective that it ran, or runs, last.
        hops: whether some of its frames leave only when others have come.
        marks: by link, how many bytes it will have sent, ever, when all frames of the collective have left; known of
            each link once these are pushed.
        nbytes: memory of its own: frames to send. Scratch for what comes is shared by all plans.
    """

    def __init__(
        self,
        op: Op,
        element: Element,
        choice: Choice,
        progress: Progress,
        sends: Sequence[tuple[Link, Outgoing]],
        arrivals: Mapping[Link, Sequence[Arrival]],
        actions: Sequence[Action | None],
        send_gates: Sequence[int],
    ) -> None:
        """
        Args:
            sends: in the order of the rank's `Duty`.
            send_gates: of these, see there.
            arrivals: in the order in which they come.
            actions: what to do when a gate opens.
        """
        self.choice = choice
        self.what = op.name.lower()
        self.senders = tuple(dict.fromkeys(link for link, _ in sends))
        self.op = op
        self._code = element.code
        self._progress = progress
        self._sends = sends
        self._lanes = [_Lane(link, queue) for link, queue in arrivals.items()]
        self._lane_of = {lane.link.rank: lane for lane in self._lanes}
        self._actions = actions
        self._given: Arrays = ()
        self._taken: Arrays = ()
        self.sequence = 0
        self.hops = any(gate != NOW for gate in send_gates)
        self._counts = Counter(link.rank for link, _ in sends)
        self._unsent = self._counts.copy()
        """By rank, how many frames are to be pushed yet, if it has hops."""
        self.marks: dict[Link, int] = {}
        self._before: Plan | None = None
        """The plan of the collective that was started before this one and is under way; its frames go first."""
        self._held: list[int] = []
        """Sends that wait for frames of that one."""
        self.nbytes = sum({id(outgoing): outgoing.frame_bytes for _, outgoing in sends}.values())

    def begin(self, sequence: int, given: Arrays, taken: Arrays, before: Plan | None = None) -> list[Incoming]:
        """Push what can leave at once, and return what is to be received first.

        On each link the frames of the collective that was started before come first, on both ends: so what comes next
        is always known.

        Args:
            sequence: the number of this collective in the session.
            given: the arrays that this rank gives from; they stay as they are until all is sent.
            taken: the arrays that it takes into; may be the same.
            before: the plan of a collective that is still under way; this is another one. None: there is none.
        """
        self.sequence, self._given, self._taken = sequence, given, taken
        self._before = before
        self.marks.clear()
        if self.hops:
            self._unsent = self._counts.copy()
        for send in self._progress.start():
            self._push(send)
        for lane in self._lanes:
            lane.position = 0
        return [self._expect(lane) for lane in self._lanes if before is None or not before.awaits(lane.link)]

    def awaits(self, link: Link) -> bool:
        """Whether a link has to bring more for this collective."""
        lane = self._lane_of.get(link.rank)
        return lane is not None and lane.position < len(lane.queue)

    def expect_first(self, link: Link) -> Incoming | None:
        """What a link brings first for this collective, now that it has brought all for the one before."""
        lane = self._lane_of.get(link.rank)
        return None if lane is None else self._expect(lane)

    def push_held(self, *, alone: bool = False) -> None:
        """Push what may leave now of what was held back for the collective before; `alone`: that one is over."""
        if alone:
            self._before = None
        if self._held:
            held, self._held = self._held, []
            for send in held:
                self._push(send)

    def follow(self, incoming: Incoming) -> Incoming | None:
        """Go on after a frame has come; returns what the same link brings next."""
        lane = self._lane_of[incoming.link.rank]
        gate = self._progress.arrived(lane.queue[lane.position].index)
        if gate != NOW:
            action = self._actions[gate]
            if action is not None:
                action.run(self._given, self._taken)
            for send in self._progress.released(gate):
                self._push(send)
        lane.position += 1
        return self._expect(lane) if lane.position < len(lane.queue) else None

    def end(self) -> None:
        """Let go of the arrays."""
        self._given = self._taken = ()
        for _, outgoing in self._sends:
            outgoing.unload()

    def mark(self) -> None:
        """Note the marks of a collective without hops, before another one pushes frames."""
        if not self.hops:
            self.marks.update((link, link.to_send) for link in self.senders)

    def has_to_send(self, link: Link) -> bool:
        """Whether frames on a link have not been pushed yet."""
        return self.hops and self._unsent[link.rank] > 0

    def _push(self, send: int) -> None:
        link, outgoing = self._sends[send]
        if self._before is not None and self._before.has_to_send(link):
            # Its payload is loaded when it leaves. Until then nothing may be written over it: in no schedule that there
            # is does a sum that this rank's own term is part of arrive before that term has left.
            self._held.append(send)
            return
        if self.hops:
            self._unsent[link.rank] -= 1
        if outgoing.made_for != self.sequence:
            outgoing.made_for = self.sequence
            outgoing.header[:] = pack_header(self.op, self._code, outgoing.step, self.sequence, outgoing.nbytes)
            outgoing.load(self._given, self._taken)
        for view in outgoing.views:
            link.push(view)
        if self.hops and not self._unsent[link.rank]:
            self.marks[link] = link.to_send

    def _expect(self, lane: _Lane) -> Incoming:
        arrival = lane.queue[lane.position]
        incoming = arrival.incoming
        if incoming is None:
            assert arrival.place is not None
            target = arrival.place.bytes_of(self._taken)
            incoming = Incoming(lane.link, [lane.header, target.data] if arrival.nbytes else [lane.header])
        incoming.expect(pack_header(self.op, self._code, arrival.step, self.sequence, arrival.nbytes))
        return incoming
