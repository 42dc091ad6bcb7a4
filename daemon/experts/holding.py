"""The experts that an expert host, or a worker of its group, holds: loading what is wanted, computing, telling."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

import numpy as np

from motley.daemon.experts.factors import Factors
from motley.daemon.experts.keys import ExpertKey, keys_of
from motley.daemon.experts.loading import ExpertLoader, HeldExpert
from motley.daemon.experts.wire import Call, Refusal, RefusalCode
from motley.daemon.loading.progress import Watch
from motley.daemon.machine.memory import resident_bytes
from motley.daemon.pipe.daemon import Tell
from motley.plugins.engine import F32, EngineError
from motley.protocol import mesh_pb2 as pb
from motley.protocol.worker_pb2 import WorkerCommand

LOOK_S = 0.5
"""The longest wait for a call or a command, in seconds; either ends it."""
LOADING_LOOK_S = 0.02
"""The same while experts are being loaded, as the wait does not end when one has been loaded."""
TELL_S = 0.2
"""Seconds between two reports on what has been loaded."""
LIFE_S = 1.0
"""Seconds between two signs of life while something is being loaded."""
STUCK_S = 1800.0
"""Loading of which nothing has come for so many seconds hangs: from then on no sign of life is given."""

_log = logging.getLogger(__name__)


class Holding:
    """The experts that one worker holds, or its slices of them. One thread owns it; use as a context."""

    def __init__(self, wanted: Iterable[ExpertKey], loader: ExpertLoader, *, tell: Tell) -> None:
        """
        Args:
            wanted: what is to be held at first.
            loader: loads it; stays the caller's.
            tell: sends the daemon `hosted`, `loading` and `ready`.
        """
        self._loader = loader
        self._say = tell
        self._wanted = set(wanted)
        self._held: dict[ExpertKey, HeldExpert] = {}
        self._adapters: dict[bytes, int] = {}
        """The slots of adapters, by their names; the one that was used longest ago first."""
        self._began = time.monotonic()
        self._ready = False
        self._changed = True
        """Whether what is held, or wanted, has changed since it was told."""
        self._told_s = self._began
        self._progress = (0, 0)
        self._watch = Watch(STUCK_S)
        self._load()

    @property
    def hidden(self) -> int | None:
        """See `ExpertLoader.hidden`."""
        return self._loader.hidden

    @property
    def patience_s(self) -> float:
        """After this time at the latest, `attend` has something to do."""
        return LOADING_LOOK_S if self._loader.busy else LOOK_S

    def __enter__(self) -> Holding:
        return self

    def __exit__(self, *_: object) -> None:
        for expert in self._held.values():
            expert.close()

    def attend(self, commands: Iterable[WorkerCommand]) -> None:
        """Do what the daemon wants, take what has been loaded, and tell about it.

        Raises:
            Exception: what iterating `commands`, `ExpertLoader.finished` and `ExpertLoader.hidden` raise.
        """
        for command in commands:
            if command.WhichOneof("body") == "host":
                self._want(keys_of(command.host))
        for key, expert in self._loader.finished():
            if key in self._wanted:
                self._held[key] = expert
                self._changed = True
            else:
                expert.close()
        self._tell()

    def refusal(self, call: Call) -> Refusal | None:
        """Why a call cannot be answered here, if so."""
        missing = [part.expert for part in call.parts if (call.layer, part.expert) not in self._held]
        if missing:
            reason = f"this host does not hold layer {call.layer} experts {missing}"
            return Refusal(call.number, call.layer, RefusalCode.NOT_HERE, reason)
        slots = {self._adapters.get(name) for name in call.adapters}
        if not all(slots <= self._held[call.layer, part.expert].adapters for part in call.parts):
            reason = "this host lacks what an adapter adds to these experts"
            return Refusal(call.number, call.layer, RefusalCode.NO_FACTORS, reason, call.parts)
        return None

    def sums(self, call: Call) -> Iterator[list[F32]]:
        """Compute each expert of a call, which is not refused, in turn, as `HeldExpert.sums` does; all results are
        valid until the next call.

        Raises:
            EngineError: one cannot be computed.
        """
        for name in call.adapters:  # used now
            self._adapters[name] = self._adapters.pop(name)
        slots = np.array([0, *map(self._adapters.__getitem__, call.adapters)], np.int32)
        start = 0
        for part in call.parts:
            rows = slice(start, start + part.rows)
            own = slots[call.own[rows]] if call.adapters else None
            yield self._held[call.layer, part.expert].sums(call.rows[rows], own)
            start += part.rows

    def adapt(self, factors: Factors) -> None:
        """Have what an adapter adds to an expert, if that is held: in the slot of the adapter, or in that of the one
        that was used longest ago. If it does not fit, or there are no slots or no memory for it, the expert goes on
        lacking it, so that calls which are computed with it are refused: whoever calls brings it some times more, and
        then asks another host."""
        held = self._held.get((factors.layer, factors.expert))
        if held is None:
            return
        try:
            slot = self._adapters.get(factors.adapter) or self._free_slot()
            held.load_adapter(slot, factors.products)
        except (EngineError, MemoryError) as error:
            why = str(error) or "out of memory"
            _log.warning("layer %d expert %d cannot have what an adapter adds: %s", factors.layer, factors.expert, why)
            return
        self._adapters[factors.adapter] = slot

    def _free_slot(self) -> int:
        slots = self._loader.slots
        if not slots:
            raise EngineError("the experts of this host have no slots for adapters")
        if empty := set(range(1, slots + 1)) - {*self._adapters.values()}:
            return min(empty)
        slot = self._adapters.pop(next(iter(self._adapters)))
        for held in self._held.values():
            held.unload_adapter(slot)
        return slot

    def _want(self, keys: Iterable[ExpertKey]) -> None:
        """Change what is to be held to these experts, and no others."""
        self._wanted = set(keys)
        for key in self._held.keys() - self._wanted:
            self._held.pop(key).close()
        self._load()
        self._changed = True

    def _load(self) -> None:
        self._loader.load(sorted(self._wanted - self._held.keys()))

    def _tell(self) -> None:
        """Say what is held, and how far the loading is."""
        now = time.monotonic()
        busy = self._loader.busy
        if busy:
            if now - self._told_s < TELL_S:
                return
            self._tell_progress(now)
        if self._changed and (self._ready or not busy):
            self._changed = False
            self._say(hosted=hosted(self._held))
        if not (self._ready or busy):
            self._ready = True
            total = sum(expert.weight_bytes for expert in self._held.values())
            rss, load_s = resident_bytes().now, now - self._began
            self._say(ready=pb.Ready(share_bytes=total, rss_bytes=rss, load_s=load_s))

    def _tell_progress(self, now: float) -> None:
        """Say how far the loading is when it has moved, and now and then when it has not, unless it hangs."""
        progress = self._loader.progress
        hangs, moved = self._watch.hangs(progress), progress != self._progress
        if not moved and (hangs or now - self._told_s < LIFE_S):
            return
        self._progress, self._told_s = progress, now
        done, total = progress
        self._say(loading=pb.Loading(done_bytes=done, total_bytes=total))


def hosted(held: dict[ExpertKey, HeldExpert]) -> pb.HostedExperts:
    """What a worker says it holds, with digests."""
    message = pb.HostedExperts()
    for layer, index in sorted(held):
        if not message.sets or message.sets[-1].layer != layer:
            message.sets.add(layer=layer)
        message.sets[-1].indices.append(index)
        message.digests.extend(held[layer, index].digests)
    return message
