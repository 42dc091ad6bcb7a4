"""Settings for all tests: how many examples are drawn, and what the processes of one run share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Examples on a busy machine may be slow, to run and to draw; each test has its own limit.
# CI asks whether a change broke something, so it gets the same examples each time; people get new ones.
settings.register_profile(
    "commit",
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.register_profile("soak", settings.get_profile("commit"), max_examples=200, derandomize=False)
settings.load_profile("commit")  # `make soak` chooses the other one

# Before NumPy is imported: as many pytest processes as cores, each with as many threads that spin, hinder each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests start hundreds of processes: each would compile all of Motley again where compiled modules are not kept.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shares that tests load are kept once for the whole run, and not in the cache of whoever runs it."""
    whole_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder in that of the run
        whole_run = whole_run.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(whole_run / "cache"))
        patch.setenv("MOTLEY_CACHE", str(whole_run / "shares"))
        yield
