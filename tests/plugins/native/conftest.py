"""After every test of our own kernels the processor's best level is set again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.plugins.native.native_levels import LEVELS, set_level


@pytest.fixture(autouse=True)
def _best_level_again() -> Iterator[None]:
    yield
    set_level(LEVELS[-1])
