"""What a GPU takes: to read weights, to sum between two processes that share it, for tokens and prompts.

Ranks share one GPU here, so two of them compute no faster than one: what tells is what their collectives cost.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from motley.bench.measurements.speed.latency import WARM_UP, latency_of
from motley.bench.measurements.speed.throughput import throughput_of
from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec
from motley.bench.meshes.rank_processes import TIMEOUT_S, Answer, Question, RankProcesses, clock, percentile_us, serve
from motley.plugins.cuda.kernels import CODED, CODED_ROWS, ROWS, SOURCES, THREADS, TOKENS, WARP, Coded
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
ROWS_AT_ONCE = (*TOKENS, 16)
VOCABULARY = 256
"""Token ids of the prompt are below it."""


def matmul_bandwidth(driver: Driver, kind: str, shape: tuple[int, int] = SHAPE, launches: int = 50) -> dict[int, float]:
    """Bytes of weights per second that a product reads, by the tokens that it is computed for; these are quantised
    before, where weights are codes."""
    rows, columns = shape
    nbytes = int(rows * columns * BITS[kind] / 8)
    coded = Coded(CODED[kind], columns, BLOCK.bit_length() - 1) if kind in CODED else None
    with ExitStack() as memory, CudaStream(driver) as stream:

        def allocate(size: int) -> ctypes.c_void_p:
            address = driver.allocate(size)
            memory.callback(driver.free, address)
            return ctypes.c_void_p(address)

        most = max(ROWS_AT_ONCE)
        x, y, weights = allocate(4 * most * columns), allocate(4 * most * rows), allocate(4 * rows * columns)
        scales = allocate(4 * rows * columns // BLOCK)
        null, integer = ctypes.c_void_p(0), ctypes.c_int
        warps = -(-rows // (CODED_ROWS if coded else ROWS))

        def run(tokens: int, times: int) -> None:
            together = min(tokens, max(TOKENS))
            blocks = -(-warps * (tokens // together) * WARP // THREADS)
            kernel, first = f"matmul_{kind}_{together}", columns
            numbers = [tokens, rows, columns, BLOCK.bit_length() - 1]
            if coded:
                kernel, first = coded.products(together, zeros=False), coded.stretches
                numbers = [tokens, rows, coded.row_bytes, coded.block_shift, columns // BLOCK]
            arguments: list[Any] = [x, integer(first), weights, scales, null, null, y, integer(rows)]
            arguments += map(integer, numbers)
            for _ in range(times):
                stream.launch(SOURCES, kernel, blocks, THREADS, arguments)
            stream.synchronise(60.0)

        rates = {}
        for tokens in ROWS_AT_ONCE:
            run(tokens, 1)
            began = perf_counter()
            run(tokens, launches)
            rates[tokens] = nbytes * launches / (perf_counter() - began)
        return rates


def all_reduce_us(
    form: HostStep, captured: bool, rounds: int = ROUNDS, open_driver: Callable[[], Driver] = CudaDriver
) -> dict[int, float]:
    """Microseconds of a sum between two processes on one GPU, by its bytes; sums follow each other without a pause.

    Args:
        captured: `BURST` of them are a CUDA graph.

    Raises:
        RuntimeError: a process failed; its error is on stderr.
    """
    secret = secrets.token_bytes(32)
    members = [Membership("bench", 0, rank, 2, secret, bytes(32)) for rank in range(2)]
    with RankProcesses([partial(_sum_rank, form, captured, open_driver, member) for member in members]) as ranks:
        ranks.exchange_addresses()
        ranks.ready()
        return {size: percentile_us(ranks.ask(Question(Operation.ALL_REDUCE, size // 4, rounds)), 50) for size in SIZES}


def _sum_rank(form: HostStep, captured: bool, open_driver: Callable[[], Driver], member: Membership, pipe: Any) -> None:
    listener = Listener("127.0.0.1")
    pipe.send(listener.port)
    communicator = connect_mesh(listener, member, pipe.recv(), TIMEOUT_S, security=Plain())
    with communicator, CudaStream(open_driver(), form) as stream:
        serve(pipe, partial(_time_sums, stream, communicator, captured))
    listener.close()


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


def speed(model: Path, quantisation: str, ranks: int, engine: str = "cuda") -> Mapping[str, Any]:
    """Where a token's milliseconds go, and how many tokens a second can have, with so many rank processes here.

    Returns:
        ``p50`` of a token; ``compute``, ``wire``, ``wait`` and ``lead`` of the mean one, over all ranks;
        ``weights_mb``, read for it by all of them (1e6 bytes); ``prompt_per_s``, tokens of a prompt of `LONG`; and
        ``per_s``, tokens of so many requests at once.

    Raises:
        motley.bench.meshes.local_mesh.MeshError: a rank failed.
    """
    return asyncio.run(_speed(MeshSpec(model, [1.0] * ranks, quantisation, engine=engine)))


async def _speed(spec: MeshSpec) -> Mapping[str, Any]:
    words = np.random.default_rng(0).integers(0, VOCABULARY, LONG).tolist()
    async with LocalMesh(spec) as mesh:
        await mesh.decode(words[PROMPT:0:-1], WARM_UP)  # what begins alike would be found in the caches
        report = await latency_of(mesh, words[:PROMPT], ANSWER)
        texts = [[*words[turn:], *words[:turn]] for turn in range(1, 1 + LONG_TIMES)]
        prompts = [await latency_of(mesh, text, WARM_UP) for text in texts]
        together = await throughput_of(mesh, REQUESTS, PROMPT, ANSWER, VOCABULARY)
    return {
        "p50": report.ms_per_token["p50"],
        **report.mean_parts(),
        "weights_mb": report.weights_mb_per_token,
        "prompt_per_s": max(each.prefill_tokens_per_s for each in prompts),
        "per_s": {each.requests: each.tokens_per_s for each in together},
    }
