"""Requests that take the place of a session's own, whose nodes are not all there, or not wanted. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from motley.orchestrator.nodes import Node
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


def among(request: SessionRequest, there: Container[str]) -> SessionRequest:
    """A request for those nodes of its own that are there, with the weights that it has for them."""
    kept = [place.node in there for place in request.places]
    own = _of_nodes(request, there)
    nodes = tuple(name for name, keep in zip(request.nodes, kept, strict=True) if keep)
    shares = tuple(share for share, keep in zip(request.shares, kept, strict=False) if keep)
    return replace(own, nodes=nodes, shares=shares if any(shares) else ())


def anywhere(request: SessionRequest, there: Container[str]) -> SessionRequest:
    """A request for any nodes, in any shares, with as few replicas and ranks of a trunk as can be."""
    return replace(_of_nodes(request, there), nodes=(), shares=(), replicas=1, trunk=1)


def _of_nodes(request: SessionRequest, there: Container[str]) -> SessionRequest:
    """A request without what it has for nodes that are not there."""
    engines = {name: engine for name, engine in request.engines.items() if name in there}
    quantisations = {name: own for name, own in request.quantisations.items() if name in there}
    return replace(request, engines=engines, quantisations=quantisations)
