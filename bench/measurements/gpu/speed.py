"""What a GPU takes: to read weights, to sum between two processes that share it, for tokens and prompts.

Ranks that share one GPU compute no faster than one of them, and take turns: what tells is a GPU beside a CPU.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from motley.bench.measurements.speed.latency import WARM_UP, latency_of
from motley.bench.measurements.speed.throughput import throughput_of
from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec
from motley.bench.meshes.rank_processes import TIMEOUT_S, Answer, Question, RankProcesses, clock, percentile_us, serve
from motley.plugins.cuda.kernels import CODED, ROWS, THREADS, TOKENS, WARP, Coded, pointer
from motley.plugins.cuda.modules import module_of
from motley.transport import Communicator, Listener, Membership, Plain, connect_mesh
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import CudaDriver, Driver
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream, DeviceArray
from motley.transport.schedules.schedule import Operation

SHAPE = 14336, 4096
"""Rows and columns of a matrix that no cache holds: Mistral-7B's gate projection."""
BLOCK = 128
BITS = {"fp32": 32.0, "fp16": 16.0, "int8": 8 + 32 / BLOCK, "int4": 4 + 32 / BLOCK}
"""Per weight, its part of the scale included."""
SIZES = (8 << 10, 16 << 10, 64 << 10)
"""Bytes of a sum: the residual of one token, of widths 2048, 4096 and 16384."""
ROUNDS = 50
BURST = 20
"""Sums submitted at once, as many as some layers have; their time is told together."""
PROMPT, ANSWER = 32, 64
LONG, LONG_TIMES = 512, 3
"""Tokens of a prompt whose rate is told, and how often it is given: sizes of chunks are tried meanwhile."""
REQUESTS = (1, 8, 32)
"""That are answered at once."""
ROWS_AT_ONCE = (1, 8, 32, 128, 512)
"""Of a product whose speed is told: a token, requests that are answered at once, prompts."""
VOCABULARY = 256
"""Token ids of the prompt are below it."""


def product_seconds(
    driver: Driver,
    kind: str,
    shape: tuple[int, int] = SHAPE,
    launches: int = 48,
    rows_at_once: Sequence[int] = ROWS_AT_ONCE,
) -> dict[int, float]:
    """How long our own kernels' product takes, by the tokens that it is computed for; these are quantised before, where
    weights are codes. Launches are a graph, as in an engine, and take matrices in turn, as many as fit the place of one
    of floats: no cache has them from the launch before."""
    rows, columns = shape
    coded = Coded(CODED[kind], columns, BLOCK.bit_length() - 1) if kind in CODED else None
    one = rows * coded.row_bytes if coded else int(rows * columns * BITS[kind] // 8)
    with ExitStack() as memory, CudaStream(driver) as stream:

        def allocate(size: int) -> int:
            address = driver.allocate(size)
            memory.callback(driver.free, address)
            return address

        most = max(rows_at_once)
        x = allocate(coded.activation_bytes(most) if coded else 4 * most * columns)
        y, weights = allocate(4 * most * rows), allocate(4 * rows * columns)
        scales_bytes = 4 * rows * columns // BLOCK
        copies = 4 * rows * columns // one
        scales = allocate(copies * scales_bytes)
        integer = ctypes.c_int

        def submit(tokens: int, times: int) -> None:
            if coded:
                kernel, threads = coded.product(rows, tokens, zeros=False)
                first, numbers = coded.stretches, [tokens, rows, coded.row_bytes, coded.block_shift, columns // BLOCK]
            else:
                together = min(tokens, max(TOKENS))
                kernel, threads = f"matmul_{kind}_{together}", -(-rows // ROWS[together]) * (tokens // together) * WARP
                first, numbers = columns, [tokens, rows, columns]
            for launch in range(times):
                number = launch % copies
                matrix, own_scales = weights + one * number, scales + scales_bytes * number
                held = (matrix, own_scales, 0, 0) if coded else (matrix, 0)
                arguments = [pointer(x), integer(first), *map(pointer, (*held, y)), *map(integer, [rows, *numbers])]
                stream.launch(module_of(kernel), kernel, -(-threads // THREADS), THREADS, arguments, early=True)

        def seconds(tokens: int) -> float:
            times = launches if coded or tokens <= max(TOKENS) else max(1, launches // tokens)
            submit(tokens, 1)  # kernels are loaded
            graph = stream.capture(partial(submit, tokens, times))
            memory.callback(graph.close)
            took = []
            for _ in range(3):
                stream.synchronise(60.0)
                began = perf_counter()
                stream.replay(graph)
                stream.synchronise(60.0)
                took.append(perf_counter() - began)
            return min(took) / times

        return {tokens: seconds(tokens) for tokens in rows_at_once}


def all_reduce_us(
    form: HostStep,
    captured: bool,
    rounds: int = ROUNDS,
    open_driver: Callable[[], Driver] = CudaDriver,
    *,
    beside_host: bool = False,
) -> dict[int, float]:
    """Microseconds of a sum between two processes, by its bytes; sums follow each other without a pause.

    Args:
        captured: `BURST` of them are a CUDA graph.
        beside_host: the second rank has its terms in host memory; else both share a GPU, which goes back and forth
            between its processes.

    Raises:
        RuntimeError: a process failed; its error is on stderr.
    """
    secret = secrets.token_bytes(32)
    on_gpu = partial(_gpu_rank, form, captured, open_driver)
    ranks = [on_gpu, _host_rank if beside_host else on_gpu]
    targets = [partial(rank, Membership("bench", 0, each, 2, secret, bytes(32))) for each, rank in enumerate(ranks)]
    with RankProcesses(targets) as processes:
        processes.exchange_addresses()
        processes.ready()
        questions = {size: Question(Operation.ALL_REDUCE, size // 4, rounds) for size in SIZES}
        return {size: percentile_us(processes.ask(question), 50) for size, question in questions.items()}


@contextmanager
def _connected(member: Membership, pipe: Any) -> Iterator[Communicator]:
    """The communicator of a rank process, which tells its address and hears the others' by its pipe."""
    with closing(Listener("127.0.0.1")) as listener:
        pipe.send(listener.port)
        with connect_mesh(listener, member, pipe.recv(), TIMEOUT_S, security=Plain()) as communicator:
            yield communicator


def _gpu_rank(form: HostStep, captured: bool, open_driver: Callable[[], Driver], member: Membership, pipe: Any) -> None:
    with _connected(member, pipe) as communicator, CudaStream(open_driver(), form) as stream:
        serve(pipe, partial(_time_sums, stream, communicator, captured))


def _host_rank(member: Membership, pipe: Any) -> None:
    with _connected(member, pipe) as communicator:
        serve(pipe, partial(_time_host_sums, communicator))


def _time_host_sums(communicator: Communicator, question: Question) -> Answer:
    buffer = np.zeros(question.elements, np.float32)

    def burst() -> None:
        for _ in range(BURST):
            communicator.all_reduce(buffer)

    burst()
    return Answer(clock(burst, question.rounds), BURST)


def _time_sums(stream: CudaStream, communicator: Communicator, captured: bool, question: Question) -> Answer:
    driver = stream.driver
    with ExitStack() as memory:
        buffer = DeviceArray(driver.allocate(4 * question.elements), (question.elements,), np.dtype(np.float32))
        memory.callback(driver.free, buffer.address)
        summed = memory.enter_context(AllReduce(stream, communicator, buffer))

        def submit() -> None:
            for _ in range(BURST):
                summed.submit()

        submit()  # kernels are loaded
        stream.synchronise(TIMEOUT_S)
        run: Callable[[], None] = submit
        if captured:
            graph = stream.capture(submit)
            memory.callback(graph.close)
            run = partial(stream.replay, graph)

        def burst() -> None:
            run()
            stream.synchronise(TIMEOUT_S)

        return Answer(clock(burst, question.rounds), BURST)


def speed(model: Path, quantisation: str, ranks: Sequence[tuple[str, float]], threads: int = 1) -> Mapping[str, Any]:
    """Where a token's milliseconds go, and how many tokens a second can have, with such rank processes here.

    Args:
        ranks: the engine of each, and its relative share.
        threads: of each rank whose engine computes on the CPU.

    Returns:
        ``p50`` of a token; ``compute``, ``wire``, ``wait`` and ``lead`` of the mean one, over all ranks;
        ``weights_mb``, read for it by all of them (1e6 bytes); ``prompt_per_s``, tokens of a prompt of `LONG`;
        ``per_s``, tokens of so many requests at once, and ``step_ms``, what a step of all of these is made of.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed.
    """
    engines, weights = zip(*ranks, strict=True)
    room = max(REQUESTS) * (PROMPT + ANSWER)
    given: dict[str, Any] = {"engine": engines[0], "engines": engines, "threads": threads, "cache_tokens": room}
    return asyncio.run(_speed(MeshSpec(model, weights, quantisation, **given)))


async def _speed(spec: MeshSpec) -> Mapping[str, Any]:
    words = np.random.default_rng(0).integers(0, VOCABULARY, LONG).tolist()
    began = perf_counter()

    def told(what: str) -> None:
        print(f"{perf_counter() - began:.1f} s: {what}", file=sys.stderr, flush=True)

    async with LocalMesh(spec) as mesh:
        told(f"{len(spec.weights)} ranks are ready")
        await mesh.decode(words[PROMPT:0:-1], WARM_UP)  # what begins alike would be found in the caches
        told("kernels are loaded, host steps tried")
        report = await latency_of(mesh, words[:PROMPT], ANSWER)
        told(f"a token takes {report.ms_per_token['p50']:.2f} ms")
        texts = [[*words[turn:], *words[:turn]] for turn in range(1, 1 + LONG_TIMES)]
        prompts = [await latency_of(mesh, text, WARM_UP) for text in texts]
        told("long prompts are timed")
        together = await throughput_of(mesh, REQUESTS, PROMPT, ANSWER, VOCABULARY)
    return {
        "p50": report.ms_per_token["p50"],
        **report.mean_parts(),
        "weights_mb": report.weights_mb_per_token,
        "prompt_per_s": max(each.prefill_tokens_per_s for each in prompts),
        "per_s": {each.requests: each.tokens_per_s for each in together},
        "step_ms": {each.requests: each.step_ms for each in together},
    }
