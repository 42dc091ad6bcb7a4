"""Rank workers on this machine, driven without an orchestrator: for benchmarks and checks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from motley.daemon.describe import describe
from motley.daemon.hardware import usable_cores
from motley.daemon.weights.cache import ShareCache
from motley.daemon.worker import RankWorker
from motley.orchestrator.planning.shares import Candidate, RankPlan, plan_shares
from motley.protocol import mesh_pb2 as pb

PEERS_S = 60.0
STALL_S = 120.0
"""No rank loads, and no token takes, longer than this without a sign of life."""

Progress = Callable[[int, int, int], None]
"""Called with a rank, the bytes it has loaded, and all that it will."""


class MeshError(Exception):
    """A rank failed; the message says which and why."""


@dataclass(frozen=True)
class MeshSpec:
    """Which model, cut how, run how.

    Attributes:
        weights: relative speed of each rank; their number is the number of ranks.
        pin: one core per rank, in order, where there are enough.
        link: the network to emulate between the ranks, as `motley.bench.emulator.LinkSpec.parse` reads it; "": none.
    """

    model: Path
    weights: Sequence[float] = (1.0,)
    quantisation: str = "fp32"
    block: int = 128
    context: int = 1024
    engine: str = "onnxruntime"
    threads: int = 1
    wire: str = "fp32"
    exact: bool = False
    pin: bool = False
    link: str = ""


class LocalMesh:
    """A session's rank workers as real processes; use as an asynchronous context.

    Attributes:
        plans: what every rank owns.
        ready: what every rank said when it was ready.
        timing: the latest timing of every rank.
    """

    def __init__(self, spec: MeshSpec, progress: Progress | None = None) -> None:
        self.spec = spec
        self.plans: list[RankPlan] = []
        self.ready: list[pb.Ready] = []
        self.timing: list[pb.Timing] = []
        self._progress = progress
        self._workers: list[RankWorker] = []
        self._readers: list[asyncio.Task[None]] = []
        self._tokens: asyncio.Queue[pb.Tokens | Exception] = asyncio.Queue()
        self._session = secrets.token_hex(8)
        self._reported = 0
        self._progressed = False
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End every worker."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def decode(
        self, prompt: Sequence[int], max_tokens: int, sampling: pb.Sampling | None = None, stop: Sequence[int] = ()
    ) -> list[pb.Tokens]:
        """Have the leader continue `prompt`; what it said, a message per token. Every rank's timing is in after it.

        Raises:
            MeshError: a rank failed.
        """
        decode = pb.Decode(
            request_id=secrets.token_hex(4),
            prompt=prompt,
            sampling=sampling or pb.Sampling(top_p=1.0, repetition_penalty=1.0),
            max_tokens=max_tokens,
            stop_tokens=stop,
        )
        self._reported = 0
        self._send(0, decode=decode)
        said: list[pb.Tokens] = []
        while not said or not said[-1].finish:
            try:
                tokens = await asyncio.wait_for(self._tokens.get(), STALL_S)
            except TimeoutError:
                raise MeshError(f"no token within {STALL_S:.0f} s") from None
            if isinstance(tokens, Exception):
                raise tokens
            said.append(tokens)
        if said[-1].finish == "error":
            raise MeshError(said[-1].failure.message)
        async with asyncio.timeout(STALL_S), self._changed:
            await self._changed.wait_for(lambda: self._reported >= len(self._workers))
        return said

    async def _start(self) -> None:
        spec = self.spec
        size = len(spec.weights)
        model = pb.ModelSpec(source=str(spec.model), quantisation=spec.quantisation, block=spec.block, exact=spec.exact)
        profile = await asyncio.to_thread(describe, model, None)
        plenty = 1 << 60
        candidates = [Candidate(f"rank {rank}", weight, plenty) for rank, weight in enumerate(spec.weights)]
        self.plans = plan_shares(profile, candidates, spec.context)
        assignment = pb.Assignment(
            model=model,
            fingerprint=profile.fingerprint,
            size=size,
            shares=[plan.to_share() for plan in self.plans],
            context=spec.context,
            engine=spec.engine,
            threads=spec.threads,
            secret=secrets.token_bytes(32),
            plain=pb.Empty(),
            wire=spec.wire,
        )
        pin = spec.pin and spec.threads == 1 and size <= usable_cores()
        cache = ShareCache()
        entry = ("motley.bench.rank_over_link", spec.link) if spec.link else ("motley.daemon.rank",)
        for rank in range(size):
            core = rank if pin else None
            self._workers.append(await RankWorker.start(cache=cache, host="127.0.0.1", core=core, entry=entry))
        self.ready = [pb.Ready() for _ in range(size)]
        self.timing = [pb.Timing() for _ in range(size)]
        ports: list[asyncio.Future[str]] = [asyncio.get_running_loop().create_future() for _ in range(size)]
        loaded: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(size)]
        for rank in range(size):
            self._readers.append(asyncio.create_task(self._read(rank, ports[rank], loaded[rank])))
            self._send(rank, assign=assignment)
        addresses = [f"127.0.0.1:{port}" for port in await asyncio.wait_for(asyncio.gather(*ports), PEERS_S)]
        for rank in range(size):
            self._send(rank, peers=pb.Peers(addresses=addresses))
        all_loaded = asyncio.gather(*loaded)
        while not all_loaded.done():
            self._progressed = False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(all_loaded), STALL_S)
            if not all_loaded.done() and not self._progressed:
                raise MeshError(f"no rank gave a sign of life in loading for {STALL_S:.0f} s")
        await all_loaded

    def _send(self, rank: int, **body: Any) -> None:
        self._workers[rank].send(pb.RankCommand(session=self._session, epoch=1, rank=rank, **body))

    async def _read(self, rank: int, port: asyncio.Future[str], loaded: asyncio.Future[None]) -> None:
        """Take in what a rank says until it ends."""
        why = "its process ended"
        async for event in self._workers[rank].events():
            match event.WhichOneof("body"):
                case "listening":
                    port.set_result(event.listening)
                case "loading":
                    self._progressed = True
                    if self._progress is not None:
                        self._progress(rank, event.loading.done_bytes, event.loading.total_bytes)
                case "ready":
                    self.ready[rank] = event.ready
                    loaded.set_result(None)
                case "tokens":
                    self._tokens.put_nowait(event.tokens)
                case "timing":
                    self.timing[rank] = event.timing
                    async with self._changed:
                        self._reported += 1
                        self._changed.notify_all()
                case "failed":
                    why = event.failed.message
                    break
        error = MeshError(f"rank {rank}: {why}")
        for future in (port, loaded):
            if not future.done():
                future.set_exception(error)
                with contextlib.suppress(MeshError):
                    future.exception()
        self._tokens.put_nowait(error)
