"""Hosts of small experts for tests: threads of one process, or a process of its own that can be killed.

Expert e of layer l makes ``tanh(x @ W)`` of a row x, W drawn from (l, e): the same bits whoever computes it.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from motley.daemon.experts.factors import read_factors
from motley.daemon.experts.wire import Answer, Call, ExpertWire, Kind, Part, Refusal, RefusalCode, kind_of
from motley.daemon.weights.stored import Source
from motley.plugins.engine import F32
from motley.transport import Listener, Membership, Message, Messenger, Plain, WireFormat

HIDDEN = 64

READING = threading.Lock()
"""A checkpoint is read by one thread at a time."""

Compute = Callable[[int, int, F32], F32]
"""Layer, expert and f32[N, D] to f32[N, D]."""
Habit = Callable[[ExpertWire, Answer], Sequence[Any]]
"""What a host says in the place of an answer: messages, each in parts."""
Leaves = Callable[[], bool]
"""Whether a host that has just answered a call leaves now."""


@cache
def weights(layer: int, expert: int, hidden: int = HIDDEN) -> F32:
    random = np.random.default_rng((layer, expert))
    return random.standard_normal((hidden, hidden), np.float32) / np.float32(hidden**0.5)


def small_expert(layer: int, expert: int, x: F32) -> F32:
    """Row by row: a matrix product of several rows may round otherwise."""
    matrix = weights(layer, expert, x.shape[1])
    return np.tanh(np.stack([row @ matrix for row in x]))


def expert_of(source: Source, layer: int, expert: int, x: F32) -> F32:
    """An expert of a model, as its definition is."""
    at = f"model.layers.{layer}.mlp.experts.{expert}"
    width = source.shape(f"{at}.gate_proj.weight")[0]
    with READING:
        gate, up = (source.rows(f"{at}.{name}.weight", range(width)) for name in ("gate_proj", "up_proj"))
        down = source.rows(f"{at}.down_proj.weight", range(x.shape[1]))
    gated = x @ gate.T
    result: F32 = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    return result


def member(rank: int, size: int) -> Membership:
    return Membership("session", 1, rank, size, bytes(32), bytes(32))


def honest(wire: ExpertWire, answer: Answer) -> Sequence[Any]:
    return [wire.write_answer(answer)]


def after(calls: int) -> Leaves:
    """Who has answered this call leaves; calls are counted over all hosts that are given the same result."""
    answered = itertools.count(1)
    return lambda: next(answered) == calls


def never() -> bool:
    return False


class Server:
    """Host `number` of a session with so many trunk ranks and hosts."""

    def __init__(
        self,
        number: int,
        trunk: int,
        hosts: int,
        *,
        hidden: int = HIDDEN,
        wire_format: WireFormat = WireFormat.FP32,
        compute: Compute = small_expert,
        holds: set[tuple[int, int]] | None = None,
        habit: Habit = honest,
        pause_s: float = 0.0,
        dies_at: int = 0,
        leaves: Leaves = never,
        forgets: bool = False,
        port: int = 0,
    ) -> None:
        """
        Args:
            holds: (layer, expert); None: all there are.
            pause_s: what a call takes besides.
            dies_at: the number of the call that its process ends at, without an answer; 0: none.
            forgets: what adapters add, with each answer.
        """
        self.calls: list[Call] = []
        self.lacked = 0
        """Calls that were to be made again with what adapters add."""
        self._added: dict[tuple[bytes, int, int], float] = {}
        """By adapter, layer and expert; to each element of a result."""
        self._forgets = forgets
        self.listener = Listener("127.0.0.1", port)
        self.address = f"127.0.0.1:{self.listener.port}"
        self._wire = ExpertWire(hidden, wire_format)
        self._compute = compute
        self._holds = holds
        self._habit = habit
        self._pause_s = pause_s
        self._dies_at = dies_at
        self._leaves = leaves
        self._left = False
        self._trunk = trunk
        self.admit(member(trunk + number, trunk + hosts))

    def admit(self, membership: Membership) -> None:
        self._messenger = Messenger(membership, Plain(), listener=self.listener, accepts=range(self._trunk))

    def serve(self, over: Callable[[], bool]) -> None:
        while not over() and not self._left:
            for event in self._messenger.receive(0.02):
                if isinstance(event, Message) and not self._left:
                    self._answer(event)
                    self._left = self._leaves()
        self._messenger.close()
        self.listener.close()

    def _answer(self, message: Message) -> None:
        if kind_of(message.data) == Kind.FACTORS:
            factors = read_factors(message.data)
            value = sum(float(each.down[0, 0]) for each in factors.products.values())
            self._added[factors.adapter, factors.layer, factors.expert] = value
            return
        call = self._wire.read_call(message.data)
        self.calls.append(call)
        if len(self.calls) == self._dies_at:
            os._exit(1)
        began = time.perf_counter()
        time.sleep(self._pause_s)
        to = [rank for rank in range(32) if call.reply_to >> rank & 1 and rank in self._messenger.connected]
        if self._holds is not None and not all((call.layer, part.expert) in self._holds for part in call.parts):
            refusal = Refusal(call.number, call.layer, RefusalCode.NOT_HERE, "it is not here")
            if message.peer in self._messenger.connected:
                self._messenger.send(message.peer, self._wire.write_refusal(refusal))
            return
        needed = {(name, call.layer, part.expert) for name in call.adapters for part in call.parts}
        if not needed <= self._added.keys():
            self.lacked += 1
            refusal = Refusal(call.number, call.layer, RefusalCode.NO_FACTORS, "", call.parts)
            if message.peer in self._messenger.connected:
                self._messenger.send(message.peer, self._wire.write_refusal(refusal))
            return
        stops = np.cumsum([part.rows for part in call.parts])
        results = [
            self._compute(call.layer, part.expert, rows)
            for part, rows in zip(call.parts, np.split(call.rows, stops[:-1]), strict=True)
        ]
        if call.adapters:
            for part, result, own in zip(call.parts, results, np.split(call.own, stops[:-1]), strict=True):
                added = [0.0] + [self._added[name, call.layer, part.expert] for name in call.adapters]
                result += np.array(added, np.float32)[own][:, None]
            if self._forgets:
                self._added.clear()
        answer = Answer(
            call.number,
            call.layer,
            time.perf_counter() - began,
            list(map(Part._make, call.parts)),
            np.concatenate(results),
        )
        for parts in self._habit(self._wire, answer):
            for rank in to:
                self._messenger.send(rank, parts)


class ServerThread:
    """A `Server` in a thread; leaving the context ends it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.address = server.address
        self._over = threading.Event()
        self._thread = threading.Thread(target=server.serve, args=(self._over.is_set,))

    def __enter__(self) -> ServerThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)


class ServerProcess:
    """A `Server` in a process; leaving the context kills it."""

    def __init__(self, number: int, trunk: int, hosts: int, **options: float) -> None:
        settings = json.dumps({"number": number, "trunk": trunk, "hosts": hosts, **options})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.daemon.experts.expert_server", settings],
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            text=True,
        )
        assert self.process.stdout is not None
        self.address = f"127.0.0.1:{self.process.stdout.readline().strip()}"

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


if __name__ == "__main__":
    alone = Server(**json.loads(sys.argv[1]))
    print(alone.listener.port, flush=True)
    alone.serve(lambda: False)
