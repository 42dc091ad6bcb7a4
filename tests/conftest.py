"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Examples on a busy machine may be slow, to run and to draw; each test has its own limit.
# CI asks whether a change broke something, so it gets the same examples each time; people get new ones.
settings.register_profile(
    "motley", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("motley")


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shares that tests load are not kept in the cache of whoever runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("MOTLEY_CACHE", str(tmp_path_factory.mktemp("shares")))
        yield
