"""A mixture of experts over nodes: sliced, where every node works on every token, and parallel, where few do.

*Sliced*: a rank per node, and a slice of every expert on each; two sums per layer are exchanged. *Parallel*: the trunk
on the first node, and an expert host on every node; per layer the trunk sends its rows to a host of each chosen expert
and waits for the results (`motley.orchestrator.planning.experts.layout`). Experts are placed as the orchestrator would
place them over equal nodes.

With float32 on the wire a token's rows take ``layers * chosen * hidden * 4 * 2`` bytes, there and back; headers come on
top, and what the trunk's own node computes leaves it neither way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from motley.bench.measurements.percentiles import percentiles
from motley.bench.measurements.speed.latency import WARM_UP
from motley.bench.measurements.speed.throughput import Throughput, throughput_of
from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec, Progress
from motley.daemon.experts.wire import EXPERT_BYTES, HEADER_BYTES
from motley.daemon.node.survey.describe import describe
from motley.orchestrator.planning.placement.place import place_experts
from motley.orchestrator.planning.placement.terms import Expert, Host
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp

PROMPT = 8
"""Random tokens in each prompt of the requests that are answered at once."""


@dataclass(frozen=True)
class Layout:
    """How fast a mixture of experts is in one layout: `sliced` or `parallel`.

    Attributes:
        ms_per_token: of one request alone, by percentile.
        idle: by node: the part of a token's time in which nothing is computed there.
        collectives: per token; a trunk alone has nobody to sum with.
        throughput: by number of requests answered at once.
    """

    layout: str
    ms_per_token: dict[str, float]
    idle: list[float]
    collectives: float
    throughput: list[Throughput]


@dataclass(frozen=True)
class Traffic:
    """What travels between the trunk and all expert hosts, per token of one request.

    Attributes:
        bytes: counted, both ways.
        rows_bytes: of these by the formula: the rows.
        headers_bytes: of these by the formula: what says whose rows they are.
        messages: both ways.
        local_bytes: of `bytes` those that stay on the trunk's node.
        local_messages: of `messages` those that do.
    """

    bytes: float
    rows_bytes: int
    headers_bytes: float
    messages: float
    local_bytes: float
    local_messages: float


@dataclass(frozen=True)
class Death:
    """What the loss of an expert host in the middle of an answer does to it.

    Attributes:
        how: ``killed``, which its peers are told at once, or ``silent``: as after a power cut nothing comes any more.
        host: the busiest that is not on the trunk's node; what it holds, others hold, too.
        usual_ms: of a token until then, on the trunk: the median.
        stall_ms: by how much the longest token from then on exceeds that.
        unchanged: the text is that of a run without a loss.
    """

    how: str
    host: int
    usual_ms: float
    stall_ms: float
    unchanged: bool


@dataclass(frozen=True)
class MoeReport:
    """What `motley bench moe --json` prints.

    Attributes:
        experts: per layer.
        expert_mb: of one, as it is held.
        deaths: none where there is one replica only.
    """

    model: str
    scale: str
    parameters: int
    layers: int
    experts: int
    experts_per_token: int
    hidden: int
    expert_mb: float
    quant: str
    nodes: int
    replicas: int
    link: str
    layouts: list[Layout]
    traffic: Traffic
    deaths: list[Death]

    def as_json(self) -> dict[str, Any]:
        """What `motley bench moe --json` ends with: the report in dictionaries, lists and numbers."""
        return asdict(self)


async def measure_moe(
    spec: MeshSpec,
    *,
    nodes: int,
    replicas: int,
    requests: Sequence[int],
    tokens: int,
    vocabulary: int,
    scale: str,
    progress: Progress | None = None,
) -> MoeReport:
    """Measure a model with experts sliced over nodes, then with whole experts on nodes, as processes of this machine.

    Args:
        spec: the model and how ranks are run; how it is cut is decided here.
        requests: numbers of requests to answer at once.
        tokens: of each answer.
        scale: what the model's shape is, for people.

    Raises:
        MeshError: the model has no experts, or a rank failed.
        motley.orchestrator.planning.placement.terms.PlacementError: more replicas than nodes.
        motley.orchestrator.planning.cutting.shares.PlanError: the model cannot be cut for so many nodes.
    """
    model = pb.ModelSpec(source=str(spec.model), quantisation=spec.quantisation, block=spec.block)
    profile = (await asyncio.to_thread(describe, model, None)).profile
    if not profile.expert_layers:
        raise MeshError(f"{profile.name} ({profile.family}) has no experts")
    parallel = replace(spec, weights=(1.0,), hosts=place(profile, nodes, replicas))
    sliced = replace(spec, weights=(1.0,) * nodes)
    prompt = np.random.default_rng(2).integers(0, vocabulary, 1).tolist()
    layouts = []
    async with LocalMesh(sliced, progress) as mesh:
        alone = await _one_request(mesh, prompt, tokens)
        layouts.append(replace(alone, throughput=await throughput_of(mesh, requests, PROMPT, tokens, vocabulary)))
    async with LocalMesh(parallel, progress) as mesh:
        alone = await _one_request(mesh, prompt, tokens)
        traffic = _traffic(mesh, profile, WARM_UP + tokens)
        layouts.append(replace(alone, throughput=await throughput_of(mesh, requests, PROMPT, tokens, vocabulary)))
        deaths = [await _lose(mesh, how, prompt, tokens) for how in ("silent", "killed") if replicas > 1]
    return MoeReport(
        model=spec.model.name,
        scale=scale,
        parameters=profile.parameters,
        layers=len(profile.expert_layers),
        experts=profile.expert_count,
        experts_per_token=profile.experts_per_token,
        hidden=profile.hidden,
        expert_mb=round(profile.expert_bytes / 1e6, 3),
        quant=spec.quantisation,
        nodes=nodes,
        replicas=replicas,
        link=spec.link,
        layouts=layouts,
        traffic=traffic,
        deaths=deaths,
    )


def place(profile: pb.ModelProfile, nodes: int, replicas: int) -> list[tuple[tuple[int, int], ...]]:
    """What each of some equal nodes holds, if every expert is chosen equally often.

    Raises:
        motley.orchestrator.planning.placement.terms.PlacementError: more replicas than nodes.
    """
    load = profile.experts_per_token / profile.expert_count
    experts = [
        Expert(layer, index, profile.expert_bytes, load)
        for layer in profile.expert_layers
        for index in range(profile.expert_count)
    ]
    names = [f"node {node:02}" for node in range(nodes)]
    hosts = [Host(name, memory=sum(expert.bytes for expert in experts), speed=1e9) for name in names]
    held = place_experts(experts, hosts, replicas=replicas).held
    return [held[name] for name in names]


async def _one_request(mesh: LocalMesh, prompt: Sequence[int], tokens: int) -> Layout:
    """Warm up, then answer one request; its throughput is not measured."""
    await mesh.decode(prompt, WARM_UP)
    before = [host.computed_s for host in _hosts(mesh)]
    collectives = mesh.timing[0].collectives
    await mesh.decode(prompt, tokens)
    steps = tokens - 1  # the first comes with the prompt
    step_ms = mesh.timing[0].step_ms[-steps:]
    mean_ms = float(np.mean(step_ms))
    computed = [float(np.mean(timing.step_compute_ms[-steps:])) for timing in mesh.timing]
    computed += [0.0] * (len(before) - len(computed))
    for node, (was, host) in enumerate(zip(before, _hosts(mesh), strict=True)):
        computed[node] += 1e3 * (host.computed_s - was) / tokens
    return Layout(
        layout="parallel" if before else "sliced",
        ms_per_token={
            "mean": round(mean_ms, 3),
            **percentiles(step_ms, (50, 99)),
        },
        idle=[round(max(0.0, 1 - own / mean_ms), 3) for own in computed],
        collectives=(mesh.timing[0].collectives - collectives) / steps if len(mesh.timing) > 1 else 0.0,
        throughput=[],
    )


def _traffic(mesh: LocalMesh, profile: pb.ModelProfile, rows: int) -> Traffic:
    """The traffic of all rows so far, which have come one by one."""
    report, hosts = mesh.experts[0], _hosts(mesh)
    row_bytes = 2 * (4 * profile.hidden + EXPERT_BYTES)  # a row alone has an expert's record to itself
    chosen = len(profile.expert_layers) * profile.experts_per_token
    calls = sum(host.calls for host in hosts)
    return Traffic(
        bytes=(report.bytes_out + report.bytes_in) / rows,
        rows_bytes=chosen * profile.hidden * 4 * 2,
        headers_bytes=chosen * 2 * EXPERT_BYTES + 2 * HEADER_BYTES * calls / rows,
        messages=2 * calls / rows,
        local_bytes=(hosts[0].rows * row_bytes + 2 * HEADER_BYTES * hosts[0].calls) / rows,
        local_messages=2 * hosts[0].calls / rows,
    )


async def _lose(mesh: LocalMesh, how: str, prompt: Sequence[int], tokens: int) -> Death:
    """Answer a request twice, and lose a host in the middle of the second answer."""
    before = [host.rows for host in _hosts(mesh)]
    first = await mesh.decode(prompt, tokens)
    rows = [host.rows - was for host, was in zip(_hosts(mesh), before, strict=True)]
    host = max(range(1, len(rows)), key=rows.__getitem__)
    victim = mesh.host_process(host)
    heard = 0

    def on_token() -> None:
        nonlocal heard
        heard += 1
        if heard == tokens // 2:
            if how == "killed":
                victim.kill()
            else:
                victim.suspend()

    try:
        second = await mesh.decode(prompt, tokens, heard=on_token)
    finally:
        if how == "silent":
            victim.resume()
    step_ms = mesh.timing[0].step_ms[1 - tokens :]  # the first token comes with the prompt
    usual = float(np.median(step_ms[: tokens // 2 - 1]))
    return Death(
        how=how,
        host=host,
        usual_ms=round(usual, 1),
        stall_ms=round(max(step_ms[tokens // 2 - 1 :]) - usual, 1),
        unchanged=_ids(first) == _ids(second),
    )


def _hosts(mesh: LocalMesh) -> list[pb.HostReport]:
    """What the trunk's only rank knows of them; none where experts are sliced."""
    return list(mesh.experts[0].hosts)


def _ids(said: Sequence[wp.Tokens]) -> list[int]:
    return [token for tokens in said for token in tokens.ids]
