"""What a rank answers when it is asked for room, and what it does with what other ranks send: all of it is checked."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.executor import Executor
from motley.daemon.rank.steps import Close, Open, Reserve, StepError, decode
from motley.daemon.sampling.parameters import SamplingError
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


def rank_that_computes_nothing() -> Executor:
    engine = SimpleNamespace(
        open_slot=lambda slot, tokens: None, close_slot=lambda slot: None, reserve=lambda slot, tokens: None
    )
    return Executor(cast(Any, engine), lambda ids: np.zeros((len(ids), 4), np.float32), range(64), 8, Stats(0, 1))


def test_sampling_that_is_none_is_an_error_of_the_step() -> None:
    with pytest.raises(StepError, match="the 3 bytes on sampling of an Open are malformed"):
        rank_that_computes_nothing().execute(Open(0, 8, b"\xff\xff\xff", np.zeros(2, np.int32)))


@given(st.integers(0, 3), st.binary(max_size=40), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
def test_whatever_opens_a_sequence_opens_it_or_is_refused(slot: int, sampling: bytes, prompt: list[int]) -> None:
    message = decode(Open(slot, 8, sampling, np.array(prompt, np.int32)).encode())
    with suppress(StepError, SamplingError):
        assert rank_that_computes_nothing().execute(message) == b""
