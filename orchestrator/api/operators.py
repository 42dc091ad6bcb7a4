"""What operators look at: whether the orchestrator lives, and its numbers in Prometheus's text format.

The numbers come from the tables when they are asked for; nothing is counted for them alone but how requests go
(`motley.orchestrator.serving.answering.tally`). Labels are names of nodes and of sessions that there are, and words
from fixed lists, never what a client has sent, so their number is bounded. What adds up begins at 0 with each session.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, permutations

import numpy as np
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.serving.answering.requests import Requests
from motley.orchestrator.serving.answering.tally import Histogram, Outcome
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Rank, decode_steps
from motley.protocol.release import release

HEALTH_PATH = "/health"
"""Answers without an API key: what restarts services has none."""
_QUANTILES = (0.5, 0.95, 0.99)
_ACTIVITY = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were found in the caches.",
    "generated_tokens": "Tokens of answers.",
    "tried_drafts": "Tokens that were guessed and computed.",
    "accepted_drafts": "Tokens that were guessed rightly.",
    "adapter_loads": "How often an adapter was loaded into a slot.",
}
"""What a session's leader adds up, by the names of `motley.protocol.mesh_pb2.Activity`."""
_FAR_BLOCKS = {
    "far_blocks": "Blocks of the caches that are on disks, or on other nodes.",
    "far_blocks_used": "Those of them that hold anything.",
    "blocks_on_disk": "Blocks that every rank keeps on its disk for the next start.",
}
"""What a session's leader tells of its blocks as they are now, likewise."""


class OperatorsApi:
    def __init__(self, nodes: NodeTable, links: LinkTable, sessions: SessionTable, requests: Requests) -> None:
        self._numbers = _Numbers(nodes, links, sessions, requests)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(HEALTH_PATH, self.health), web.get("/metrics", self.metrics), web.get("/version", self.version)]

    async def health(self, _: web.Request) -> web.Response:
        """Answer, which is all that it tells: that the orchestrator is up. What is served, ``/v1/models`` tells."""
        return web.json_response({"status": "ok"})

    async def version(self, _: web.Request) -> web.Response:
        """The version of this server, and its clock's Unix time."""
        return web.json_response({"version": release(), "time": time.time()})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._numbers), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Numbers(Collector):
    def __init__(self, nodes: NodeTable, links: LinkTable, sessions: SessionTable, requests: Requests) -> None:
        self._nodes = nodes
        self._links = links
        self._sessions = sessions
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """All numbers, as they are now."""
        yield _gauge("build_info", "The version that runs; 1.", ["version"], [([release()], 1)])
        yield from self._of_nodes()
        yield from self._of_links([node for node in self._nodes if node.alive])
        states = [session.state for session in self._sessions]
        yield _gauge("sessions", "Sessions by state.", ["state"], [([state], states.count(state)) for state in State])
        # Of two that share a name, one has ended and is being forgotten.
        named = [one for one in self._sessions if one.name and one is self._sessions.named(one.name)]
        yield from self._of_requests(named)
        losses = [([session.name], session.losses.count) for session in named]
        yield _counter(
            "rank_losses", "Ranks that were lost, after which a session got another plan.", ["model"], losses
        )
        epochs = [([session.name], session.epoch) for session in named]
        yield _gauge("session_epoch", "The number of a session's plan: one more for each new one.", ["model"], epochs)
        recoveries = [([session.name], session.recoveries) for session in named]
        words = "How often a session was ready again after ranks were lost."
        yield _counter("recoveries", words, ["model"], recoveries)
        forecasts = [([session.name], session.forecast.token_s) for session in named if session.forecast]
        yield _gauge("forecast_seconds", "What a token was forecast to take.", ["model"], forecasts)
        ready = [session for session in named if session.state is State.READY]
        yield from _of_activity(ready)
        yield from _of_hosts(
            [(session, host) for session in ready if session.experts for host in session.experts.hosts]
        )
        yield from _of_ranks([(session, rank) for session in ready for rank in session.ranks])

    def _of_nodes(self) -> Iterator[Metric]:
        nodes = list(self._nodes)
        states = [node.state for node in nodes]
        every = ("alive", "left", "lost")
        yield _gauge("nodes", "Nodes by state.", ["state"], [([state], states.count(state)) for state in every])
        memory = [
            ([node.name, kind], size)
            for node in nodes
            if node.alive
            for kind, size in (
                ("total", node.capabilities.memory_bytes),
                ("available", node.memory_available),
                ("reserved", self._sessions.reserved(node.id)),
            )
        ]
        words = "What a node has in all, what is free of it, and what sessions have been given of it."
        yield _gauge("node_memory_bytes", words, ["node", "kind"], memory)
        gpus = [
            ([node.name, str(number), kind], size)
            for node in nodes
            if node.alive
            for number, gpu in enumerate(node.gpus)
            for kind, size in (("total", gpu.memory_bytes), ("free", gpu.free_bytes))
        ]
        yield _gauge("node_gpu_memory_bytes", "What a GPU has, and what is free of it.", ["node", "gpu", "kind"], gpus)
        silence = [([node.name], self._nodes.silence_s(node)) for node in nodes if node.alive]
        yield _gauge(
            "node_silence_seconds", "Since a node has said anything; it does so every second.", ["node"], silence
        )

    def _of_links(self, nodes: Sequence[Node]) -> Iterator[Metric]:
        ways = [
            ([one.name, other.name], link)
            for one, other in permutations(nodes, 2)
            if (link := self._links.of(one, other)) is not None
        ]
        labels = ["source", "target"]
        up = [(names, float(not link.failure)) for names, link in ways]
        yield _gauge("link_up", "Whether a node reaches another; 0: it does not.", labels, up)
        latency = [(names, link.latency_s) for names, link in ways if not link.failure]
        yield _gauge("link_latency_seconds", "From a node to another, one way, when it was measured.", labels, latency)
        rates = [(names, link.bandwidth) for names, link in ways if not link.failure]
        yield _gauge("link_bytes_per_second", "From a node to another, when it was measured.", labels, rates)

    def _of_requests(self, sessions: Sequence[Session]) -> Iterator[Metric]:
        tallies = [(session.name, self._requests.tally(session)) for session in sessions]
        ended = [([name, outcome], tally.ended[outcome]) for name, tally in tallies for outcome in Outcome]
        yield _counter("requests", "Requests that have ended, by how.", ["model", "outcome"], ended)
        words = "Seconds from a request to the first token of its answer."
        yield _histogram("first_token_seconds", words, [(name, tally.first_s) for name, tally in tallies])
        words = "Seconds from each token of an answer to the next."
        yield _histogram("token_gap_seconds", words, [(name, tally.gap_s) for name, tally in tallies])
        places = [(session.name, self._requests.places(session)) for session in sessions]
        taken = [([name], own.taken) for name, own in places]
        yield _gauge("requests_taken", "Requests that are under way or wait.", ["model"], taken)
        limits = [([name], own.number) for name, own in places]
        yield _gauge("requests_limit", "As many requests may be under way or wait.", ["model"], limits)
        yield from self._of_adapters(sessions)

    def _of_adapters(self, sessions: Sequence[Session]) -> Iterator[Metric]:
        labels = ["model", "adapter"]
        tallies = [
            ([session.name, name], self._requests.adapter_tally(session, name))
            for session in sessions
            for name in session.adapters
        ]
        ended = [([*own, outcome], tally.ended[outcome]) for own, tally in tallies for outcome in Outcome]
        yield _counter("adapter_requests", "Requests with an adapter that have ended.", [*labels, "outcome"], ended)
        tokens = [(own, tally.tokens) for own, tally in tallies]
        yield _counter("adapter_tokens", "Tokens of answers with an adapter.", labels, tokens)
        loaded = [
            (
                [session.name, name],
                float(session.activity is not None and each.fingerprint in session.activity.adapters),
            )
            for session in sessions
            for name, each in session.adapters.items()
        ]
        yield _gauge("adapter_loaded", "Whether an adapter is in a slot.", labels, loaded)


def _of_activity(sessions: Sequence[Session]) -> Iterator[Metric]:
    told = [(session.name, session.activity) for session in sessions if session.activity]
    states = [
        ([name, state], value)
        for name, activity in told
        for state, value in (("active", activity.active), ("waiting", activity.waiting))
    ]
    yield _gauge("requests_scheduled", "Requests by whether they are computed or wait.", ["model", "state"], states)
    blocks = [
        ([name, use], value)
        for name, activity in told
        for use, value in (
            ("used", activity.blocks_used),
            ("kept", activity.blocks_kept),
            ("free", activity.blocks - activity.blocks_used - activity.blocks_kept),
        )
    ]
    yield _gauge("cache_blocks", "Blocks of the caches, by what they are used for.", ["model", "use"], blocks)
    for field, words in _FAR_BLOCKS.items():
        yield _gauge(field, words, ["model"], [([name], getattr(activity, field)) for name, activity in told])
    for field, words in _ACTIVITY.items():
        yield _counter(field, words, ["model"], [([name], getattr(activity, field)) for name, activity in told])


def _of_hosts(hosts: Sequence[tuple[Session, ExpertHost]]) -> Iterator[Metric]:
    told = [([session.name, str(host.number), host.name], list(host.links.values())) for session, host in hosts]
    labels = ["model", "host", "node"]
    rows = [(own, sum(link.rows for link in links)) for own, links in told]
    yield _counter("expert_rows", "Rows that a host of experts has computed.", labels, rows)
    waits = [(own, sum(link.wait_s for link in links)) for own, links in told]
    yield _counter("expert_wait_seconds", "In which ranks had nothing to do but wait for a host.", labels, waits)
    trips = [(own, max((link.round_trip_s for link in links), default=0.0)) for own, links in told]
    yield _gauge("expert_round_trip_seconds", "To a host of experts and back.", labels, trips)


def _of_ranks(ranks: Sequence[tuple[Session, Rank]]) -> Iterator[Metric]:
    labels = ["model", "rank", "node"]
    told = [([session.name, str(rank.index), rank.node_name], rank.timing) for session, rank in ranks if rank.timing]
    times = [
        ([*own, part], seconds)
        for own, timing in told
        for part, seconds in (("compute", timing.compute_s), ("wire", timing.wire_s), ("wait", timing.wait_s))
    ]
    yield _counter("rank_seconds", "Where the time of decode steps went.", [*labels, "part"], times)
    steps = [(own, decode_steps(timing)) for own, timing in told]
    yield _counter("rank_steps", "Decode steps.", labels, steps)
    peaks = [(own, timing.peak_rss_bytes) for own, timing in told]
    yield _gauge("rank_peak_rss_bytes", "The most memory that a rank's process has had.", labels, peaks)
    shares = [
        ([session.name, str(rank.index), rank.node_name], rank.ready.share_bytes)
        for session, rank in ranks
        if rank.ready
    ]
    yield _gauge("rank_share_bytes", "Weights of a rank's share.", labels, shares)
    latest = [
        ([session.name, str(quantile)], float(np.quantile(rank.timing.step_ms, quantile)) / 1e3)
        for session, rank in ranks
        if rank is session.leader and rank.timing and rank.timing.step_ms
        for quantile in _QUANTILES
    ]
    yield _gauge("step_seconds", "Of the latest decode steps, at most 4096.", ["model", "quantile"], latest)


_Samples = Iterable[tuple[list[str], float]]
"""Values of a metric's labels, and its value."""


def _gauge(name: str, words: str, labels: Sequence[str], samples: _Samples) -> Metric:
    family = GaugeMetricFamily(f"motley_{name}", words, labels=labels)
    for own, value in samples:
        family.add_metric(own, value)
    return family


def _counter(name: str, words: str, labels: Sequence[str], samples: _Samples) -> Metric:
    family = CounterMetricFamily(f"motley_{name}", words, labels=labels)
    for own, value in samples:
        family.add_metric(own, value)
    return family


def _histogram(name: str, words: str, samples: Iterable[tuple[str, Histogram]]) -> Metric:
    family = HistogramMetricFamily(f"motley_{name}", words, labels=["model"])
    for model, histogram in samples:
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family.add_metric([model], list(zip(bounds, accumulate(histogram.counts), strict=True)), histogram.sum)
    return family
