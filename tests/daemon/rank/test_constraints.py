"""Constraints are prepared one after another, beside the steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from motley.daemon.rank import constraints
from motley.daemon.rank.constraints import Preparing
from motley.protocol import worker_pb2 as wp


def test_one_that_was_cancelled_is_not_prepared_and_the_others_hear_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, prepared, done = threading.Event(), [], threading.Semaphore(0)

    def prepare(constraint: Any, vocabulary: Any) -> Any:
        go_on.wait(30)
        prepared.append(constraint.json_schema)
        done.release()

    monkeypatch.setattr(constraints, "_prepare", prepare)
    preparing = Preparing()
    for number, name in enumerate(("slow", "cancelled", "last")):
        preparing.begin(wp.Decode(request_id=name, constraint={"json_schema": name}), float(number))
    assert preparing.cancel("cancelled")
    assert not preparing.cancel("cancelled")
    assert list(preparing.unspoken(5.5, 5.0)) == ["slow"]
    assert list(preparing.unspoken(8.0, 5.0)) == ["last"]
    go_on.set()
    for _ in range(2):
        assert done.acquire(timeout=30)
    assert prepared == ["slow", "last"]
