"""Loading the experts of a host: beside whoever computes, in order, and given up where nobody wants them any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.daemon.experts.gate import examine_expert
from motley.daemon.experts.keys import ExpertKey
from motley.daemon.experts.loading import ExpertLoader, HeldExpert
from motley.daemon.loading.answers import GateError
from motley.daemon.loading.fetching import LoadError
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.expert_graph import build_expert_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.engine import F32, EngineError, EngineOptions
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.onnxruntime.experts import Chain
from motley.plugins.onnxruntime.hosted_experts import OnnxRuntimeExperts
from motley.plugins.reference.engine import ReferenceExperts
from tests.daemon.experts.test_host import CASE, assignment, every_expert

EVERY = every_expert(CASE.model)


def loader(folder: Path, quantisation: str = "fp32", exact: bool = False) -> ExpertLoader:
    order = assignment(CASE, [EVERY], quantisation=quantisation)
    order.model.exact = exact
    return ExpertLoader(order, models=None, cache=ShareCache(folder), threads=1)


def wait_for(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until
        time.sleep(0.001)


def take(loading: ExpertLoader) -> dict[ExpertKey, HeldExpert]:
    """All that is being loaded."""
    taken: list[tuple[ExpertKey, HeldExpert]] = []

    def over() -> bool:
        done, total = loading.progress
        assert done <= total or not total
        taken.extend(loading.finished())
        return not loading.busy

    wait_for(over)
    return dict(taken)


class Held:
    """Writing share files stops at each until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Semaphore(0)
        self.go = threading.Semaphore(0)
        self.ended = 0
        monkeypatch.setattr("motley.daemon.loading.planned.write_share", self)

    def __call__(self, source: Any, weights: Any, size: int, file: Path, progress: Callable[[int, int], None]) -> None:
        self.begun.release()
        assert self.go.acquire(timeout=30)
        write_share(source, weights, size, file, progress)
        self.ended += 1


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
def test_experts_come_in_order_and_from_the_cache_the_next_time(quantisation: str, tmp_path: Path) -> None:
    digests = []
    for _ in range(2):
        with loader(tmp_path, quantisation) as loading:
            loading.load(EVERY)
            assert loading.busy
            held = take(loading)
            assert loading.hidden == CASE.model.hidden
            assert list(held) == EVERY
            assert loading.progress == (total := sum(expert.weight_bytes for expert in held.values()), total)
            digests.append([expert.digests for expert in held.values()])
            entries = ShareCache(tmp_path).entries()
            assert len(entries) == len(EVERY)
            assert sum(entry.label.fraction for entry in entries) < 1
            assert {entry.label.expert for entry in entries} == {f"layer {key[0]} expert {key[1]}" for key in EVERY}
            assert not any(ShareCache(tmp_path).remove(entry.key) for entry in entries), "in use"
            for expert in held.values():
                expert.close()
    assert digests[0] == digests[1]
    assert all(ShareCache(tmp_path).remove(entry.key) for entry in entries)


def test_an_exact_session_has_exact_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone row is run as two, whatever a processor makes of one; the weights are those of any session."""
    digests = []
    for exact in (False, True):
        given = []
        bind = Chain.bind

        def spy(self: Chain, x: F32, *more: Any, bind: Any = bind, given: list[int] = given) -> Any:
            given.append(len(x))
            return bind(self, x, *more)

        with monkeypatch.context() as patched, loader(tmp_path, exact=exact) as loading:
            patched.setattr(Chain, "bind", spy)
            loading.load(EVERY[:1])
            (held,) = take(loading).values()
            digests.append(held.digests)
            held.close()
        assert (1 in given) is not exact
    assert digests[0] == digests[1]


def test_what_is_not_wanted_any_more_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with loader(tmp_path) as loading:
        loading.load(EVERY[:5])
        assert held.begun.acquire(timeout=30)
        loading.load(EVERY[3:6])
        assert loading.finished() == []
        for _ in range(4):
            held.go.release()
        taken = take(loading)
        assert list(taken) == [EVERY[0], *EVERY[3:6]]  # the first had begun
        assert held.ended == 4
        for expert in taken.values():
            expert.close()


def test_an_end_amid_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing more is begun, what has been loaded is let go, and nothing is left half made in the cache."""
    held = Held(monkeypatch)
    with loader(tmp_path) as loading:
        loading.load(EVERY)
        held.go.release()
        for _ in range(2):
            assert held.begun.acquire(timeout=30)

        def let_go() -> None:
            wait_for(lambda: loading._abandoned)  # the end waits for what has begun
            held.go.release()

        end = threading.Thread(target=let_go)
        end.start()
    end.join()
    assert held.ended <= 2
    cache = ShareCache(tmp_path)
    assert cache.damaged() == {}
    assert all(cache.remove(entry.key) for entry in cache.entries())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "named"), [((1, 0), "expert 0 in layer 1"), ((0, 6), "expert 6 in layer 0")])
def test_an_expert_that_the_model_does_not_have_is_named(key: ExpertKey, named: str, tmp_path: Path) -> None:
    with loader(tmp_path) as loading:
        loading.load([EVERY[0], key])
        with pytest.raises(ConfigError, match=named):
            take(loading)


def test_other_files_than_were_planned_for_are_refused_though_nothing_is_wanted(tmp_path: Path) -> None:
    order = assignment(CASE, [[]])
    order.fingerprint = "0" * 64
    with ExpertLoader(order, models=None, cache=ShareCache(tmp_path), threads=1) as loading:
        wait_for(lambda: not loading.busy)
        with pytest.raises(LoadError, match="not the ones this session was planned for"):
            _ = loading.hidden


def test_an_engine_that_computes_no_experts_is_named(tmp_path: Path) -> None:
    order = assignment(CASE, [[]])
    order.engine = "tensorrt"
    with pytest.raises(EngineError, match="of single experts is called 'tensorrt'; installed: onnxruntime, ref"):
        ExpertLoader(order, models=None, cache=ShareCache(tmp_path), threads=1)


# ---------------------------------------------------------------- the examination


def share(folder: Path, index: int, quantisation: str = "fp32") -> ExpertGraph:
    with open_model(CASE.folder) as opened:
        declared = build_expert_graph(opened.model, units(opened.model, quantisation, 32, opened.stored), 0, index)
        folder.mkdir(exist_ok=True)
        write_share(opened.source, declared.weights, declared.share_bytes, folder / SHARE_FILE)
    return declared.bind(folder / SHARE_FILE)


@pytest.mark.parametrize("quantisation", ["fp32", "int8", "int4"])
def test_an_expert_that_is_right_passes(quantisation: str, tmp_path: Path) -> None:
    reference = ReferenceExperts(EngineOptions())
    graph = share(tmp_path / "share", 1, quantisation)
    expert = OnnxRuntimeExperts(EngineOptions()).open(graph)
    examine_expert(expert, graph, reference)
    (kept,) = graph.share_file.parent.glob("answers-*.npz")
    written = kept.stat().st_mtime_ns
    examine_expert(expert, graph, reference)
    assert kept.stat().st_mtime_ns == written, "the kept answers are good"


def test_another_expert_is_found_out(tmp_path: Path) -> None:
    reference = ReferenceExperts(EngineOptions())
    graph = share(tmp_path / "one", 1)
    other = OnnxRuntimeExperts(EngineOptions()).open(share(tmp_path / "other", 2))
    with pytest.raises(GateError, match=r"layers\.0\.mlp\.experts\.1 of 1 rows differs from the reference by 1\."):
        examine_expert(other, graph, reference)


def test_kept_answers_that_are_wrong_are_asked_for_again(tmp_path: Path) -> None:
    reference = ReferenceExperts(EngineOptions())
    graph = share(tmp_path / "share", 1)
    expert = OnnxRuntimeExperts(EngineOptions()).open(graph)
    examine_expert(expert, graph, reference)
    (kept,) = graph.share_file.parent.glob("answers-*.npz")
    with np.load(kept) as answers:
        right = dict(answers)
    np.savez(kept, **{name: -answer for name, answer in right.items()})  # type: ignore[arg-type]
    examine_expert(expert, graph, reference)
    with np.load(kept) as answers:
        assert all(np.array_equal(answers[name], right[name]) for name in right)
