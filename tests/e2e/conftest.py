"""No test leaves a process behind."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.e2e.processes import MotleyProcess


@pytest.fixture(autouse=True)
async def _no_process_left() -> AsyncIterator[None]:
    MotleyProcess.started.clear()
    yield
    for process in MotleyProcess.started:
        await process.kill()
