"""Keeping a process on a core."""

from __future__ import annotations

import psutil

from motley.daemon.machine.processor import pin_to_core


def test_pinning_wraps_around_the_cores_allowed() -> None:
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        assert pin_to_core(0) is False
        return
    before = process.cpu_affinity()
    assert before
    try:
        assert pin_to_core(len(before)) is True
        assert process.cpu_affinity() == [before[0]]
    finally:
        process.cpu_affinity(before)
