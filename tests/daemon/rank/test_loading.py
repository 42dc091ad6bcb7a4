"""Loading a rank: the second time from the cache, without its checkpoint's weights."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.daemon.loading.fetching import LoadError, fetch
from motley.daemon.models.cutting.holding import for_engine
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import units
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.blocks.far_file import DiskFull
from motley.daemon.rank.blocks.kept_block import KeptBlock
from motley.daemon.rank.loading import GpuFull, LoadedRank, cache_blocks, check_gpu_room, load_rank
from motley.daemon.rank.peers import Peers
from motley.daemon.rank.steps import Keep, Move, Moved, Open, Restore, Restored, SpanPlan, Step
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.daemon.worker.failures import failure_of
from motley.plugins.engine import CacheBlocks, Engine, EngineError, RankGraph, blocks_in_memory
from motley.plugins.installed import load_engine
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.protocol import GPU_RESERVE
from motley.protocol import mesh_pb2 as pb
from motley.protocol.wording import human_bytes
from motley.transport import Listener, Membership, Plain, connect_mesh
from tests.models.cases import Case, golden_case, golden_cases, whole_share

CASE = next(case for case in golden_cases() if str(case) == "llama-mha")  # untied, and as wide as blocks of int4


@pytest.fixture
def alone() -> Iterator[Peers]:
    """A rank without others."""
    member = Membership("s", 1, 0, 1, bytes(32), bytes(32))
    with (
        closing(Listener("127.0.0.1")) as listener,
        connect_mesh(listener, member, ["nowhere:1"], security=Plain()) as communicator,
    ):
        yield Peers(communicator)


def assignment(case: Case, quantisation: str) -> pb.Assignment:
    share = whole_share(units(case.model, quantisation, 32))

    def stretch(units: range) -> pb.Range:
        return pb.Range(start=units.start, stop=units.stop)

    with SafetensorsCheckpoint(case.folder) as checkpoint:
        return pb.Assignment(
            model=pb.ModelSpec(source=str(case.folder), quantisation=quantisation, block=32),
            fingerprint=checkpoint.fingerprint(),
            size=1,
            shares=[
                pb.Share(
                    attention_split=1,
                    attention=stretch(share.attention),
                    mlp=stretch(share.mlp),
                    vocabulary=stretch(share.vocabulary),
                )
            ],
            context=case.model.context,
            cache_blocks=case.model.context // 32,
            cache_block_tokens=32,
            engine="onnxruntime",
        )


@contextmanager
def loaded(
    cache: ShareCache, peers: Peers, quantisation: str = "fp32", seen: list[int] | None = None
) -> Iterator[LoadedRank]:
    def progress(done: int, total: int) -> None:
        assert 0 <= done <= total
        if seen is not None:
            seen.append(done)

    order = assignment(CASE, quantisation)
    with load_rank(order, 0, peers, models=None, cache=cache, threads=1, progress=progress) as rank:
        yield rank


def summary(rank: LoadedRank) -> bytes:
    """What the rank says after the case's prompt."""
    prompt = np.array(CASE.tokens[: CASE.prompt], np.int32)
    sampling = pb.Sampling(top_p=1.0, repetition_penalty=1.0).SerializeToString()
    assert rank.executor.execute(Open(0, len(prompt), sampling, prompt)) is None
    blocks = np.arange(-(-len(prompt) // rank.blocks.tokens), dtype=np.int32)
    told = rank.executor.execute(Step([SpanPlan(0, 0, len(prompt), 1, 4, blocks)], prompt))
    assert told is not None
    return told


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
def test_the_second_time_only_embeddings_are_read(
    quantisation: str, alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ShareCache(tmp_path / "shares")
    with loaded(cache, alone, quantisation) as rank:
        first = summary(rank)
        (entry,) = cache.entries()
        assert not cache.remove(entry.key)
    assert (entry.label.model, entry.label.quantisation) == (str(CASE.folder), quantisation)
    assert entry.label.fraction == pytest.approx(1)

    def refuse(*_: object) -> None:
        raise AssertionError("weights are read again")

    monkeypatch.setattr(SafetensorsCheckpoint, "read", refuse)
    seen: list[int] = []
    with loaded(cache, alone, quantisation, seen) as rank:
        assert summary(rank) == first
    assert seen
    assert [entry.key for entry in cache.entries()] == [entry.key]
    assert cache.remove(entry.key)


def test_fp16_is_fp32_for_an_engine_that_would_widen_it(alone: Peers, tmp_path: Path) -> None:
    cache = ShareCache(tmp_path / "shares")
    held = {}
    for engine in ("onnxruntime", "reference"):
        order = assignment(CASE, "fp16")
        order.engine = engine
        known = {entry.key for entry in cache.entries()}
        with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None) as rank:
            (entry,) = (entry for entry in cache.entries() if entry.key not in known)
            planned = profile(CASE.model, for_engine("fp16", engine), 0)
            units_bytes = planned.kv_groups * (planned.attention_query_bytes + planned.attention_kv_bytes)
            units_bytes += planned.mlp_units * planned.mlp_unit_bytes
            held[engine] = entry.label.quantisation, rank.share_bytes, units_bytes
    (cpu, cpu_bytes, cpu_planned), (narrow, narrow_bytes, narrow_planned) = held.values()
    assert (cpu, narrow) == ("fp32", "fp16")
    assert cpu_planned == 2 * narrow_planned
    assert 1.8 * narrow_bytes < cpu_bytes < 2 * narrow_bytes


def test_a_rank_holds_the_quantisation_of_its_share_in_units_that_suit_all(alone: Peers, tmp_path: Path) -> None:
    """And what it holds is what the planner counts."""
    cache = ShareCache(tmp_path / "shares")
    order = assignment(CASE, "int4")
    order.model.beside.append("fp32")
    for quantisation in ("", "fp32"):
        order.shares[0].quantisation = quantisation
        known = {entry.key for entry in cache.entries()}
        with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None) as rank:
            (entry,) = (entry for entry in cache.entries() if entry.key not in known)
            held = quantisation or "int4"
            assert entry.label.quantisation == held
            planned = profile(CASE.model, held, 32, beside=["int4", "fp32"])
            counted = planned.kv_groups * (planned.attention_query_bytes + planned.attention_kv_bytes)
            counted += planned.mlp_units * planned.mlp_unit_bytes
            counted += planned.vocabulary_units * planned.vocabulary_unit_bytes
            norms = 4 * (2 * len(CASE.model.layers) + 1) * CASE.model.hidden
            last = planned.vocabulary_unit_bytes
            assert counted + norms - last <= rank.share_bytes <= counted + norms
    planned = profile(CASE.model, "fp32", 32, beside=["int4"])
    assert planned.mlp_units == profile(CASE.model, "int4", 32).mlp_units < profile(CASE.model, "fp32", 32).mlp_units


@pytest.mark.parametrize(
    ("count", "tokens", "context"),
    [(0, 0, 128), (0, 0, 0), (3, 32, 128), (128, 0, 128), (2**31, 32, 128)],
)
def test_blocks_that_cannot_be_are_refused(count: int, tokens: int, context: int) -> None:
    """An orchestrator that knows no blocks sends none."""
    order = pb.Assignment(cache_blocks=count, cache_block_tokens=tokens, context=context)
    with pytest.raises(ConfigError, match=f"KV caches of {count} blocks of {tokens} tokens were planned") as refusal:
        cache_blocks(order)
    assert failure_of(refusal.value).code == "load_failed"


def test_a_rank_has_the_blocks_that_were_planned(alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = assignment(CASE, "fp32")
    order.engine, order.cache_blocks, order.cache_block_tokens = "kept", 2, CASE.model.context
    order.model.cache_format = "int8"
    made: list[RankGraph] = []

    def keep(graph: RankGraph, *more: Any) -> Engine:
        made.append(graph)
        raise EngineError("seen enough")

    monkeypatch.setattr(
        "motley.daemon.rank.loading.load_engine", lambda name: keep if name == "kept" else ReferenceEngine
    )
    monkeypatch.setattr("motley.daemon.rank.loading.on_gpu", lambda *_: False)
    monkeypatch.setattr("motley.daemon.rank.loading.reference_answers", lambda *_: None)
    cache = ShareCache(tmp_path / "shares")
    loading = load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None)
    with pytest.raises(EngineError, match="seen enough"), loading:
        pass
    assert made[0].blocks == CacheBlocks(2, CASE.model.context, "int8")


@pytest.mark.parametrize("cache_format", ["fp16", "int8"])
@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_ranks_with_narrow_caches_load_and_compute(
    engine: str, cache_format: str, alone: Peers, tmp_path: Path
) -> None:
    order = assignment(CASE, "int8")
    order.engine, order.model.cache_format = engine, cache_format
    cache = ShareCache(tmp_path / "shares")
    with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None) as rank:
        assert rank.blocks.format == cache_format
        assert summary(rank)


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_a_rank_has_blocks_on_its_disk_and_is_examined_without_them(engine: str, alone: Peers, tmp_path: Path) -> None:
    order = assignment(CASE, "int8")
    order.engine, order.cache_blocks, order.far_blocks = engine, 2, CASE.model.context // 32
    cache = ShareCache(tmp_path / "shares")
    with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None) as rank:
        assert rank.blocks == CacheBlocks(2, 32, "fp32", far=CASE.model.context // 32)
        assert summary(rank)
        assert rank.executor.execute(Move(np.array([[0, 2]], np.int32))) == Moved().encode()


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_a_rank_whose_layers_with_a_window_have_fewer_blocks_is_examined_with_these(
    engine: str, alone: Peers, tmp_path: Path
) -> None:
    case = golden_case("gemma3")
    order = assignment(case, "fp32")
    order.engine, order.windowed_blocks, order.window = engine, 2, 8
    cache = ShareCache(tmp_path / "shares")
    with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None) as rank:
        assert rank.blocks == CacheBlocks(4, 32, "fp32", windowed=2, window=8)


def test_too_few_blocks_for_a_window_are_refused(alone: Peers, tmp_path: Path) -> None:
    order = assignment(golden_case("gemma3"), "fp32")
    order.windowed_blocks, order.window = 1, 8
    cache = ShareCache(tmp_path / "shares")
    loading = load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None)
    with pytest.raises(ConfigError, match="1 KV cache blocks of 32 tokens were planned for layers with a window of 8"):
        loading.__enter__()


def test_a_disk_that_is_full_is_told(alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("motley.daemon.rank.blocks.far_file.take_room", full)
    order = assignment(CASE, "int8")
    order.far_blocks = 40
    cache = ShareCache(tmp_path / "shares")
    loading = load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None)
    with (
        pytest.raises(DiskFull, match=r"for 1280 tokens of KV caches cannot be taken in .*No space left") as error,
        loading,
    ):
        pass
    assert failure_of(error.value).code == "disk_full"


def test_blocks_that_were_kept_are_in_memory_after_another_start(alone: Peers, tmp_path: Path) -> None:
    order, cache = assignment(CASE, "int8"), ShareCache(tmp_path / "shares")
    order.keep_prefixes = True
    block = KeptBlock(0, -1, 77, 0, 0, tuple(CASE.tokens[:32]))

    def started() -> AbstractContextManager[LoadedRank]:
        return load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None)

    with started() as rank:
        assert summary(rank)
        assert rank.executor.execute(Keep([block])) == Moved().encode()
        blocks = {name: own[0].copy() for name, own in blocks_in_memory(rank.executor._engine).items()}
        assert all(own.any() for own in blocks.values())
    with started() as rank:
        for name, own in blocks_in_memory(rank.executor._engine).items():
            assert not np.array_equal(own[0], blocks[name])
        assert rank.executor.execute(Restore([block, block._replace(what=78)])) == Restored([1, 0]).encode()
        for name, own in blocks_in_memory(rank.executor._engine).items():
            np.testing.assert_array_equal(own[0], blocks[name])


def test_prefixes_that_a_disk_has_no_room_for_are_refused(
    alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("motley.daemon.rank.blocks.kept_file.take_room", full)
    order, cache = assignment(CASE, "int8"), ShareCache(tmp_path / "shares")
    order.keep_prefixes = True
    with (
        pytest.raises(DiskFull, match=r"cannot be kept in .*No space left.*without keeping prefixes") as error,
        load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None),
    ):
        pass
    assert failure_of(error.value).code == "disk_full"
    order.engine = "reference"
    with (
        pytest.raises(EngineError, match="engine 'reference' cannot keep prefixes on a disk"),
        load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None),
    ):
        pass


def test_blocks_on_another_node_follow_those_on_the_disk() -> None:
    """An orchestrator that does not know that there can be both means that all are there."""
    order = assignment(CASE, "fp32")
    order.far_blocks, order.cache_holders = 9, 1
    assert (cache_blocks(order).on_disk, cache_blocks(order).held) == (0, 9)
    order.far_blocks_on_disk = 4
    there_are = cache_blocks(order)
    assert (there_are.on_disk, there_are.held, there_are.first_held) == (4, 5, there_are.count + 4)


@pytest.mark.parametrize(("blocks", "far"), [(0, 100), (1, CASE.model.context // 32 - 2)])
def test_caches_without_room_for_a_context_are_refused(blocks: int, far: int) -> None:
    order = assignment(CASE, "fp32")
    order.cache_blocks, order.far_blocks = blocks, far
    with pytest.raises(ConfigError, match=f"{blocks} blocks of 32 tokens and {far} on disk were planned"):
        cache_blocks(order)


def test_a_format_that_nobody_knows_is_refused() -> None:
    order = assignment(CASE, "fp32")
    order.model.cache_format = "int2"
    with pytest.raises(ConfigError, match="planned as 'int2'; this node knows fp32, fp16, int8"):
        cache_blocks(order)


def gpu(free: int) -> pb.Gpu:
    users = [pb.GpuUser(pid=7, name="game", bytes=9 * 10**9), pb.GpuUser(pid=8)]
    return pb.Gpu(name="RTX 9", memory_bytes=12 * 10**9, free_bytes=free, users=users)


class OnGpu(OnnxRuntimeEngine):
    """What computes on a GPU, for all that loading knows."""

    on_gpu = True


@pytest.mark.parametrize("fits", [True, False])
def test_a_gpu_that_is_full_is_refused_before_anything_is_read(
    fits: bool, alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, the KV cache of the whole context and activations must fit beside what stays free."""
    planned = profile(CASE.model, "fp32", 32)
    weights = planned.kv_groups * (planned.attention_query_bytes + planned.attention_kv_bytes)
    weights += planned.mlp_units * planned.mlp_unit_bytes
    cache_bytes = planned.kv_groups * planned.cache_bytes_per_token * CASE.model.context
    room = 64 << 20 if fits else weights + cache_bytes
    monkeypatch.setattr("motley.plugins.installed.load_engine", lambda name: OnGpu)
    monkeypatch.setattr(
        "motley.daemon.rank.loading.load_engine", lambda name: OnGpu if name == "onnxruntime" else ReferenceEngine
    )
    monkeypatch.setattr("motley.daemon.rank.loading.gpus", lambda: [gpu(GPU_RESERVE + room)])
    cache = ShareCache(tmp_path / "shares")
    if fits:
        with loaded(cache, alone) as rank:
            assert summary(rank)
        return
    with pytest.raises(GpuFull) as refusal, loaded(cache, alone):
        pass
    assert cache.entries() == []
    said = str(refusal.value)
    assert said.startswith(f"RTX 9 has {human_bytes(GPU_RESERVE + room)} of 12.00 GB free; this rank needs ")
    assert "536.87 MB must stay free. In use by game (7): 9.00 GB, a process (8): not told. Close what uses" in said
    failure = failure_of(refusal.value)
    assert (failure.code, failure.message) == ("insufficient_memory", said)


def test_where_no_driver_tells_of_memory_the_engine_finds_out() -> None:
    check_gpu_room(1 << 60, [])


def test_a_damaged_share_is_made_anew(alone: Peers, tmp_path: Path) -> None:
    cache = ShareCache(tmp_path / "shares")
    with loaded(cache, alone) as rank:
        first = summary(rank)
    (entry,) = cache.entries()
    with (cache.folder / entry.key / SHARE_FILE).open("r+b") as file:
        file.write(bytes(4096))
    with loaded(cache, alone) as rank:
        assert summary(rank) == first


def test_a_checkpoint_that_was_edited_is_read_again(alone: Peers, tmp_path: Path) -> None:
    """Also where its fingerprint, which reads samples, does not see it."""
    folder = shutil.copytree(CASE.folder, tmp_path / "model")
    cache = ShareCache(tmp_path / "shares")
    order = assignment(CASE, "fp32")
    order.model.source = str(folder)
    for count in (1, 2):
        with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None):
            pass
        assert len(cache.entries()) == count
        weights = folder / "model.safetensors"
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")


def test_a_checkpoint_that_changes_while_it_is_read_makes_no_entry(
    alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(CASE.folder, tmp_path / "model")
    cache = ShareCache(tmp_path / "shares")
    order = assignment(CASE, "fp32")
    order.model.source = str(folder)

    def write_and_edit(*arguments: Any) -> None:
        write_share(*arguments)
        os.utime(folder / "model.safetensors", (1e9, 1e9))

    monkeypatch.setattr("motley.daemon.loading.planned.write_share", write_and_edit)
    with (
        pytest.raises(CheckpointError, match="changed while it was read; start again"),
        load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None),
    ):
        pass
    assert cache.entries() == []


class Patient:
    """Makes an engine when a sign of life has been seen."""

    def __init__(self, seen: threading.Event) -> None:
        self._seen = seen
        self.closed = False

    def __call__(self, *arguments: Any) -> Engine:
        assert self._seen.wait(30)
        engine = OnnxRuntimeEngine(*arguments)
        close = engine.close

        def note() -> None:
            self.closed = True
            close()

        engine.close = note  # type: ignore[method-assign]
        return engine


@pytest.mark.parametrize("released", [False, True])
def test_signs_of_life_are_given_while_an_engine_is_made(
    released: bool, alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what hears them may end the loading by raising."""
    alive = threading.Event()
    main = threading.current_thread()
    patient = Patient(alive)
    monkeypatch.setattr("motley.daemon.loading.progress.TELL_S", 0.01)
    monkeypatch.setattr(
        "motley.daemon.rank.loading.load_engine", lambda name: patient if name == "onnxruntime" else load_engine(name)
    )

    def progress(done: int, total: int) -> None:
        if threading.current_thread() is main:
            return
        assert done == total
        alive.set()
        if released:
            raise InterruptedError("released")

    loading = load_rank(
        assignment(CASE, "fp32"),
        0,
        alone,
        models=None,
        cache=ShareCache(tmp_path / "shares"),
        threads=1,
        progress=progress,
    )
    with pytest.raises(InterruptedError, match="released") if released else nullcontext(), loading as rank:
        assert summary(rank)
    assert patient.closed


def test_a_network_that_is_too_slow_ends_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's error is Python's own for a wait that is over."""

    def too_slow(source: str, models: Path | None) -> Path:
        raise TimeoutError("the read operation timed out")

    monkeypatch.setattr("motley.daemon.loading.fetching.resolve", too_slow)
    with pytest.raises(LoadError, match="cannot be fetched: the read operation timed out"):
        fetch("owner/name", None, lambda done, total: None)


def test_a_download_that_hangs_ends(alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(source: str, models: Path | None) -> Path:
        over.wait(30)
        return CASE.folder

    monkeypatch.setattr("motley.daemon.loading.fetching.resolve", hang)
    monkeypatch.setattr("motley.daemon.loading.fetching.fetched_bytes", lambda source: 7)
    monkeypatch.setattr("motley.daemon.loading.fetching.TELL_S", 0.01)
    monkeypatch.setattr("motley.daemon.loading.fetching.DOWNLOAD_S", 0.1)
    cache = ShareCache(tmp_path / "shares")
    seen: list[int] = []
    loading = load_rank(
        assignment(CASE, "fp32"),
        0,
        alone,
        models=None,
        cache=cache,
        threads=1,
        progress=lambda done, total: seen.append(done),
    )
    try:
        with pytest.raises(LoadError, match=r"nothing of .* has come for 0 s"), loading:
            pass
    finally:
        over.set()
    assert set(seen) == {7}


def test_other_files_than_were_planned_for_are_refused(alone: Peers, tmp_path: Path) -> None:
    order = assignment(CASE, "fp32")
    order.fingerprint = "0" * 64
    cache = ShareCache(tmp_path / "shares")
    with (
        pytest.raises(LoadError, match="not the ones this session was planned for"),
        load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None),
    ):
        pass
    assert cache.entries() == []


def test_an_engine_that_cannot_embed_texts_is_refused_by_name(alone: Peers, tmp_path: Path) -> None:
    order, cache = assignment(CASE, "int8"), ShareCache(tmp_path / "shares")
    order.embeddings, order.engine = "mean", "cuda"
    for error, words in ((EngineError, "engine 'cuda' cannot embed texts"), (ConfigError, "planned as 'middle'")):
        with (
            pytest.raises(error, match=words),
            load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None),
        ):
            pass
        order.embeddings, order.engine = "middle", "reference"
