"""The expert host: a worker that holds experts and computes them for the ranks of the trunk.

Its one thread answers calls as they come, one after another, and between two of them looks what the daemon wants: what
is to be held may change while it serves. What is missing is loaded beside (`motley.daemon.experts.loading`); what is
not wanted any more is let go at once, and whoever still asks for it is told so. A rank of the trunk that is lost is
forgotten; it may come back. A host that leads a group (`motley.daemon.experts.group`) has a part of each expert itself
and calls the others for the rest.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from motley.daemon.experts.factors import Factors, read_factors
from motley.daemon.experts.group import Group, Refused
from motley.daemon.experts.holding import Holding
from motley.daemon.experts.wire import (
    Answer,
    Buffer,
    Call,
    ExpertWire,
    ExpertWireError,
    Kind,
    Refusal,
    RefusalCode,
    kind_of,
)
from motley.daemon.machine.files import raise_file_limit
from motley.daemon.pipe.daemon import Commands
from motley.plugins.engine import F32, EngineError
from motley.transport import Message, Messenger, WireFormat
from motley.transport.links.link import Waitable

logger = logging.getLogger(__name__)

SWITCH_S = 5e-4
"""Seconds after which the interpreter goes from thread to thread, a tenth of the usual: calls wait for the loading."""


class ExpertHost:
    """An expert host at work: it answers the ranks' calls while what it holds may change."""

    def __init__(
        self,
        messenger: Messenger,
        holding: Holding,
        *,
        trunk: int,
        wire_format: WireFormat,
        daemon: Waitable,
        commands: Commands,
        group: Group | None = None,
    ) -> None:
        """
        Args:
            messenger: accepts the trunk's ranks.
            holding: the experts that this worker holds.
            trunk: how many ranks the trunk has.
            wire_format: how rows travel.
            daemon: can be read when there are `commands`.
            commands: the daemon's.
            group: the other workers, if this one leads a group; None: it is alone, and has all of every expert.
        """
        self._trunk = trunk
        self._format = wire_format
        self._messenger = messenger
        self._holding = holding
        self._daemon = daemon
        self._commands = commands
        self._group = group
        self._wire: ExpertWire | None = None

    def run(self) -> None:
        """Load and compute until the end.

        Raises:
            TransportError: a worker of the group is lost.
            Exception: what `Holding.attend` raises.
        """
        while True:
            self._messenger.wait([self._daemon], self._holding.patience_s)
            events = self._messenger.receive(0.0)
            for event in events:
                if isinstance(event, Message):
                    self._on_message(event)
            if self._group is not None and not events:
                self._group.check()
            self._holding.attend(self._commands(0.0))
            if self._wire is None and (hidden := self._holding.hidden) is not None:
                self._wire = ExpertWire(hidden, self._format)

    def _on_message(self, message: Message) -> None:
        if self._wire is None:
            self._drop(message.peer, "it asks for experts before this host is ready")
            return
        try:
            if kind_of(message.data) == Kind.FACTORS:
                self._adapt(read_factors(message.data), message.data)
                return
            call = self._wire.read_call(message.data)
        except ExpertWireError as error:  # nobody knows what is to be answered
            self._drop(message.peer, f"it has sent what is no call: {error}")
            return
        if call.reply_to >> self._trunk:
            reason = f"the answer is for ranks {call.reply_to:#b} of {self._trunk}"
            reply: Answer | Refusal = Refusal(call.number, call.layer, RefusalCode.BAD_CALL, reason)
        else:
            reply = self._reply(call, message.data)
        if isinstance(reply, Refusal):  # who has called can ask another host; the others did not ask
            self._send([message.peer], self._wire.write_refusal(reply))
            return
        ranks = [rank for rank in range(self._trunk) if call.reply_to >> rank & 1]
        self._send(ranks, self._wire.write_answer(reply))

    def _adapt(self, factors: Factors, data: Buffer) -> None:
        """Have what an adapter adds to an expert.

        Args:
            data: that, as it came.

        Raises:
            TransportError: a worker of the group is lost.
        """
        if self._group is not None:
            self._group.hand_on(data)
        self._holding.adapt(factors)

    def _reply(self, call: Call, data: Buffer) -> Answer | Refusal:
        """An answer, or why there is none."""
        if (refusal := self._holding.refusal(call)) is not None:
            return refusal
        began = time.perf_counter()
        try:
            rows = self._compute(call) if self._group is None else self._group.compute(call, data, self._holding)
        except Refused as refused:
            return refused.refusal
        except (EngineError, MemoryError) as error:
            return Refusal(call.number, call.layer, RefusalCode.FAILED, str(error) or "out of memory")
        return Answer(call.number, call.layer, time.perf_counter() - began, call.parts, rows)

    def _compute(self, call: Call) -> F32:
        """f32[N, D]: what the call's experts make of its rows, valid until the next call."""
        results = [whole for (whole,) in self._holding.sums(call)]
        return results[0] if len(results) == 1 else np.concatenate(results)

    def _send(self, ranks: Iterable[int], parts: list[Any]) -> None:
        """A rank that is not there gets nothing: it asks for itself when it is."""
        connected = self._messenger.connected
        for rank in ranks:
            if rank in connected:
                self._messenger.send(rank, parts)

    def _drop(self, rank: int, reason: str) -> None:
        """End the link to a rank that says what makes no sense."""
        logger.warning("rank %d is dropped: %s", rank, reason)
        self._messenger.drop(rank, reason)


def prepare_process() -> None:
    """Make this process fit for a host: many open files, and a thread that loads beside one that answers."""
    sys.setswitchinterval(SWITCH_S)
    raise_file_limit()
