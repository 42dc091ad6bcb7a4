"""Which engine a rank gets on a node, what it holds there, and what a GPU has room for."""

from __future__ import annotations

import pytest

from motley.orchestrator.planning.setup import GpuOffer, Setup, SetupError, setup_of
from motley.protocol import GPU_RESERVE
from motley.protocol.mesh_pb2 import Capabilities, Engine, FormatSpeed, Gpu, GpuUser

GB = 10**9
GPU = Gpu(name="RTX 9", memory_bytes=12 * GB, free_bytes=8 * GB)
PC = Capabilities(
    engines=[
        Engine(name="onnxruntime"),
        Engine(name="cuda", keeps_fp16=True, on_gpu=True),
        Engine(name="tensorrt", keeps_fp16=True, on_gpu=True, lacking="install motley-mesh[tensorrt]"),
    ],
    gpus=[GPU],
)


def test_fp16_is_kept_by_those_that_can() -> None:
    assert setup_of("pc", PC, "cuda", "fp16") == Setup("cuda", "fp16", on_gpu=True, on_host_memory=False)
    assert setup_of("pc", PC, "onnxruntime", "fp16") == Setup("onnxruntime", "fp32", on_gpu=False)
    assert setup_of("pc", PC, "onnxruntime", "int4") == Setup("onnxruntime", "int4", on_gpu=False)


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(SetupError, match=r"'pc' has no engine 'warp'; it has: onnxruntime, cuda$") as unknown:
        setup_of("pc", PC, "warp", "int8")
    with pytest.raises(
        SetupError, match=r"'pc' cannot run engine 'tensorrt': install motley-mesh\[tensorrt\]"
    ) as unusable:
        setup_of("pc", PC, "tensorrt", "int8")
    with pytest.raises(SetupError, match="'box' cannot run engine 'cuda': it shows no GPU"):
        setup_of("box", Capabilities(engines=PC.engines), "cuda", "int8")
    with pytest.raises(SetupError, match=r"engine 'tensorrt': it shows no GPU; it can run: onnxruntime$"):
        setup_of("box", Capabilities(engines=PC.engines), "tensorrt", "int8")
    assert (unknown.value.code, unusable.value.code) == ("unknown_engine", "unusable_engine")


def test_a_gpu_has_room_for_what_is_neither_used_promised_nor_reserved() -> None:
    assert GpuOffer(GPU).room == 8 * GB - GPU_RESERVE
    assert GpuOffer(GPU, 3 * GB).room == 5 * GB - GPU_RESERVE
    assert GpuOffer(GPU, 8 * GB).room == 0


def test_what_is_said_of_a_gpu_has_the_numbers() -> None:
    assert GpuOffer(GPU).told("pc") == "pc, RTX 9 (8.00 GB of 12.00 GB free; 536.87 MB stay free)"
    busy = Gpu()
    busy.CopyFrom(GPU)
    busy.users.extend([GpuUser(pid=7, name="game", bytes=3 * GB), GpuUser(pid=9)])
    assert GpuOffer(busy, GB).told("pc") == (
        "pc, RTX 9 (8.00 GB of 12.00 GB free; 1.00 GB promised to other ranks; 536.87 MB stay free;"
        " in use by game (3.00 GB), 9 (not told))"
    )


def test_what_its_owner_allows_is_told_where_that_is_less_than_what_is_free() -> None:
    offer = GpuOffer(GPU, GB, budget=3 * GB, reserved=2 * GB)
    assert (offer.room, offer.told("pc")) == (
        GB,
        "pc, RTX 9 (ranks may have 3.00 GB of it, of which others have 2.00 GB; `motley budget` changes that)",
    )
    assert "; `motley" not in GpuOffer(GPU, budget=11 * GB).told("pc")
    assert GpuOffer(GPU, budget=GB, reserved=2 * GB).room == 0


def test_a_gpu_is_as_fast_as_its_engine_was_with_what_it_holds() -> None:
    speeds = [
        FormatSpeed(format=each, bytes_per_s=by, row_bytes_per_s=10 * by) for each, by in (("int8", 1), ("fp32", 2))
    ]
    pc = Capabilities(engines=[Engine(name="webgpu", on_gpu=True, speeds=speeds, memory_bandwidth=7)], gpus=[GPU])
    held = {"int8": (1, 10), "stored": (1, 10), "fp32": (2, 20), "fp16": (2, 20), "int4": (7, 0)}
    setups = {name: setup_of("pc", pc, "webgpu", name) for name in held}
    assert {name: (own.memory_bandwidth, own.row_speed) for name, own in setups.items()} == held


def test_an_engine_may_have_whole_caches_only() -> None:
    able = Capabilities(engines=[Engine(name="whole", has_whole_caches=True), Engine(name="any")])
    assert setup_of("pc", able, "whole", "int4").has_whole_caches
    assert not setup_of("pc", able, "any", "int4").has_whole_caches
