"""The kernels without a GPU: they compile for every architecture, and their C++ computes the host's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import platformdirs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.transport import UsageError, WireFormat
from motley.transport.cuda import compiler
from motley.transport.cuda.compiler import Capability, compile_kernels
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.kept_kernels import kept_or_compiled
from motley.transport.cuda.reduction import SOURCES, THREADS, Reduction
from motley.transport.formats import BLOCK, Codecs
from motley.transport.reduce import sum_encoded
from tests.transport.cuda.host_kernels import launch

Array = np.ndarray[Any, Any]
CAPABILITIES = [Capability(*pair) for pair in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0))]
BETWEEN = [pytest.param(each, marks=pytest.mark.soak) for each in CAPABILITIES[1:-1]]
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("capability", [CAPABILITIES[0], *BETWEEN, CAPABILITIES[-1]], ids=str)
def test_every_architecture_is_compiled_for(capability: Capability) -> None:
    pytest.importorskip("cuda.bindings")
    cubin = compile_kernels(SOURCES, capability)
    assert cubin.startswith(b"\x7fELF")
    for wire_format in WireFormat:
        for dtype in DTYPES:
            reduction = Reduction(wire_format, dtype, 100, 0, 2)
            for name in (reduction.sum_kernel, reduction.encode_kernel):
                assert name is None or f".text.{name}\0".encode() in cubin
    assert compile_kernels(SOURCES, capability) is cubin


def test_a_gpu_that_is_too_old_and_a_broken_source_are_explained(tmp_path: Any) -> None:
    with pytest.raises(CudaError, match=r"capability 6\.1 is too old: 7\.5 \(Turing\) or newer"):
        compile_kernels(SOURCES, Capability(6, 1))
    pytest.importorskip("cuda.bindings")
    (tmp_path / "broken.cu").write_text("__global__ void f() { g(); }")
    with pytest.raises(CudaError, match=r"(?s)cannot compile broken\.cu with -arch=sm_86: .*\"g\" is unde"):
        compile_kernels((tmp_path / "broken.cu",), Capability(8, 6))
    with pytest.raises(CudaError, match=r"compute capability 99\.0"):
        compile_kernels(SOURCES, Capability(99, 0))


def test_compiled_kernels_are_kept_between_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: tmp_path / "cache")
    source = tmp_path / "one.cu"
    source.write_text('extern "C" __global__ void one(int *out) { *out = 1; }')
    compiled: list[bytes] = []
    real = compiler._compile

    def compile_and_tell(nvrtc: Any, name: bytes, text: bytes, options: list[bytes]) -> bytes:
        compiled.append(options[0])
        return real(nvrtc, name, text, options)

    def in_a_new_process(major: int = 8) -> bytes:
        return compile_kernels.__wrapped__((source,), Capability(major, 0))

    monkeypatch.setattr(compiler, "_compile", compile_and_tell)
    first = in_a_new_process()
    assert first.startswith(b"\x7fELF")
    assert in_a_new_process() == first
    assert compiled == [b"-arch=sm_80"]
    in_a_new_process(9)
    source.write_text('extern "C" __global__ void one(int *out) { *out = 2; }')
    changed = in_a_new_process()
    assert compiled == [b"-arch=sm_80", b"-arch=sm_90", b"-arch=sm_80"]
    files = [*(tmp_path / "cache" / "kernels").iterdir()]
    assert len(files) == 3  # and nothing half written
    for damaged in (b"", b"x" * 100, files[0].read_bytes()[:-1]):
        for file in files:
            file.write_bytes(damaged)
        assert in_a_new_process() == changed
    assert len(compiled) == 6
    assert in_a_new_process() == changed
    assert len(compiled) == 6


def test_a_disk_that_takes_no_kernels_is_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *_, **__: tmp_path / "cache")
    assert kept_or_compiled([b"key"], lambda: b"code") == b"code"


def test_only_narrow_floats_are_summed() -> None:
    for dtype in ("float64", "int32"):
        with pytest.raises(UsageError, match=f"not {dtype}"):
            Reduction(WireFormat.FP32, dtype, 10, 0, 2)
    with pytest.raises(UsageError, match="multiples of 16"):
        Reduction(WireFormat.FP32, "float32", 10, 0, 2).sum_arguments(16, 32, 8)


def aligned(nbytes: int) -> Array:
    whole = np.zeros(nbytes + 64, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + nbytes]


def on_the_device(wire_format: WireFormat, terms: list[Array], own: int) -> bytes:
    """What rank `own` holds after the kernels, in place."""
    elements, dtype = len(terms[0]), terms[0].dtype
    codecs = Codecs(wire_format)
    native, wire, _ = codecs.of(dtype.name)
    reduction = Reduction(wire_format, dtype.name, elements, own, len(terms))
    buffer = aligned(terms[own].nbytes)
    buffer[:] = terms[own].view(np.uint8)
    others = aligned(reduction.stride * (len(terms) - 1))
    for index, term in enumerate(terms[:own] + terms[own + 1 :]):
        payload = others[reduction.stride * index :][: reduction.term_bytes]
        if wire is native:
            payload[:] = term.view(np.uint8)
        else:
            wide = np.empty(elements, np.float32)
            native.decode(term.view(np.uint8), wide)
            wire.encode(wide, payload)
    own_term = buffer
    if reduction.encode_kernel is not None:
        own_term = aligned(reduction.term_bytes)
        arguments = reduction.encode_arguments(buffer.ctypes.data, own_term.ctypes.data)
        launch(SOURCES, reduction.encode_kernel, reduction.blocks, THREADS, arguments)
        wide, expected = np.empty(elements, np.float32), np.empty(reduction.term_bytes, np.uint8)
        native.decode(buffer, wide)
        wire.encode(wide, expected)
        assert own_term.tobytes() == expected.tobytes()  # others see the same
    arguments = reduction.sum_arguments(own_term.ctypes.data, others.ctypes.data, buffer.ctypes.data)
    launch(SOURCES, reduction.sum_kernel, reduction.blocks, THREADS, arguments)
    return buffer.tobytes()


def on_the_host(wire_format: WireFormat, terms: list[Array]) -> bytes:
    native, wire, _ = Codecs(wire_format).of(terms[0].dtype.name)
    payloads = []
    for term in terms:
        wide = np.empty(len(term), np.float32)
        native.decode(term.view(np.uint8), wide)
        payload = np.empty(wire.size(len(term)), np.uint8)
        wire.encode(wide, payload)
        payloads.append((wire, payload))
    total, scratch = np.empty(len(terms[0]), np.float32), np.empty(len(terms[0]), np.float32)
    sum_encoded(payloads, total, scratch)
    out = np.empty(terms[0].nbytes, np.uint8)
    native.encode(total, out)
    return out.tobytes()


def values(seed: int, elements: int, dtype: str) -> Array:
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(elements) * 10.0 ** random.integers(-4, 4, elements)
    numbers[random.random(elements) < 0.05] = -0.0
    return numbers.astype(DTYPES[dtype])


@given(
    st.sampled_from(list(WireFormat)),
    st.sampled_from(list(DTYPES)),
    st.integers(1, 700),
    st.integers(1, 5).flatmap(lambda ranks: st.tuples(st.just(ranks), st.integers(0, ranks - 1))),
)
@example(WireFormat.INT8, "float32", 65 * BLOCK + 3, (3, 1))
def test_the_sum_has_the_bits_of_the_host(
    wire_format: WireFormat, dtype: str, elements: int, place: tuple[int, int]
) -> None:
    ranks, own = place
    terms = [values(rank, elements, dtype) for rank in range(ranks)]
    assert on_the_device(wire_format, terms, own) == on_the_host(wire_format, terms)


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_or_tiny_or_huge(wire_format: WireFormat, dtype: str) -> None:
    special = np.array([0, -0.0, 1e-45, 1.2e-38, 1.5e-36, 6e-8, 65504, 3e38, np.inf, -np.inf, np.nan], np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        for index, number in enumerate(special):
            numbers = np.zeros(3 * BLOCK + 7)
            numbers[[5, BLOCK + index, -1]] = number
            terms = [numbers.astype(DTYPES[dtype]), values(7, len(numbers), dtype)]
            device, host = (
                np.frombuffer(held, DTYPES[dtype]).astype(np.float32)
                for held in (on_the_device(wire_format, terms, 0), on_the_host(wire_format, terms))
            )
            np.testing.assert_array_equal(device, host)  # a NaN is a NaN


def test_the_products_and_sums_are_not_fused() -> None:
    """In the machine code, as far as it can be seen without a GPU: PTX has no fma."""
    pytest.importorskip("cuda.bindings")
    from cuda.bindings import nvrtc

    text = "\n".join(source.read_text() for source in SOURCES)
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"reduction.cu", 0, None, None)
    options = [b"-arch=compute_80", b"-std=c++17", b"-fmad=false"]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    ptx = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    sums = ptx.decode().split(".visible .entry ")
    assert len(sums) == 12
    assert all("fma." not in kernel for kernel in sums if kernel.startswith("sum_"))
    assert all("ld.global.v4" in kernel for kernel in sums if kernel.startswith(("sum_fp", "sum_bf")))
