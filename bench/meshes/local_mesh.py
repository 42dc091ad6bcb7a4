"""Rank workers on this machine, driven without an orchestrator: for benchmarks and checks."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from motley.daemon.machine.processor import usable_cores
from motley.daemon.node.survey.describe import describe
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.weights.cache import ShareCache
from motley.orchestrator.experts.messages import to_message
from motley.orchestrator.planning.caches import Caches, blocks_of, with_blocks
from motley.orchestrator.planning.choosing.stages import plans_of_stage
from motley.orchestrator.planning.cutting.shares import Candidate, RankPlan, plan_shares, trunk_profile
from motley.orchestrator.planning.draft import plan_draft
from motley.orchestrator.planning.placement.terms import ExpertKey
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.session_request import SessionRequest
from motley.plugins.installed import abilities
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp

PEERS_S = 60.0
STALL_S = 120.0
"""No rank loads, and no token takes, longer than this without a sign of life."""

Progress = Callable[[int, int, int], None]
"""Called with a rank, the bytes it has loaded, and all that it will."""


class MeshError(Exception):
    """A rank failed; the message says which and why."""


class StageSpec(NamedTuple):
    """A stage: how many ranks it has, and how many layers these share."""

    ranks: int
    layers: int


@dataclass(frozen=True)
class MeshSpec:
    """Which model, cut how, run how.

    Attributes:
        weights: relative speed of each rank; their number is the number of ranks.
        cache_tokens: what all sequences together may have in the caches in memory; at least what the context has that
            there is no room for elsewhere, which it is if less.
        disk_tokens: what they may have besides on the disk of every rank.
        node_tokens: what they may have besides in the memory of a cache holder of every rank, across the network.
        cache_format: what keys and values are kept as: "fp32", "fp16" or "int8".
        engines: of each rank; empty: all have `engine`.
        engine_options: settings of `engine`, by name.
        pin: one core per rank, in order, where there are enough.
        link: the network to emulate between the ranks, as `motley.bench.meshes.emulator.LinkSpec.parse` reads it; "":
            none.
        fractions: the part of a core's speed that each rank is to have, of engine onnxruntime with one thread; empty:
            all of it.
        hosts: what each expert host holds; the ranks are the trunk then. Empty: experts are in the ranks' shares. The
            n-th host and rank n are on one machine: no network is emulated between them.
        cache: where shares are kept; None: in the usual place.
        adapters: slots for them.
        adapter_rank: the largest rank of one.
        draft_model: a model folder: it guesses tokens on rank 0, by the same engine; None: there is none.
        own_head: the model's own head does.
        one_wave: no step is computed in halves, of which one computes while the other's sum travels.
        stages: of the ranks, in order; empty: every rank has a share of every layer.
    """

    model: Path
    weights: Sequence[float] = (1.0,)
    quantisation: str = "fp32"
    block: int = 128
    context: int = 1024
    cache_tokens: int = 0
    disk_tokens: int = 0
    node_tokens: int = 0
    cache_format: str = SessionRequest.cache_format
    engine: str = "onnxruntime"
    engines: Sequence[str] = ()
    engine_options: Mapping[str, str] = field(default_factory=dict)
    threads: int = 1
    wire: str = "fp32"
    exact: bool = False
    pin: bool = False
    link: str = ""
    fractions: Sequence[float] = ()
    hosts: Sequence[Collection[ExpertKey]] = ()
    cache: Path | None = None
    draft_model: Path | None = None
    own_head: bool = False
    adapters: int = 0
    adapter_rank: int = SessionRequest.adapter_rank
    one_wave: bool = False
    stages: Sequence[StageSpec] = ()

    @property
    def memory_tokens(self) -> int:
        """What all sequences together may have in the caches in memory."""
        return max(self.context - self.disk_tokens - self.node_tokens, self.cache_tokens)

    @property
    def caches(self) -> Caches:
        """What the caches hold."""
        return Caches(self.context, self.memory_tokens, self.disk_tokens, self.node_tokens)


class LocalMesh:
    """A session's rank workers as real processes; use as an asynchronous context.

    Attributes:
        profile: what the model costs that the ranks hold.
        plans: what every rank owns.
        ready: what every rank said when it was ready; then every expert host.
        timing: the latest timing of every rank.
        experts: what every rank said last of the expert hosts.
    """

    def __init__(self, spec: MeshSpec, progress: Progress | None = None) -> None:
        self.spec = spec
        self.profile = pb.ModelProfile()
        self.plans: list[RankPlan] = []
        self.ready: list[pb.Ready] = []
        self.timing: list[pb.Timing] = []
        self.experts: list[pb.ExpertReport] = []
        self._progress = progress
        self._workers: list[RankWorker] = []
        self._readers: list[asyncio.Task[None]] = []
        self._said: dict[str, asyncio.Queue[wp.Tokens | Exception]] = {}
        """What is said of each request under way."""
        self._ordered: dict[str, asyncio.Future[pb.AdapterEvent]] = {}
        """What is to be told of orders about adapters."""
        self._session = secrets.token_hex(8)
        self._reported = self._ended = 0
        """Timings that have come: one of each rank for every request that has ended."""
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
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: pb.Sampling | None = None,
        stop: Sequence[int] = (),
        heard: Callable[[], None] = lambda: None,
        drafts: bool = False,
        adapter: pb.Adapter | None = None,
    ) -> list[wp.Tokens]:
        """Have the leader continue `prompt`; what it said, a message per token. Every rank's timing is in after it.

        Several requests may be under way. `heard` is called for every token. With `drafts`, tokens may be guessed.
        With an `adapter`, it is computed with that.

        Raises:
            MeshError: a rank failed.
        """
        decode = wp.Decode(
            request_id=secrets.token_hex(4),
            prompt=prompt,
            sampling=sampling or pb.Sampling(top_p=1.0, repetition_penalty=1.0),
            max_tokens=max_tokens,
            stop_tokens=stop,
            without_drafts=not drafts,
            adapter=adapter,
        )
        queue = self._said[decode.request_id] = asyncio.Queue()
        self._send(0, decode=decode)
        said: list[wp.Tokens] = []
        while not said or not said[-1].finish:
            try:
                async with asyncio.timeout(STALL_S):
                    tokens = await queue.get()
            except TimeoutError:
                raise MeshError(f"no token within {STALL_S:.0f} s") from None
            if isinstance(tokens, Exception):
                raise tokens
            said.append(tokens)
            if tokens.ids:
                heard()
        del self._said[decode.request_id]
        if said[-1].finish == "error":
            raise MeshError(said[-1].failure.message)
        self._ended += 1
        due = self._ended * len(self.plans)
        async with asyncio.timeout(STALL_S), self._changed:
            await self._changed.wait_for(lambda: self._reported >= due)
        return said

    async def pin_adapter(self, folder: Path) -> pb.AdapterEvent:
        """Have every rank load an adapter, and keep it loaded; what the leader tells of it.

        Raises:
            MeshError: a rank cannot, or failed.
        """
        order = pb.AdapterOrder(id=secrets.token_hex(4), adapter=pb.Adapter(source=str(folder)), pin=True)
        told: asyncio.Future[pb.AdapterEvent] = asyncio.get_running_loop().create_future()
        self._ordered[order.id] = told
        self._send(0, adapter=order)
        async with asyncio.timeout(STALL_S):
            event = await told
        del self._ordered[order.id]
        if event.HasField("failure"):
            raise MeshError(event.failure.message)
        return event

    def unpin_adapter(self, adapter: pb.Adapter) -> None:
        """Let an adapter give way to others."""
        self._send(0, adapter=pb.AdapterOrder(id=secrets.token_hex(4), adapter=adapter, unpin=True))

    def host_process(self, host: int) -> psutil.Process:
        """An expert host's, to be killed or suspended while it is needed."""
        return psutil.Process(self._workers[len(self.plans) + host].pid)

    async def _start(self) -> None:
        spec = self.spec
        size = len(spec.weights)
        if spec.cache_format not in (known := abilities(spec.engine).cache_formats):
            raise MeshError(f"engine {spec.engine} keeps caches in {' or '.join(known)}, not in {spec.cache_format}")
        model = pb.ModelSpec(
            source=str(spec.model),
            quantisation=spec.quantisation,
            block=spec.block,
            exact=spec.exact,
            cache_format=spec.cache_format,
        )
        profile = (await asyncio.to_thread(describe, model, None)).profile
        if spec.hosts:
            profile = trunk_profile(profile)
        self.profile = profile
        plenty = 1 << 60
        candidates = [Candidate(f"rank {rank}", weight, plenty) for rank, weight in enumerate(spec.weights)]
        engine, holders = spec.engine, size if spec.node_tokens else 0
        whole, windows = abilities(engine).has_whole_caches, abilities(engine).keeps_windows
        setup = Setup(engine, spec.quantisation, on_gpu=False, has_whole_caches=whole, keeps_windows=windows)
        blocks = blocks_of(spec.caches, profile, [setup])
        self.plans = staged_plans(spec.stages, with_blocks(profile, blocks), candidates, blocks.room)
        assignment = pb.Assignment(
            model=model,
            fingerprint=profile.fingerprint,
            size=size,
            shares=[plan.to_share() for plan in self.plans],
            context=spec.context,
            cache_blocks=blocks.count,
            cache_block_tokens=blocks.tokens,
            windowed_blocks=blocks.windowed,
            window=blocks.window,
            far_blocks=blocks.on_disk + blocks.on_nodes,
            far_blocks_on_disk=blocks.on_disk if holders else 0,
            cache_holders=holders,
            holder_bytes=plenty,
            sequences=blocks.slots or SessionRequest.sequences,
            one_wave=spec.one_wave,
            engine=spec.engine,
            engine_options=spec.engine_options,
            threads=spec.threads,
            secret=secrets.token_bytes(32),
            plain=pb.Empty(),
            wire=spec.wire,
            hosts=map(to_message, spec.hosts),
            adapters=spec.adapters,
            adapter_rank=spec.adapter_rank,
        )
        if spec.draft_model or spec.own_head:
            assignment.draft.CopyFrom(await self._draft(spec.draft_model))
        workers = size + len(spec.hosts) + holders
        pin = spec.pin and spec.threads == 1 and workers <= usable_cores()
        cache = ShareCache(spec.cache)
        for rank in range(workers):
            core = rank if pin else None
            entry = self._entry(rank)
            self._workers.append(await RankWorker.start(cache=cache, host="127.0.0.1", core=core, entry=entry))
        self.ready = [pb.Ready() for _ in range(workers)]
        self.timing = [pb.Timing() for _ in range(size)]
        self.experts = [pb.ExpertReport() for _ in range(size)]
        ports: list[asyncio.Future[int]] = [asyncio.get_running_loop().create_future() for _ in range(workers)]
        loaded: list[asyncio.Future[None]] = [asyncio.get_running_loop().create_future() for _ in range(workers)]
        for rank in range(workers):
            self._readers.append(asyncio.create_task(self._read(rank, ports[rank], loaded[rank])))
            if rank < len(spec.engines):
                assignment.engine = spec.engines[rank]
            start = wp.Start(session=self._session, epoch=1, rank=rank, assignment=assignment)
            self._send(rank, start=start)
        async with asyncio.timeout(PEERS_S):
            addresses = [f"127.0.0.1:{port}" for port in await asyncio.gather(*ports)]
        for rank in range(workers):
            self._send(rank, peers=pb.Peers(addresses=addresses))
        all_loaded = asyncio.gather(*loaded)
        while not all_loaded.done():
            self._progressed = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STALL_S):
                    await asyncio.shield(all_loaded)
            if not all_loaded.done() and not self._progressed:
                raise MeshError(f"no rank gave a sign of life in loading for {STALL_S:.0f} s")
        await all_loaded

    async def _draft(self, draft: Path | None) -> pb.Assignment:
        """What rank 0 is told of a model that guesses tokens there; None: of the model's own head."""
        spec = self.spec
        source = str(draft or spec.model)
        model = pb.ModelSpec(source=source, quantisation=spec.quantisation, block=spec.block, ahead=draft is None)
        profile = (await asyncio.to_thread(describe, model, None, str(spec.model) if draft else "")).profile
        setup = Setup(
            spec.engine, spec.quantisation, on_gpu=False, has_whole_caches=abilities(spec.engine).has_whole_caches
        )
        return plan_draft(model, profile, setup, spec.caches).assignment()

    def _entry(self, rank: int) -> Sequence[str]:
        """The module that a worker runs, and its arguments: the network, and who is on the same machine."""
        fraction = self.spec.fractions[rank] if rank < len(self.spec.fractions) else 1.0
        if not self.spec.link and fraction == 1:
            return ("motley.daemon.worker.process",)
        size = len(self.spec.weights)
        near = rank + size if rank < size else rank - size  # there may be none; hosts have no links to each other
        if self.spec.node_tokens:
            near = 2 * size  # nobody: cache holders are on other machines
        return ("motley.bench.meshes.rank_over_link", self.spec.link or "none", str(near), str(fraction))

    def _send(self, rank: int, **body: Any) -> None:
        self._workers[rank].send(wp.WorkerCommand(**body))

    async def _read(self, rank: int, port: asyncio.Future[int], loaded: asyncio.Future[None]) -> None:
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
                    self._said[event.tokens.request_id].put_nowait(event.tokens)
                case "adapter" if event.adapter.id in self._ordered:
                    self._ordered[event.adapter.id].set_result(event.adapter)
                case "experts":
                    self.experts[rank] = event.experts
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
        if rank >= len(self.plans):
            return  # the ranks go on without it, or say what they miss
        for queue in self._said.values():
            queue.put_nowait(error)
        for told in self._ordered.values():
            if not told.done():
                told.set_exception(error)


def staged_plans(
    stages: Sequence[StageSpec], profile: pb.ModelProfile, candidates: Sequence[Candidate], room: int
) -> list[RankPlan]:
    """What every rank owns.

    Args:
        stages: of the ranks, in order; empty: every rank has a share of every layer.
        candidates: with the weight of each rank's share of its stage as their speed.
        room: tokens that the caches have room for.

    Raises:
        MeshError: the stages have other ranks, or other layers, than there are.
    """
    stages = stages or [StageSpec(len(candidates), profile.layers)]
    have = StageSpec(*map(sum, zip(*stages, strict=True)))
    if have != (len(candidates), profile.layers) or any(min(stage) < 1 for stage in stages):
        wanted = f"{len(candidates)} ranks and {profile.layers} layers"
        raise MeshError(f"stages of {have.ranks} ranks and {have.layers} layers, where there are {wanted}")
    plans: list[RankPlan] = []
    begin = 0
    for ranks, layers in stages:
        own = candidates[len(plans) : len(plans) + ranks]
        plan = partial(plan_shares, candidates=own, cache_tokens=room)
        plans += plans_of_stage([profile] * ranks, range(begin, begin + layers), plan)
        begin += layers
    return plans
