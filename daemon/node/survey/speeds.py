"""How fast this machine computes, measured for the hardware that it has, and remembered in the node's folder for a day.

A process of its own measures, so that its memory is given back and NumPy has as many threads as ranks will.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import psutil

from motley.daemon.machine.compute_speed import ComputeSpeed, measure_compute_speed
from motley.daemon.machine.ending import end_process, end_with_owner
from motley.daemon.machine.files import lock_file
from motley.daemon.machine.processor import cpu_name
from motley.daemon.node.child import kill_child, start_child
from motley.plugins.engine import FormatSpeed
from motley.protocol.release import release

logger = logging.getLogger(__name__)

MEASURE_S = 30.0
"""A measurement takes two seconds; one that takes this long hangs, and is done without."""
REMEMBERED_S = 24 * 3600.0
"""For so long: who was measured while something else computed there shall not be slow for good."""
LOOK_S = 0.1
"""How often a daemon looks whether another one of this machine has measured."""
FILE = "speeds.json"
LOCK = "speeds.lock"
NUMPY_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""What tells the libraries that NumPy computes with how many threads to have."""


async def compute_speed(threads: int, folder: Path) -> ComputeSpeed | None:
    """How fast this machine computes with so many threads, as was measured on this hardware before, or is now.

    Args:
        folder: where what was measured is kept.

    Returns:
        None: it could not be measured; the log says why.
    """
    hardware = identity(threads)
    if (known := _remembered(folder / FILE, hardware)) is not None:
        return known
    async with _alone(folder / LOCK):
        if (known := _remembered(folder / FILE, hardware)) is not None:
            return known  # another daemon of this machine has measured meanwhile
        measured = await measured_apart(threads)
        if measured is not None:
            with suppress(OSError):
                _remember(folder / FILE, hardware, measured)
    return measured


@asynccontextmanager
async def _alone(file: Path) -> AsyncIterator[None]:
    """Have no other daemon of this machine measure at the same time, as they would measure each other, where the system
    has locks for it; whoever waits for longer than a measurement may take goes on."""
    with ExitStack() as stack:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(_lock_in_time, stack.enter_context(file.open("w")))
        yield


def _lock_in_time(file: IO[str]) -> None:
    until = time.monotonic() + MEASURE_S
    while not lock_file(file, exclusive=True) and time.monotonic() < until:
        time.sleep(LOOK_S)


def identity(threads: int) -> str:
    """What this machine's speed depends on: another identity means that it must be measured anew."""
    gib = round(psutil.virtual_memory().total / 2**30)
    return f"{cpu_name()}, {platform.machine()}, {threads} threads, {gib} GiB, motley {release()}"


def _remembered(file: Path, hardware: str) -> ComputeSpeed | None:
    """What a file says of this hardware; None if it says nothing, or nothing that can be read."""
    try:
        told = json.loads(file.read_text("utf-8"))[hardware]
        fresh = 0 <= time.time() - float(told["at"]) < REMEMBERED_S
        return _read(told) if fresh else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _remember(file: Path, hardware: str, measured: ComputeSpeed) -> None:
    """Write a measurement beside those of other hardware, such as fewer threads; a damaged file is replaced.

    Raises:
        OSError: the file cannot be written.
    """
    try:
        known = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    kept = known if isinstance(known, dict) else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    partial.write_text(json.dumps({**kept, hardware: {"at": time.time(), **asdict(measured)}}, indent=1), "utf-8")
    partial.replace(file)


def _read(told: dict[str, Any]) -> ComputeSpeed:
    """
    Raises:
        LookupError, TypeError, ValueError: that is no measurement.
    """
    formats = [
        FormatSpeed(str(each["format"]), float(each["bytes_per_s"]), float(each["row_bytes_per_s"]))
        for each in told["formats"]
    ]
    speed = ComputeSpeed(formats, float(told["call_s"]))
    if not formats or not all(each.bytes_per_s > 0 and each.row_bytes_per_s > 0 for each in formats):
        raise ValueError("a speed must be above 0")
    return speed


async def measured_apart(threads: int) -> ComputeSpeed | None:
    """Measure in a process of its own; None: that failed, and the log says why."""
    env = {**os.environ, **dict.fromkeys(NUMPY_THREADS, str(threads))}
    pipe = asyncio.subprocess.PIPE
    process = await start_child("motley.daemon.node.survey.speeds", str(threads), env=env, stdout=pipe)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(MEASURE_S):
            out = await process.stdout.read()
            status = await process.wait()
        return _read(json.loads(out))
    except TimeoutError:
        logger.warning("measuring how fast this machine computes took longer than %.0f s", MEASURE_S)
    except (ValueError, LookupError, TypeError):
        logger.warning("measuring how fast this machine computes ended with status %d", status)
    finally:
        await kill_child(process)
    return None


def main() -> None:
    """Measure with as many threads as the first argument says; the result is a line of JSON."""
    end_with_owner()
    json.dump(asdict(measure_compute_speed(int(sys.argv[1]))), sys.stdout)


if __name__ == "__main__":
    main()
    end_process()
