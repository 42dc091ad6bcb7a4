"""Tests of the engine for any GPU need one: a real one, or one in software."""

from __future__ import annotations

import os
import sys

import pytest

from tests.software_gpu import show_software_gpu


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    """Skip where there is none; in CI on Linux there has to be one."""
    if why := show_software_gpu():
        if "CI" in os.environ and sys.platform == "linux":
            pytest.fail(why)
        pytest.skip(why)
