"""Workers on several nodes that are one expert host together, for experts that are too large for each of them.

Every expert is cut in slices, of which each worker has some, next to each other. The last worker leads: it hands a call
on to all, as it came, and each computes what its slices make of the rows. The results are added by a tree over the
slices (`motley.daemon.models.cutting.tree`): a worker sums the subtrees that its slices fill and sends these to the
leader, which sums on and answers. So an answer has the same bits however the slices are dealt out, to one worker or to
many.

The links are those of a mesh. A worker that is lost ends the group: its calls cannot be answered any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from motley.daemon.experts.factors import read_factors
from motley.daemon.experts.holding import LOADING_LOOK_S, Holding
from motley.daemon.experts.wire import (
    Answer,
    Buffer,
    Call,
    ExpertWire,
    ExpertWireError,
    Kind,
    Part,
    Refusal,
    RefusalCode,
    kind_of,
)
from motley.daemon.models.cutting.tree import fold, subtrees
from motley.daemon.pipe.daemon import Commands
from motley.plugins.engine import F32, EngineError
from motley.transport import MAX_MESSAGE, Communicator, ProtocolError, WireFormat


class Refused(Exception):
    """A worker of the group does not answer a call, and says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.refusal = refusal


class Group:
    """The other workers of a group, for the one that leads it: it has each call computed by all. One thread owns it."""

    def __init__(self, communicator: Communicator, slices: Sequence[int]) -> None:
        """
        Args:
            communicator: of the group; stays the caller's.
            slices: of every worker, how many it has.
        """
        self._communicator = communicator
        self._leader = communicator.rank
        self._wire: ExpertWire | None = None
        bounds = np.cumsum([0, *slices]).tolist()
        self._whole = range(bounds[-1])
        self._spans = [subtrees(range(start, stop), bounds[-1]) for start, stop in pairwise(bounds)]

    def check(self) -> None:
        """Look whether everyone is still there.

        Raises:
            PeerLost: a worker is gone.
        """
        self._communicator.check()

    def compute(self, call: Call, data: Buffer, holding: Holding) -> F32:
        """f32[N, D]: what the call's experts make of its rows.

        Args:
            data: the call as it came.
            holding: this worker's slices.

        Raises:
            Refused: another worker cannot compute it.
            EngineError, MemoryError: this one cannot.
            TransportError: another one is lost, or answers what it was not asked.
        """
        self.hand_on(data)
        sums: list[dict[range, F32]] = []
        failed: Exception | None = None
        try:
            sums = [dict(zip(self._spans[self._leader], own, strict=True)) for own in holding.sums(call)]
        except (EngineError, MemoryError) as error:
            failed, sums = error, [{} for _ in call.parts]
        for worker in range(self._leader):  # all of them, also where one has failed: they have been asked
            failed = self._collect(worker, call, sums) or failed
        if failed is not None:
            raise failed
        results = [fold(self._whole, terms, lambda _, left, right: left + right) for terms in sums]
        return results[0] if len(results) == 1 else np.concatenate(results)

    def hand_on(self, data: Buffer) -> None:
        """Give the other workers a message as it came.

        Raises:
            TransportError: one is lost.
        """
        self._communicator.broadcast_message(data, self._leader, None)
        self._communicator.flush()

    def _collect(self, worker: int, call: Call, sums: Sequence[dict[range, F32]]) -> Refused | None:
        """Take a worker's sums for every expert of a call, or why there are none."""
        if self._wire is None:
            self._wire = ExpertWire(call.rows.shape[1], WireFormat.FP32)
        for part, terms in zip(call.parts, sums, strict=True):
            for span in self._spans[worker]:
                pieces: list[F32] = []
                for stretch in self._wire.stretches(part.rows, MAX_MESSAGE):
                    data = self._communicator.recv(worker, self._communicator.deadline_s)
                    try:
                        answer = self._wire.read_answer(data)
                    except ExpertWireError as error:
                        raise ProtocolError(worker, f"it has sent what is no answer: {error}") from error
                    if isinstance(answer, Refusal):
                        return Refused(answer)
                    expected = (call.number, call.layer, _stretch_of(part, stretch))
                    if (answer.number, answer.layer, *answer.parts) != expected:
                        raise ProtocolError(worker, f"it has answered something else than call {call.number}")
                    pieces.append(answer.rows)
                terms[span] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return None


class GroupMember:
    """A worker of a group that does not lead it: it computes its slices for the one that does."""

    def __init__(
        self,
        communicator: Communicator,
        holding: Holding,
        *,
        wire_format: WireFormat,
        commands: Commands,
    ) -> None:
        """
        Args:
            communicator: of the group; stays the caller's.
            holding: this worker's slices of the experts.
            wire_format: how rows travel in calls; in answers to the worker that leads they are FP32.
            commands: the daemon's.
        """
        self._communicator = communicator
        self._leader = communicator.size - 1
        self._holding = holding
        self._format = wire_format
        self._commands = commands
        self._call_wire: ExpertWire
        self._wire: ExpertWire

    def run(self) -> None:
        """Load and compute until the end.

        Raises:
            TransportError: another worker is lost.
            Exception: what `Holding.attend` raises.
        """
        communicator = self._communicator
        while (hidden := self._holding.hidden) is None:  # calls wait as long
            communicator.check()
            self._holding.attend(self._commands(LOADING_LOOK_S))
        self._call_wire, self._wire = ExpertWire(hidden, self._format), ExpertWire(hidden, WireFormat.FP32)
        while True:
            if communicator.wait_message(self._leader, self._holding.patience_s):
                self._answer(communicator.broadcast_message(None, self._leader, communicator.deadline_s))
            self._holding.attend(self._commands(0.0))

    def _answer(self, data: bytes) -> None:
        """Send the sums for a call, an expert and a subtree at a time, or a refusal in the place of the next. In FP32
        they may be longer than the call, and more than a message holds: then in several."""
        if kind_of(data) == Kind.FACTORS:
            self._holding.adapt(read_factors(data))
            return
        call, wire = self._call_wire.read_call(data), self._wire
        if (refusal := self._holding.refusal(call)) is None:
            try:
                for part, sums in zip(call.parts, self._holding.sums(call), strict=True):
                    for rows in sums:
                        for stretch in wire.stretches(part.rows, MAX_MESSAGE):
                            own = [_stretch_of(part, stretch)]
                            self._send(wire.write_answer(Answer(call.number, call.layer, 0.0, own, rows[stretch])))
            except (EngineError, MemoryError) as error:
                reason = str(error) or "out of memory"
                refusal = Refusal(call.number, call.layer, RefusalCode.FAILED, reason)
        if refusal is not None:
            self._send(wire.write_refusal(refusal))

    def _send(self, parts: Sequence[Buffer]) -> None:
        self._communicator.send(b"".join(parts), self._leader)


def _stretch_of(part: Part, rows: slice) -> Part:
    """The part of an answer that brings these of an expert's rows."""
    return part._replace(rows=rows.stop - rows.start)
