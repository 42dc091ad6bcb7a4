"""How fast a machine computes is measured apart, once for its hardware, and a damaged memory of it is measured anew."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from motley.daemon.machine import compute_speed as measuring
from motley.daemon.machine.compute_speed import ComputeSpeed, FormatSpeed
from motley.daemon.node.survey import speeds

KNOWN = ComputeSpeed([FormatSpeed(name, 1e10, 1e11) for name in ("int4", "int8", "fp16", "fp32")], 1e-6)


async def test_it_is_measured_once_for_the_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    async def measure(threads: int) -> ComputeSpeed:
        asked.append(threads)
        return KNOWN

    monkeypatch.setattr(speeds, "measured_apart", measure)
    for threads in (1, 1, 2, 1):
        assert await speeds.compute_speed(threads, tmp_path / "node") == KNOWN
    assert asked == [1, 2]
    monkeypatch.setattr(speeds, "release", lambda: "another")
    assert await speeds.compute_speed(1, tmp_path / "node") == KNOWN
    assert asked == [1, 2, 1], "another package has other kernels"
    file = tmp_path / "node" / speeds.FILE
    for damage in ("", "[]", '{"x"', json.dumps({speeds.identity(1): {"formats": [], "call_s": 1}})):
        file.write_text(damage)
        assert await speeds.compute_speed(1, tmp_path / "node") == KNOWN
    assert asked == [1, 2, 1, 1, 1, 1, 1]
    kept = json.loads(file.read_text())
    kept[speeds.identity(1)]["at"] -= speeds.REMEMBERED_S
    file.write_text(json.dumps(kept))
    assert await speeds.compute_speed(1, tmp_path / "node") == KNOWN
    assert asked == [1, 2, 1, 1, 1, 1, 1, 1], "what a busy machine was like yesterday"


@pytest.mark.skipif(sys.platform == "win32", reason="has no locks for it")
async def test_two_daemons_of_a_machine_do_not_measure_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    async def measure(threads: int) -> ComputeSpeed:
        asked.append(threads)
        await asyncio.sleep(0)
        return KNOWN

    monkeypatch.setattr(speeds, "measured_apart", measure)
    assert await asyncio.gather(*(speeds.compute_speed(1, tmp_path) for _ in range(3))) == [KNOWN] * 3
    assert asked == [1]


async def test_a_process_of_its_own_measures(tmp_path: Path) -> None:
    measured = await speeds.compute_speed(1, tmp_path)
    assert measured is not None
    assert [each.format for each in measured.formats] == ["int4", "int8", "fp16", "fp32"]
    for each in measured.formats:
        assert 1e7 < each.bytes_per_s < 1e13
        assert each.row_bytes_per_s > each.bytes_per_s, "rows share what is read"
    assert 0 < measured.call_s < 1e-2
    assert speeds.FILE in os.listdir(tmp_path)


async def test_one_that_cannot_be_measured_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(speeds, "start_child", lambda *_, **__: _started_nonsense())
    assert await speeds.compute_speed(1, tmp_path) is None
    assert "ended with status 3" in caplog.text
    assert speeds.FILE not in os.listdir(tmp_path)


async def _started_nonsense() -> object:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", "print('oh'); raise SystemExit(3)", stdin=-1, stdout=-1
    )


def test_products_are_as_large_as_they_say() -> None:
    products = measuring._floats(1)
    assert sum(size for size, _ in products) == measuring.READ
