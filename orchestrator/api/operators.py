"""What operators look at: whether the orchestrator lives, and its numbers in Prometheus's text format.

The numbers come from the tables when they are asked for; nothing is counted for them alone but how requests go
(`motley.orchestrator.serving.answering.tally`). Labels are names of nodes and of sessions that there are, and words
from fixed lists, never what a client has sent, so their number is bounded. What adds up begins at 0 with each session.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

import numpy as np
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from motley.orchestrator.nodes import NodeTable
from motley.orchestrator.serving.answering.requests import Requests
from motley.orchestrator.serving.answering.tally import Histogram, Outcome
from motley.orchestrator.session_table import SessionTable
from motley.orchestrator.sessions import Session, State
from motley.orchestrator.workers import Rank

HEALTH_PATH = "/health"
"""Answers without an API key: what restarts services has none."""
_QUANTILES = (0.5, 0.95, 0.99)
_ACTIVITY = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens of prompts that were found in the caches.",
    "generated_tokens": "Tokens of answers.",
    "tried_drafts": "Tokens that were guessed and computed.",
    "accepted_drafts": "Tokens that were guessed rightly.",
}
"""What a session's leader adds up, by the names of `motley.protocol.mesh_pb2.Activity`."""


class OperatorsApi:
    def __init__(self, nodes: NodeTable, sessions: SessionTable, requests: Requests) -> None:
        self._numbers = _Numbers(nodes, sessions, requests)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(HEALTH_PATH, self.health), web.get("/metrics", self.metrics), web.get("/version", self.version)]

    async def health(self, _: web.Request) -> web.Response:
        """Answer, which is all that it tells: that the orchestrator is up. What is served, ``/v1/models`` tells."""
        return web.json_response({"status": "ok"})

    async def version(self, _: web.Request) -> web.Response:
        """The version of this server, and its clock's Unix time."""
        return web.json_response({"version": version("motley"), "time": time.time()})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._numbers), headers={"Content-Type": CONTENT_TYPE_LATEST})


class _Numbers(Collector):
    def __init__(self, nodes: NodeTable, sessions: SessionTable, requests: Requests) -> None:
        self._nodes = nodes
        self._sessions = sessions
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        """All numbers, as they are now."""
        yield from self._of_nodes()
        states = [session.state for session in self._sessions]
        yield _gauge("sessions", "Sessions by state.", ["state"], [([state], states.count(state)) for state in State])
        # Of two that share a name, one has ended and is being forgotten.
        named = [one for one in self._sessions if one.name and one is self._sessions.named(one.name)]
        yield from self._of_requests(named)
        losses = [([session.name], session.losses.count) for session in named]
        yield _counter(
            "rank_losses", "Ranks that were lost, after which a session got another plan.", ["model"], losses
        )
        ready = [session for session in named if session.state is State.READY]
        yield from _of_activity(ready)
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
    for field, words in _ACTIVITY.items():
        yield _counter(field, words, ["model"], [([name], getattr(activity, field)) for name, activity in told])


def _of_ranks(ranks: Sequence[tuple[Session, Rank]]) -> Iterator[Metric]:
    labels = ["model", "rank", "node"]
    told = [([session.name, str(rank.index), rank.node_name], rank.timing) for session, rank in ranks if rank.timing]
    times = [
        ([*own, part], seconds)
        for own, timing in told
        for part, seconds in (("compute", timing.compute_s), ("wire", timing.wire_s), ("wait", timing.wait_s))
    ]
    yield _counter("rank_seconds", "Where the time of decode steps went.", [*labels, "part"], times)
    steps = [(own, timing.tokens) for own, timing in told]
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
