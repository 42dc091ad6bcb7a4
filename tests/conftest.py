"""Settings for all tests: how many examples are drawn, and what the processes of one run share."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.software_gpu import show_software_gpu

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

# Before ONNX Runtime is imported, which looks for GPUs once. Tests that need one say why there is none.
show_software_gpu()

KERNELS = Path(__file__).parents[1] / "build" / "kernels-of-tests"
"""What tests compile, kept from run to run by all that decides about it: source, compiler, options and processor."""

SHARED_MESH = "shared mesh"
"""In the ids of tests that use one mesh together; what follows tells one such mesh from another."""
TOGETHER = (
    "tests/plugins/onnxruntime_gpu/",
    "tests/orchestrator/api/test_anthropic.py",
    "tests/bench/reports/test_plots.py",
)
"""What the ids of other tests begin with that share a process: a GPU's driver compiles each program once in one, in
software for half a second each, and some packages take seconds to import."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays to the end: Python looks for no garbage in it, neither while it grows nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 10, 10)
        gc.enable()


MANY = 8
"""So many variants of a test run at every commit, whatever their parameters are."""


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Of a test with many variants, as few run as have every value of every parameter; the others wait for `make soak`.

    Most faults show with a certain value. The order in which variants are gone through mixes values; it is always one.
    Where what waits is left out, it is left out here: to collect twice as many tests takes seconds in each process.
    """
    result = yield
    variants = metafunc._calls  # of pytest's own, as nothing else tells variants before tests are made of them
    at_once = [] if metafunc.definition.get_closest_marker("soak") else [each for each in variants if not _waits(each)]
    if len(at_once) > MANY:
        met: set[tuple[str, str]] = set()
        for variant in sorted(at_once, key=lambda variant: crc32(f"{variant.id}]".encode())):
            values = {(name, str(value)) for name, value in variant.params.items()}
            if values <= met:
                variant.marks.append(pytest.mark.soak.mark)
            met |= values
    if at_once and metafunc.config.option.markexpr == "not soak":
        metafunc._calls = [each for each in variants if not _waits(each)]
    return result


def _waits(variant: Any) -> bool:
    return any(mark.name == "soak" for mark in variant.marks)


class Scheduling(LoadScopeScheduling):
    """Tests that share a mesh, or what was compiled, go to one process, first of all as they are many; any other goes
    to whoever is free.

    By their ids: of the group that a test is marked to be in, xdist 3.8 takes no notice under pytest 9.2.
    """

    def _split_scope(self, nodeid: str) -> str:
        shared = re.search(rf"{SHARED_MESH}[\w ]*", nodeid)
        if shared:
            return shared[0]
        return next(filter(nodeid.startswith, TOGETHER), nodeid)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """As there, but what is done is forgotten: all that a process ever got would be counted again after each test,
        which takes seconds where thousands of tests are units of their own."""
        test = self.registered_collections[node][item_index]
        units, unit = self.assigned_work[node], self._split_scope(test)
        units[unit][test] = True
        if all(units[unit].values()):
            del units[unit]
        self._reschedule(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """As there, but a test that has ended its process is not begun again: it would end the next one, too, and the
        run would go on without end."""
        units = self.assigned_work.pop(node)
        fatal = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        for unit in units.values():
            if fatal in unit:
                unit[fatal] = True
        self.workqueue.update((name, unit) for name, unit in units.items() if not all(unit.values()))
        for other in self.assigned_work:
            self._reschedule(other)
        return fatal


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(autouse=True, scope="session")
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Shares that tests load are kept once for the whole run, and not in the cache of whoever runs it; nor does their
    lease count, if they have one."""
    whole_run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder in that of the run
        whole_run = whole_run.parent
    KERNELS.mkdir(parents=True, exist_ok=True)
    (whole_run / "cache" / "motley").mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another worker has done so; or this is Windows, whose users may make no links
        (whole_run / "cache" / "motley" / "kernels").symlink_to(KERNELS, target_is_directory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(whole_run / "cache"))
        patch.setenv("MOTLEY_HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("MOTLEY_CACHE", str(whole_run / "shares"))
        patch.setenv("MOTLEY_LEASE", str(whole_run / "leases" / "lease.json"))
        yield
