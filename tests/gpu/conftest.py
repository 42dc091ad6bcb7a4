"""Tests that need a GPU: `make gpu` runs them. Without one they are skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError


@pytest.fixture(scope="session")
def gpu() -> Iterator[CudaDriver]:
    try:
        driver = CudaDriver()
    except CudaError as error:
        pytest.skip(str(error))
    yield driver
    driver.close()
