"""Tests that need a GPU: `make gpu` runs them. Without one they are skipped, with the reason."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream

MEET_S = 3.0


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDriver]:
    try:
        driver = CudaDriver()
    except CudaError as error:
        pytest.skip(str(error))
    yield driver
    driver.close()


@pytest.fixture(params=HostStep)
def form(gpu: CudaDriver, meeting_forms: set[HostStep], request: pytest.FixtureRequest) -> HostStep:
    """The forms of the host step by which ranks that are threads of one process can wait for each other."""
    form = HostStep(request.param)
    if form not in meeting_forms:
        pytest.skip(f"this driver has no host steps by {form}, or calls those of two streams one after the other")
    return form


@pytest.fixture(scope="session")
def meeting_forms(gpu: CudaDriver) -> set[HostStep]:
    return {form for form in HostStep if form is HostStep.SPLIT or _can_meet(gpu, form)}


def _can_meet(gpu: CudaDriver, form: HostStep) -> bool:
    met, seen = threading.Event(), list[bool]()
    try:
        with CudaStream(gpu, form) as first, CudaStream(gpu, form) as second:
            first.submit(lambda: seen.append(met.wait(MEET_S)), "a step that waits for another stream's")
            second.submit(met.set, "that one")
            first.synchronise(60.0)
    except CudaError:
        return False
    return seen == [True]
