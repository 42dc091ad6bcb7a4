"""What a rank answers when it is asked for room, on an engine that has too little memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from motley.daemon.rank.executor import Executor
from motley.daemon.rank.steps import Close, Open, Reserve, StepError
from motley.plugins.engine import EngineMemoryError
from motley.protocol import mesh_pb2 as pb
from motley.transport.stats import Stats

SAMPLING = pb.Sampling(top_p=1.0, repetition_penalty=1.0).SerializeToString()
PROMPT = np.array([1, 2, 3], np.int32)


class Engine:
    """Opens slots while there is memory for them, and reserves what fits."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.most_open = 1
        self.most_tokens = 100

    def open_slot(self, slot: int, _prompt: int) -> None:
        assert slot not in self.open
        if len(self.open) >= self.most_open:
            raise EngineMemoryError("the device is full")
        self.open.add(slot)

    def close_slot(self, slot: int) -> None:
        self.open.remove(slot)

    def reserve(self, slot: int, tokens: int) -> None:
        assert slot in self.open
        if tokens > self.most_tokens:
            raise MemoryError


def test_a_rank_without_memory_says_so_and_lives_on() -> None:
    engine = Engine()
    executor = Executor(cast(Any, engine), cast(Any, None), range(10), 1, Stats())
    assert executor.execute(Open(0, 50, SAMPLING, PROMPT)) == b""
    assert executor.execute(Open(1, 50, SAMPLING, PROMPT)) == b"the device is full"
    assert executor.execute(Reserve(0, 200)) == b"out of memory"
    assert executor.execute(Reserve(1, 50)) == b"the device is full"
    engine.most_open = 2
    assert executor.execute(Reserve(1, 50)) == b""
    engine.most_open = 0
    assert executor.execute(Close(0)) is None
    assert executor.execute(Open(0, 50, SAMPLING, PROMPT)) == b"the device is full"
    for slot in (0, 1):
        assert executor.execute(Close(slot)) is None
    assert engine.open == set()
    with pytest.raises(StepError, match="slot 0 is not open"):
        executor.execute(Reserve(0, 50))
