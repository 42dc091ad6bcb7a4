"""Tests that need a GPU: `make gpu` runs them. Without one they are skipped, with the reason.

Ranks are threads of one process here. Now and then CUDA waits for the whole device, to allocate or to load a kernel. It
would wait for ever while a stream waits on the device for a rank that makes such a call. So only one rank of a test has
its stream wait there, and the others compute on the host; or no stream does (`HostStep.SPLIT`). In a mesh every rank is
a process of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import measure_host_steps


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDriver]:
    try:
        driver = CudaDriver()
    except CudaError as error:
        pytest.skip(str(error))
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def forms(gpu: CudaDriver) -> set[HostStep]:
    return {*measure_host_steps(gpu), HostStep.SPLIT}


@pytest.fixture(params=HostStep)
def form(forms: set[HostStep], request: pytest.FixtureRequest) -> HostStep:
    """The forms of the host step that this driver has."""
    form = HostStep(request.param)
    if form not in forms:
        pytest.skip(f"this driver has no host steps by {form}")
    return form
