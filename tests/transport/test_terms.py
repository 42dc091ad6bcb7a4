"""The exchange of an all-reduce without its sum, alone and among ranks that sum on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from motley.transport import Algorithm, Communicator, ProtocolError, UsageError, WireFormat
from motley.transport.formats import Codecs
from motley.transport.reduce import sum_encoded

Run = Callable[..., list[Any]]
Array = np.ndarray[Any, Any]


def values(rank: int, elements: int = 1000) -> Array:
    return np.random.default_rng(rank).standard_normal(elements).astype(np.float32)


@pytest.mark.parametrize("wire_format", WireFormat)
def test_ranks_that_sum_elsewhere_agree_with_those_that_sum_here(run_ranks: Run, wire_format: WireFormat) -> None:
    def work(communicator: Communicator) -> list[bytes]:
        _, wire, _ = Codecs(wire_format).of("float32")
        sums = []
        for call in range(3):
            own = values(communicator.rank + 10 * call)
            if communicator.rank == 1:
                communicator.all_reduce(own, Algorithm.ONE_SHOT)
                sums.append(own.tobytes())
                continue
            payload = np.empty(wire.size(len(own)), np.uint8)
            wire.encode(own, payload)
            others = [np.empty_like(payload) for _ in range(communicator.size - 1)]
            communicator.exchange_terms(payload, others, np.float32)
            others.insert(communicator.rank, payload)
            total, scratch = np.empty_like(own), np.empty_like(own)
            sum_encoded([(wire, term) for term in others], total, scratch)
            sums.append(total.tobytes())
        assert communicator.stats.snapshot().collectives == 3
        return sums

    results = run_ranks(3, work, wire_format=wire_format)
    assert results[0] == results[1] == results[2]


def test_alone_nothing_is_exchanged(run_ranks: Run) -> None:
    work = lambda communicator: communicator.exchange_terms(np.zeros(8, np.uint8), [], np.float32)  # noqa: E731
    assert run_ranks(1, work) == [None]


def test_a_wrong_call_is_refused_before_anything_is_sent(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        own = np.zeros(8, np.uint8)
        with pytest.raises(UsageError, match=r"1 x 8 bytes will come, there is room for \[4\]"):
            communicator.exchange_terms(own, [np.zeros(4, np.uint8)], np.float32)
        with pytest.raises(UsageError, match="not int32"):
            communicator.exchange_terms(own, [own.copy()], np.int32)

    assert run_ranks(2, work) == [None, None]


def test_a_peer_that_sums_another_type_is_found_out(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        own = np.zeros(8, np.uint8)
        communicator.exchange_terms(own, [own.copy()], np.float32 if communicator.rank else np.float16)

    assert any(isinstance(result, ProtocolError) for result in run_ranks(2, work))
