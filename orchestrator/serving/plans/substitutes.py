"""Requests that take the place of a session's own, whose nodes are not all there, or not wanted. Pure."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.session_request import SessionRequest


def substitutes(
    request: SessionRequest, nodes: list[Node], blocked: Container[str], suspects: Container[str]
) -> Iterator[tuple[SessionRequest, set[str]]]:
    """What to try, the best first: requests, each with ids of nodes that are to take no part. First without those that
    are suspected, and with no nodes but those that the request names, if it names any.

    Args:
        blocked: ids of nodes that cannot take part.
    """
    for allowed in ((), suspects):
        avoid = {node.id for node in nodes if node.id in blocked or (not allowed and node.id in suspects)}
        there = {node.name for node in nodes if node.alive and node.id not in avoid}
        if there & {place.node for place in request.places}:
            yield among(request, there), avoid
        yield anywhere(request, there), avoid
        if not suspects:
            return


def among(request: SessionRequest, there: Collection[str]) -> SessionRequest:
    """A request for those nodes of its own that are there, with the weights that it has for them."""
    kept = [place.node in there for place in request.places]
    own = _of_nodes(request, there)
    nodes = tuple(name for name, keep in zip(request.nodes, kept, strict=True) if keep)
    shares = tuple(share for share, keep in zip(request.shares, kept, strict=False) if keep)
    return replace(own, nodes=nodes, shares=shares if any(shares) else (), stages=_stages_left(request, kept))


def anywhere(request: SessionRequest, there: Collection[str]) -> SessionRequest:
    """A request for any nodes, in any shares, with as few replicas and ranks of a trunk as can be."""
    stages = request.stages if isinstance(request.stages, int) and request.stages <= len(there) else 0
    return replace(_of_nodes(request, there), nodes=(), shares=(), replicas=1, trunk=1, stages=stages)


def _stages_left(request: SessionRequest, kept: Sequence[bool]) -> int | tuple[int, ...]:
    """What is left of stages where some of the ranks are not kept; 0, which is any, where they are no stages any more.

    Args:
        kept: by rank.
    """
    if isinstance(request.stages, int):
        return request.stages if request.stages <= sum(kept) else 0
    ranks = iter(kept)
    left = [sum(islice(ranks, count)) for count in request.stages]
    stages = tuple(count for count in left if count)
    return stages if len(stages) > 1 else 0


def _of_nodes(request: SessionRequest, there: Container[str]) -> SessionRequest:
    """A request without what it has for nodes that are not there."""
    engines = {name: engine for name, engine in request.engines.items() if name in there}
    quantisations = {name: own for name, own in request.quantisations.items() if name in there}
    return replace(request, engines=engines, quantisations=quantisations)
