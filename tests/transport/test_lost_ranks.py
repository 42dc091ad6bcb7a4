"""Ranks as real processes, killed without warning."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("rank_process.py")


class Rank:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = f"127.0.0.1:{self.read()['port']}"

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def write(self, plan: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(plan) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    started = [Rank() for _ in range(3)]
    yield started
    for rank in started:
        rank.stop()


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_survivors_name_the_killed_rank_and_build_a_new_mesh(ranks: list[Rank], victim: int) -> None:
    addresses = [rank.address for rank in ranks]
    for index, rank in enumerate(ranks):
        rank.write({"rank": index, "size": 3, "epoch": 1, "addresses": addresses})
    for rank in ranks:
        assert "up" in rank.read()

    ranks[victim].process.kill()
    killed = time.monotonic()
    survivors = [rank for index, rank in enumerate(ranks) if index != victim]
    for rank in survivors:
        answer = rank.read()
        assert (answer["error"], answer["rank"]) == ("PeerLost", victim), answer
    assert time.monotonic() - killed < 5

    addresses = [rank.address for rank in survivors]
    for index, rank in enumerate(survivors):
        rank.write({"rank": index, "size": 2, "epoch": 2, "addresses": addresses, "rounds": 10})
    for rank in survivors:
        assert "up" in rank.read()
        assert rank.read() == {"sum": 3.0}
