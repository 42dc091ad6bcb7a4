"""What `make gpu` asks of a GPU: each function is a step that runs in a process of its own and returns JSON.

They begin with single calls of the driver, as the first thing to know about a GPU is which of them it does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from motley.bench.measurements.gpu.speed import BITS, ROWS_AT_ONCE, SHAPE, all_reduce_us, product_seconds, speed
from motley.bench.random_models.writing import synthesise
from motley.daemon.machine.processor import usable_cores
from motley.daemon.machine.vulkan import NoVulkanError, vulkan_gpus
from motley.orchestrator.known_models.shapes import SHAPES
from motley.plugins.cuda.modules import NODES
from motley.plugins.engine import EngineError
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from motley.transport.cuda.driver import CudaDriver, Driver
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream, measure_host_steps

COUNT = 1 << 16
"""Floats of the buffers that calls are tried with."""
COPIED = 1 << 30
"""Bytes that are copied to know the memory's speed: more than caches hold."""
COPIES = 20
WAIT_S = 20.0

Result = dict[str, Any]


def attempt(work: Callable[[], Any]) -> Any:
    """What `work` returns, or ``{"failed": ...}`` with the reason."""
    try:
        return work()
    except Exception as error:  # whatever one measurement meets, the others go on
        return {"failed": f"{type(error).__name__}: {error}"}


def with_verdict(result: Result) -> Result:
    """A result of several measurements, with ``passed`` False if any of them failed, however deep it lies."""
    return result | ({"passed": False} if _has_failed(result) else {})


def _has_failed(result: Any) -> bool:
    return isinstance(result, dict) and ("failed" in result or any(map(_has_failed, result.values())))


def calls(open_driver: Callable[[], Driver] = CudaDriver) -> Result:
    """Each call that an engine makes of a driver, alone, in the order in which they build on each other; the first that
    fails ends it.

    Raises:
        CudaError: there is no GPU that can be used.
    """
    driver = open_driver()
    result: Result = {"device": f"{getattr(driver, 'name', driver)}, {getattr(driver, 'capability', '')}"}
    with ExitStack() as memory:

        def done(name: str, work: Callable[[], Any]) -> Any:
            value = work()
            result[name] = "ok"
            return value

        try:
            _make_calls(driver, memory, done)
        except Exception as error:
            result["failed"] = f"{type(error).__name__}: {error}"
            result["passed"] = False
    return result


def _make_calls(driver: Driver, memory: ExitStack, done: Callable[[str, Callable[[], Any]], Any]) -> None:
    size = 4 * COUNT
    device = done("allocate", lambda: driver.allocate(size))
    memory.callback(driver.free, device)
    pinned = done("allocate pinned", lambda: driver.allocate_pinned(size))
    memory.callback(driver.free_pinned, pinned)
    floats = pinned.host.view(np.float32)
    address = floats.ctypes.data
    stream = memory.enter_context(done("stream and event", partial(CudaStream, driver, HostStep.SPLIT)))
    expected = np.arange(COUNT, dtype=np.float32)
    floats[:] = expected

    def check(factor: float) -> None:
        floats[:] = -1
        driver.copy(address, device, size, stream.handle)
        stream.synchronise(WAIT_S)
        if not np.array_equal(floats, factor * expected):
            raise AssertionError(f"there should be {factor} times what was sent, there is {floats[:4]}...")

    def double() -> None:
        rows = ctypes.c_void_p(device), ctypes.c_int(COUNT)
        numbers = *rows, *rows, *rows, ctypes.c_int(1), ctypes.c_int(COUNT), ctypes.c_int(COUNT)
        stream.launch(NODES, "add", COUNT // 128, 128, numbers)

    def copy() -> None:
        driver.copy(device, address, size, stream.handle)
        stream.synchronise(WAIT_S)

    done("copy in and wait", copy)
    done("copy out", lambda: check(1))
    done("compile and load kernels", lambda: driver.function(NODES, "add"))
    done("launch", double)
    done("its result", lambda: check(2))
    graph = done("capture", lambda: stream.capture(double))
    memory.callback(graph.close)
    done("replay", lambda: stream.replay(graph))
    done("replay again", lambda: stream.replay(graph))
    done("their result", lambda: check(8))
    for form in (HostStep.FUNCTION, HostStep.MEMORY):  # spinning is for the newest drivers alone
        done(f"host steps by {form}", partial(_host_steps, driver, form))


def _host_steps(driver: Driver, form: HostStep) -> None:
    """Two steps, submitted and captured, in their order."""
    seen = list[int]()
    with CudaStream(driver, form) as stream:
        stream.submit(lambda: seen.append(0), "a step")
        stream.submit(lambda: seen.append(1), "another")
        graph = stream.capture(lambda: stream.submit(lambda: seen.append(2), "a step in a graph"))
        stream.replay(graph)
        stream.replay(graph)
        stream.synchronise(WAIT_S)
        graph.close()
    if seen != [0, 1, 2, 2]:
        raise AssertionError(f"steps ran in the order {seen}")


def host_steps() -> Result:
    """Microseconds of a host step that does nothing, by its form."""
    return {str(form): 1e6 * seconds for form, seconds in measure_host_steps(CudaDriver()).items()}


def bandwidth() -> Result:
    """Bytes per second of a copy (read and written); and by weights and rows, which part of them our products read, and
    how many operations per second they do."""
    driver = CudaDriver()
    copied = copy_rate(driver)

    def told(kind: str) -> Result:
        took = product_seconds(driver, kind)
        return {str(rows): _rates(rows, BITS[kind], seconds, copied) for rows, seconds in took.items()}

    return with_verdict({"a copy's bytes/s": copied, **{kind: attempt(partial(told, kind)) for kind in BITS}})


def _rates(rows: int, bits: float, seconds: float, copied: float = 1.0) -> Result:
    """Of a product of the shape that products are measured with: bytes of weights a second, as a part of those that are
    copied, and operations a second."""
    weights = SHAPE[0] * SHAPE[1]
    return {"read": weights * bits / 8 / seconds / copied, "op/s": 2 * rows * weights / seconds}


def copy_rate(driver: Driver, nbytes: int = COPIED) -> float:
    """Bytes per second that copies on the device read and write."""
    with ExitStack() as memory:
        source, target = driver.allocate(nbytes), driver.allocate(nbytes)
        memory.callback(driver.free, source)
        memory.callback(driver.free, target)
        with CudaStream(driver) as stream:

            def copy(times: int) -> float:
                began = perf_counter()
                for _ in range(times):
                    driver.copy(target, source, nbytes, stream.handle)
                stream.synchronise(WAIT_S)
                return perf_counter() - began

            copy(1)
            return 2 * nbytes * COPIES / copy(COPIES)


def pytorch() -> Result:
    """The products of `bandwidth` by PyTorch, that is by cuBLAS, in FP16: bytes of weights and operations a second."""
    if find_spec("torch") is None:
        return {"skipped": "PyTorch is not installed"}
    import torch

    outputs, columns = SHAPE
    weights = torch.randn(outputs, columns, device="cuda", dtype=torch.float16)

    def seconds(rows: int) -> float:
        x = torch.randn(rows, columns, device="cuda", dtype=torch.float16)
        for times in (3, 50):
            torch.cuda.synchronize()
            began = perf_counter()
            for _ in range(times):
                x @ weights.T
            torch.cuda.synchronize()
        return (perf_counter() - began) / 50

    return {str(rows): _rates(rows, BITS["fp16"], seconds(rows)) for rows in (*ROWS_AT_ONCE, 2048)}


def sums() -> Result:
    """Microseconds of a sum of two processes, by form of the host step and bytes, and in captured bursts: of one with a
    GPU and one without, and of two on one GPU."""
    result: Result = {}
    for form in (*measure_host_steps(CudaDriver()), HostStep.SPLIT):
        for captured in (False, True):
            for beside in ("a host", "a rank on the same GPU"):
                name = f"{form}, {'captured, ' if captured else ''}beside {beside}"
                result[name] = attempt(partial(all_reduce_us, form, captured, beside_host=beside == "a host"))
    return with_verdict(result)


MESHES: dict[str, Sequence[tuple[str, float]]] = {
    "1": [("cuda", 1.0)],
    "a GPU and a CPU": [("cuda", 31.0), ("onnxruntime", 1.0)],
}
"""Engines and shares of ranks; those of a GPU and a CPU by 4 TB/s and some 130 GB/s, which an H200 and a server's
processor read."""


def tokens(shape: str, quantisation: str, meshes: Sequence[str] = tuple(MESHES), layers: int = 0) -> Result:
    """How fast a random model of a shape is (`motley.bench.measurements.gpu.speed.speed`), by its ranks; with so many
    layers, or all that the shape has."""
    result: Result = {}
    with _random_model(SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})) as model:
        for name in meshes:
            threads = max(1, usable_cores() // 2)
            result[name] = attempt(lambda: dict(speed(model, quantisation, MESHES[name], threads)))  # noqa: B023  at once
    return with_verdict(result)


def on_webgpu(work: Callable[[], Result]) -> Result:
    """What `work` gives with engine `webgpu`, and on which GPU by Vulkan; or why it is skipped: what is missing."""
    try:
        gpu = vulkan_gpus()[0].gpu
        WebGpuEngine.check_machine()
    except (NoVulkanError, EngineError) as error:
        return {"skipped": str(error)}
    return {"gpu": gpu.name, **work()}


def webgpu_tokens(shape: str, quantisations: Sequence[str]) -> Result:
    """How fast a random model of a shape is on engine `webgpu`, and on `cuda` beside it."""
    with _random_model(SHAPES[shape]) as model:
        return by_engine(model, quantisations, ("webgpu", "cuda"))


def by_engine(model: Path, quantisations: Sequence[str], engines: Sequence[str]) -> Result:
    """How fast a model is by one rank on each of some engines, one after another (`speed`)."""

    def alone(quantisation: str, engine: str) -> Any:
        return attempt(lambda: dict(speed(model, quantisation, [(engine, 1.0)])))

    return with_verdict({each: {engine: alone(each, engine) for engine in engines} for each in quantisations})


@contextmanager
def _random_model(config: dict[str, Any]) -> Iterator[Path]:
    with TemporaryDirectory(prefix="motley-gpu-") as folder:
        model = Path(folder, "model")
        began = perf_counter()
        synthesise(config, model)
        print(f"the random model is written after {perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
        os.environ["MOTLEY_CACHE"] = str(Path(folder, "shares"))
        yield model
