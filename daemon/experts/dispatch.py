"""Experts that are elsewhere: a trunk rank's rows go to expert hosts over links of their own, and results come back.

`motley.daemon.experts.calls` decides who is asked for what, `motley.daemon.experts.wire` is how it looks, and
`motley.transport.messages` carries it. Host h is peer ``size + h`` of the session.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from motley.daemon.experts.calls import PIECE, Action, Ask, Dial, Drop, ExpertCalls, Starve
from motley.daemon.experts.factors import ExpertsAdapter, Factors, write_factors
from motley.daemon.experts.keys import replicas
from motley.daemon.experts.wire import (
    U16,
    Answer,
    Call,
    ExpertWire,
    ExpertWireError,
    Part,
    Refusal,
    RefusalCode,
)
from motley.daemon.pipe.daemon import Tell
from motley.plugins.engine import F32
from motley.plugins.mixture import I64, Compute, Sent, Slots
from motley.protocol import mesh_pb2 as pb
from motley.transport import MAX_MESSAGE, Connected, Lost, Message, Messenger, PeerLost, TransportError, WireFormat

MEET_S = 1800.0
"""When a session begins, hosts have so many seconds to load what they shall hold; the orchestrator watches them."""
DIAL_S = 10.0
"""A host that cannot be reached within so many seconds, once the session has begun, is lost."""
LOOK_S = 0.1
"""Seconds between two looks for what else has happened, while a step waits for experts."""

Look = Callable[[float], None]
"""Looks whether the daemon has commands, waiting up to so many seconds; it may call `Dispatcher.place`."""


class Dispatcher:
    """Has a trunk rank's experts computed by expert hosts, over its links to them. One thread owns it.

    Attributes:
        waited_s: seconds that steps have waited for experts.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        messenger: Messenger,
        placement: pb.Placement,
        *,
        hidden: int,
        wire_format: WireFormat,
        look: Look,
        tell: Tell,
        adapters: Mapping[int, ExpertsAdapter] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            size: trunk ranks; all of them make the same calls in the same order.
            messenger: becomes this dispatcher's, which closes it.
            placement: the first one.
            hidden: D, the width of a row.
            look: called now and then while a step waits.
            tell: sends `starved` when a step waits for an expert that no host has, and `experts` when a host is lost.
            adapters: what the adapters in slots add to experts now; whoever changes it does so between two steps.
        """
        self.waited_s = 0.0
        self._size = size
        self._messenger = messenger
        self._wire = ExpertWire(hidden, wire_format)
        self._look = look
        self._tell = tell
        self._adapters = adapters
        self._calls = ExpertCalls(rank, size)
        self._to_all = (1 << size) - 1
        self._to_me = 1 << rank
        self._placement = pb.Placement()
        self._layer = 0
        self._x: F32 = np.empty((0, hidden), np.float32)
        self._rows: dict[int, I64] = {}
        self._slots: dict[int, Slots] = {}
        """Of the adapters that add to experts, for these rows; empty: they have none."""
        self._adapted = 0
        """How many adapters the rows of the current call have."""
        self._loads: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._bytes_out = 0
        self._bytes_in = 0
        self._looked_at = time.monotonic()
        self._dial_s = MEET_S
        self._adopt(placement)

    def experts(self, layer: int) -> Compute:
        """What computes the experts of a layer, as `motley.plugins.engine.Collectives.experts` has it.

        Calling it raises `motley.daemon.experts.calls.ExpertsMissing` where experts stay without a host, and whatever
        `look` raises.
        """
        return partial(self._compute, layer)

    def place(self, placement: pb.Placement) -> None:
        """Adopt a placement, unless it is older than the one there is."""
        if placement.version > self._placement.version:
            self._adopt(placement)

    def meet(self, tell: Callable[[], None]) -> None:
        """Wait until every host that is alive is there, calling `tell` meanwhile, which may end this by raising.

        Raises:
            PeerLost: one cannot be reached.
        """
        hosts = self._calls.hosts
        while any(alive and not host.connected for alive, host in zip(self._placement.alive, hosts, strict=True)):
            self._move(LOOK_S)
            for number, host in enumerate(hosts):
                if self._placement.alive[number] and host.lost:
                    raise PeerLost(self._size + number, f"expert host {number} cannot be reached: {host.lost}")
            tell()
        self._dial_s = DIAL_S

    def attend(self) -> None:
        """Take note of what has happened to the hosts while no step needs them."""
        self._move(0.0)

    def report(self) -> pb.ExpertReport:
        """What this rank has asked of the hosts so far, for the orchestrator."""
        hosts = []
        for number, host in enumerate(self._calls.hosts):
            hosts.append(
                pb.HostReport(
                    host=number,
                    lost=host.lost,
                    given_up=host.barred,
                    rows=host.rows,
                    busy_s=host.owing_s,
                    wait_s=host.waited_s,
                    round_trip_s=host.round_trip_s or 0.0,
                    stalls_s=host.stalls_s,
                    calls=host.calls,
                    computed_s=host.computed_s,
                )
            )
            host.stalls_s.clear()
        loads = [
            pb.ExpertLoad(layer=layer, rows=[rows[expert] for expert in range(max(rows) + 1)])
            for layer, rows in sorted(self._loads.items())
        ]
        return pb.ExpertReport(
            loads=loads,
            hosts=hosts,
            bytes_out=self._bytes_out,
            bytes_in=self._bytes_in,
            version=self._placement.version,
        )

    def close(self) -> None:
        """End the links to the hosts, who need not take this rank for lost."""
        self._messenger.close()

    # -- a call -----------------------------------------------------------------------------------------------------

    def _compute(self, layer: int, x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
        """See `motley.plugins.mixture.Compute`. All rows are under way when it returns."""
        self._layer, self._x = layer, np.asarray(x, np.float32)
        self._rows, self._slots = {}, {}
        adapting = [0, *self._adapters]
        used = {slot for own in sent if own.slots is not None for slot in np.unique(own.slots).tolist()}
        self._adapted = len(used.intersection(self._adapters))
        asked: list[range] = []
        """The numbers of each expert's rows in pieces that fit in a message, see `motley.daemon.experts.calls`."""
        for own in sent:
            stretches = self._wire.stretches(len(own.rows), MAX_MESSAGE, self._adapted)
            parts = range(own.expert, own.expert + PIECE * len(stretches), PIECE)
            asked.append(parts)
            self._rows.update(zip(parts, (own.rows[stretch] for stretch in stretches), strict=True))
            if self._adapted and own.slots is not None:
                slots = np.where(np.isin(own.slots, adapting), own.slots, 0)
                self._slots.update(zip(parts, (slots[stretch] for stretch in stretches), strict=True))
            if self._calls.is_mine(layer, own.expert):
                self._loads[layer][own.expert] += len(own.rows)
        routing = _routing(sent) if self._size > 1 else 0
        counts = {part: len(rows) for part, rows in self._rows.items()}
        self._do(self._calls.begin(layer, counts, routing, time.monotonic()))
        return self._results(asked)

    def _results(self, asked: Sequence[range]) -> Iterator[F32]:
        results: Mapping[int, F32] = self._calls.results
        for parts in asked:
            for part in parts:
                if part not in results:
                    self._wait_for(part)
            yield results[parts[0]] if len(parts) == 1 else np.concatenate([results[part] for part in parts])

    def _wait_for(self, part: int) -> None:
        began = time.monotonic()
        while part not in self._calls.results:
            self._move(LOOK_S)
            if time.monotonic() - self._looked_at > LOOK_S:
                self._look(0.0)
                self._looked_at = time.monotonic()
        self.waited_s += time.monotonic() - began

    def _move(self, seconds: float) -> None:
        """Wait up to so long for something to happen, and do what is to be done then."""
        seconds = max(0.0, min(seconds, self._calls.due - time.monotonic()))
        for event in self._messenger.receive(seconds):
            host = event.peer - self._size
            match event:
                case Message(data=data):
                    self._bytes_in += len(data)
                    self._do(self._heard(host, data))
                case Connected():
                    was_lost = bool(self._calls.hosts[host].lost)
                    self._do(self._calls.connected(host, time.monotonic()))
                    if was_lost:
                        self._report_links()
                case Lost(reason=reason):
                    self._lose(host, reason)
        if time.monotonic() >= self._calls.due:
            self._do(self._calls.tick(time.monotonic()))

    def _heard(self, host: int, data: memoryview) -> Iterable[Action]:
        calls, now = self._calls, time.monotonic()
        try:
            message = self._wire.read_answer(data)
        except ExpertWireError as error:
            return calls.garbage(host, str(error), now)
        match message:
            case Refusal(code=RefusalCode.NOT_HERE):
                return calls.refused(host, message.number, now)
            case Refusal(code=RefusalCode.NO_FACTORS):
                return self._bring(host, message)
            case Refusal():
                return calls.garbage(host, f"it refuses a call: {message.reason}", now)
            case Answer():
                if not np.isfinite(message.rows).all():
                    if calls.is_early(message.number):
                        return ()  # whether they may be like that is not known yet: this rank will ask for itself
                    if message.number == calls.number and not self._is_broken(message):
                        why = f"it answers numbers that are not finite for layer {message.layer}"
                        return calls.garbage(host, why, now)
                return calls.answered(host, message.number, message.layer, _parts(message), message.busy_s, now)

    def _bring(self, host: int, refusal: Refusal) -> Iterable[Action]:
        """Send a host what adapters add to the experts of a call, and that again: expert by expert, so that each answer
        is a sign of life."""
        keys = [part.expert + PIECE * part.piece for part in refusal.parts]
        if refusal.number != self._calls.number or not all(key in self._slots for key in keys):
            return self._calls.refused(host, refusal.number, time.monotonic())
        for key in keys:
            for slot in filter(None, np.unique(self._slots[key]).tolist()):
                adapter, expert = self._adapters[slot], key % PIECE
                products = adapter.products.get((self._layer, expert), {})
                data = write_factors(Factors(adapter.name, self._layer, expert, products))
                self._messenger.send(self._size + host, data)
                self._bytes_out += sum(map(len, data))
            self._send(host, [key], self._calls.is_mine(self._layer, key))
        return self._calls.repeated(host, refusal.number, time.monotonic())

    def _is_broken(self, answer: Answer) -> bool:
        """Whether an answer of the current call is about rows that were not finite themselves."""
        sent = [self._rows[key] for key, _, _ in _parts(answer) if key in self._rows]
        return len(sent) == len(answer.parts) and not np.isfinite(self._x[np.concatenate(sent)]).all()

    # -- what was decided -------------------------------------------------------------------------------------------

    def _do(self, actions: Iterable[Action]) -> None:
        todo = deque(actions)
        while todo:
            match todo.popleft():
                case Ask(host, experts, for_all):
                    self._send(host, experts, for_all)
                case Drop(host, reason):
                    self._messenger.drop(self._size + host, reason)
                    self._report_links()
                case Dial(host):
                    todo.extend(self._dial(host))
                case Starve(layer, expert):
                    version = self._placement.version
                    self._tell(starved=pb.Starved(layer=layer, index=expert, version=version))

    def _send(self, host: int, experts: Sequence[int], for_all: bool) -> None:
        if self._size + host not in self._messenger.connected:  # its loss is about to be told
            return
        reply_to = self._to_all if for_all else self._to_me
        for together in self._messages(experts):
            chosen = [self._rows[expert] for expert in together]
            parts = [Part(key % PIECE, len(rows), key // PIECE) for key, rows in zip(together, chosen, strict=True)]
            rows = self._x[np.concatenate(chosen)]
            call = Call(self._calls.number, self._layer, reply_to, parts, rows, *self._whose(together))
            data = self._wire.write_call(call)
            self._messenger.send(self._size + host, data)
            self._bytes_out += self._wire.message_bytes(len(parts), len(rows), len(call.adapters))

    def _whose(self, keys: Sequence[int]) -> tuple[list[bytes], U16]:
        """The names of the adapters that rows of experts have, and which of these each of the rows has."""
        if not self._adapted:
            return [], np.empty(0, np.uint16)
        slots, own = np.unique(np.concatenate([[0], *(self._slots[key] for key in keys)]), return_inverse=True)
        return [self._adapters[slot].name for slot in slots[1:].tolist()], own[1:].astype(np.uint16)

    def _messages(self, experts: Sequence[int]) -> Iterator[list[int]]:
        """The parts of every message: as many as `MAX_MESSAGE` allows. An answer is as long as its call."""
        together: list[int] = []
        rows = 0
        for expert in experts:
            own = len(self._rows[expert])
            if together and self._wire.message_bytes(len(together) + 1, rows + own, self._adapted) > MAX_MESSAGE:
                yield together
                together, rows = [], 0
            together.append(expert)
            rows += own
        yield together

    def _dial(self, host: int) -> Iterable[Action]:
        try:
            self._messenger.connect(self._size + host, self._placement.addresses[host], self._dial_s)
        except TransportError as error:
            return self._calls.lost(host, str(error), time.monotonic())
        return ()

    def _lose(self, host: int, reason: str) -> None:
        was_connected = self._calls.hosts[host].connected
        self._do(self._calls.lost(host, reason, time.monotonic()))
        if was_connected:
            self._report_links()

    def _report_links(self) -> None:
        self._tell(experts=self.report())

    def _adopt(self, placement: pb.Placement) -> None:
        before, self._placement = self._placement, placement
        known = zip(before.addresses, before.alive, strict=True)
        lived = [address if alive else None for address, alive in known]
        now = [address if alive else None for address, alive in zip(placement.addresses, placement.alive, strict=True)]
        lived += [None] * (len(now) - len(lived))
        moved = {host for host, (was, address) in enumerate(zip(lived, now, strict=True)) if address not in (None, was)}
        self._do(self._calls.place(replicas(placement.hosts), placement.alive, moved, time.monotonic()))


def _routing(sent: Sequence[Sent]) -> int:
    """32 bits that say which rows go where."""
    digest = 0
    for own in sent:
        digest = zlib.crc32(own.rows.tobytes(), zlib.crc32(own.expert.to_bytes(2, "little"), digest))
    return digest


def _parts(answer: Answer) -> list[tuple[int, int, Any]]:
    """The parts of an answer by their numbers, each with its rows and results."""
    stops = np.cumsum([part.rows for part in answer.parts]).tolist()
    return [
        (part.expert + PIECE * part.piece, part.rows, answer.rows[stop - part.rows : stop])
        for part, stop in zip(answer.parts, stops, strict=True)
    ]
