"""The reference engine on a device: host and device arrays never meet, and what is missing is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.plugins.engine import Collectives, EngineError, EngineMemoryError, EngineOptions, RankGraph
from motley.plugins.expert_engine import Expert
from motley.plugins.installed import on_gpu
from motley.plugins.mixture import Compute
from motley.plugins.reference.device import Device, open_device
from motley.plugins.reference.engine import ReferenceEngine, ReferenceExperts
from motley.plugins.reference.operators import OPERATORS
from tests.models.cases import Case, LocalSession, expert_cases, golden_cases, others_soak, uneven_shares
from tests.models.graph.test_whole_experts import all_experts, share
from tests.models.local_group import LocalMember
from tests.models.nearness import error
from tests.plugins.reference.strict_arrays import STRICT, StrictArray, StrictModule

TOLERANCE = 1e-4
every_case = pytest.mark.parametrize("case", golden_cases(), ids=str)


def on_device(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> ReferenceEngine:
    return ReferenceEngine(graph, collectives, options, STRICT)


def session(
    case: Case, folder: Path, ranks: int, quantisation: str = "fp32", factory: Any = on_device, **more: Any
) -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    return LocalSession(case.folder, factory, shares, folder, quantisation, **more)


@pytest.mark.parametrize(("case", "ranks"), others_soak(product(golden_cases(), [1, 3])), ids=str)
def test_no_host_array_meets_one_of_the_device(case: Case, ranks: int, tmp_path: Path) -> None:
    """A prompt in two halves, some of its logits, and in one step a token on its own and another sequence's prompt."""
    with session(case, tmp_path, ranks) as group:
        assert error(group.step(case.tokens[:20], 0, halved=True), case.logits[:20]) < TOLERANCE
        assert error(group.step(case.tokens[20:25], 20, wanted=2), case.logits[23:25]) < TOLERANCE
        spans = [group.sequences.span(0, 25, 1, wanted=1), group.sequences.span(1, 0, 9, wanted=2)]
        together = group.run(spans, case.tokens[25:26] + case.tokens[:9])
        assert error(together, case.logits[[25, 7, 8]]) < TOLERANCE


@pytest.mark.parametrize(
    ("case", "quantisation"), others_soak(product(golden_cases(), ["fp16", "int8", "int4"])), ids=str
)
def test_narrow_weights_are_widened_on_the_device(case: Case, quantisation: str, tmp_path: Path) -> None:
    try:
        with session(case, tmp_path / "host", 2, quantisation, ReferenceEngine) as host:
            expected = host.step(case.tokens[:20], 0)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    with session(case, tmp_path / "device", 2, quantisation) as group:
        assert error(group.step(case.tokens[:20], 0), expected) < 1e-6


@pytest.mark.parametrize("case", expert_cases()[:2], ids=str)
def test_experts_elsewhere_take_and_give_host_arrays(case: Case, tmp_path: Path) -> None:
    hosted: dict[tuple[int, int], Expert] = {}
    for layer, index in all_experts(case.model):
        folder = tmp_path / f"{layer}.{index}"
        folder.mkdir()
        hosted[layer, index] = ReferenceExperts(EngineOptions()).open(share(case, "fp32", folder, layer, index))

    class AskingHosts(LocalMember):
        def experts(self, layer: int) -> Compute:
            return lambda x, sent: [hosted[layer, own.expert](x[own.rows]) for own in sent]

    def factory(graph: RankGraph, member: LocalMember, options: EngineOptions) -> ReferenceEngine:
        return on_device(graph, AskingHosts(member._group, member.rank), options)

    declare = partial(build_rank_graph, experts_elsewhere=True)
    with session(case, tmp_path, 2, factory=factory, declare=declare) as group:
        assert error(group.step(case.tokens[:20], 0, halved=True), case.logits[:20]) < TOLERANCE


def test_exact_graphs_gather_through_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On weights that were taken to the device in several pieces."""
    monkeypatch.setattr("motley.plugins.reference.device.UPLOAD_BYTES", 1001)
    case = golden_cases()[0]
    cut = units(case.model, "fp32", 32, exact=True)
    shares = uneven_shares(cut, 3)
    with LocalSession(case.folder, on_device, shares, tmp_path, exact=True) as group:
        assert error(group.step(case.tokens[:20], 0), case.logits[:20]) < TOLERANCE


@pytest.mark.parametrize(
    ("operator", "forgetful"),
    [
        ("Attention", lambda xp, q, k, v, mask, *, scale, softcap: xp.where(mask, q, -xp.inf)),
        ("RotaryEmbedding", lambda xp, x, cos, sin, ids, *, rotary_embedding_dim: cos[ids]),
        ("Add", lambda xp, a, b: np.add(a, b)),
        ("Swish", lambda xp, x: x * np.ones(1, np.float32)),
        ("Swish", lambda xp, x: np.ones(1, np.float32) * x),
        ("Swish", lambda xp, x: np.asarray(x)),
        ("Swish", lambda xp, x: x * float(x)),
        ("Gather", lambda xp, x, indices, axis: x.take(indices, axis)),
    ],
)
def test_an_operator_that_mixes_them_fails(
    operator: str, forgetful: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATORS, operator, forgetful)
    case = next(case for case in golden_cases() if str(case) == "llama-mha")
    with (
        session(case, tmp_path, 1) as group,
        pytest.raises(TypeError, match=r"meets arrays of the device|unasked|unsupported operand|ufunc"),
    ):
        group.step(case.tokens[:3], 0)


def test_the_strict_arrays_are_as_strict_as_cupys() -> None:
    there, here = STRICT.xp.asarray(np.ones(3, np.float32)), np.ones(3, np.float32)
    mixed: list[Callable[[], Any]] = [
        lambda: there + here,
        lambda: here + there,
        lambda: there.__iadd__(here),
        lambda: there[np.array([1])],
        lambda: there.__setitem__(slice(None), here),
        lambda: STRICT.xp.where(here > 0, there, 0),
        lambda: STRICT.xp.concatenate([there, here]),
        lambda: np.concatenate([there, there]),
        lambda: np.exp(there),
        lambda: np.asarray(there),
        lambda: bool(there[0]),
        lambda: list(there),
        lambda: STRICT.to_host(here),
    ]
    for operation in mixed:
        with pytest.raises(TypeError):
            operation()
    assert isinstance(np.float32(2) * there, StrictArray)
    assert STRICT.to_host(there + np.float32(1)).tolist() == [2, 2, 2]


def test_an_unknown_device_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="has no device 'tpu'; it has: cpu, cuda"):
        session(golden_cases()[0], tmp_path, 1, factory=_with_options({"device": "tpu"}))


def test_without_cupy_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EngineError, match=r"needs CuPy for device 'cuda' .*\[gpu\]'; device 'cpu' does not"):
        session(golden_cases()[0], tmp_path, 1, factory=_with_options({"device": "cuda"}))


class _CudaError(RuntimeError):
    pass


def _cupy(ones: Callable[..., Any]) -> ModuleType:
    """CuPy, as far as it is asked whether there is a GPU."""
    module = ModuleType("cupy")
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(CUDARuntimeError=_CudaError),
        driver=SimpleNamespace(CUDADriverError=_CudaError),
        cublas=SimpleNamespace(CUBLASError=_CudaError),
        compiler=SimpleNamespace(CompileException=_CudaError),
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
    )
    vars(module).update(cuda=cuda, ones=ones, asnumpy=np.asarray)
    return module


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (
            _CudaError("CUDA driver version is insufficient"),
            "no GPU .* insufficient; install or update NVIDIA",
        ),
        (
            ImportError("libcublasLt.so.13"),
            r"does not compute on this GPU: libcublasLt.so.13; the extra gpu brings .*\[gpu\]",
        ),
    ],
)
def test_without_a_gpu_or_its_libraries_these_are_named(
    raised: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ones(shape: tuple[int, ...], dtype: Any) -> Any:
        raise raised

    monkeypatch.setitem(sys.modules, "cupy", _cupy(ones))
    with pytest.raises(EngineError, match=words):
        open_device("cuda")


def test_a_gpu_that_computes_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = _cupy(np.ones)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert open_device("cuda").xp is cupy


def test_a_gpu_that_is_full_or_fails_is_told(tmp_path: Path) -> None:
    class Full(StrictModule):
        def empty(self, shape: Any, dtype: Any) -> Any:
            raise MemoryError("Out of memory allocating 512 bytes")

    class FullOfWeights(StrictModule):
        def full(self, shape: Any, value: Any, dtype: Any) -> Any:
            raise MemoryError("Out of memory allocating 512 bytes")

    class Failing(StrictModule):
        def concatenate(self, arrays: Any, axis: int = 0) -> Any:
            raise _CudaError("an illegal memory access was encountered")

    def on(module: StrictModule) -> Any:
        device = Device(module, STRICT.to_host, (MemoryError,), (_CudaError,))
        return lambda graph, collectives, options: ReferenceEngine(graph, collectives, options, device)

    case = golden_cases()[0]
    for full in (Full(), FullOfWeights()):  # which leave no room for the caches' blocks
        with pytest.raises(EngineMemoryError, match=r"too little memory for this rank .*give it a smaller share"):
            session(case, tmp_path / type(full).__name__, 1, factory=on(full))
    with (
        session(case, tmp_path / "failing", 1, factory=on(Failing())) as group,
        pytest.raises(EngineError, match=r"the GPU failed: an illegal memory access"),
    ):
        group.step(case.tokens[:1], 0)


def test_where_it_computes_is_known_from_its_options() -> None:
    assert on_gpu("reference", {"device": "cuda"})
    assert not on_gpu("reference", {"device": "cpu"})
    assert not on_gpu("reference")


def _with_options(extra: dict[str, str]) -> Any:
    return lambda graph, collectives, options: ReferenceEngine(graph, collectives, EngineOptions(extra=extra))
