"""How much the KV caches of a session are to hold: as its request says, or one sequence of a usual length."""

from __future__ import annotations

from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.serving.errors import refusal
from motley.orchestrator.session_request import SessionRequest
from motley.protocol.mesh_pb2 import ModelProfile

DEFAULT_CONTEXT = 4096
"""Tokens, or what the model allows if that is less."""


def caches_of(request: SessionRequest, profile: ModelProfile) -> Caches:
    """What the caches of a session are to hold: one sequence of full length, if the request does not say.

    Raises:
        ServingError: the model does not allow a context as long as is asked for, or the caches are too small for it.
    """
    if request.context > profile.context_length:
        raise refusal(
            "invalid_request",
            f"a context of {request.context} tokens was asked for; {profile.name} allows {profile.context_length}",
            "context",
        )
    context = request.context or min(DEFAULT_CONTEXT, profile.context_length)
    tokens = request.cache_tokens or context
    on_disk, on_nodes = request.cache_disk_tokens, request.cache_node_tokens
    if tokens + on_disk + on_nodes < context:
        besides = f" and {on_disk} on disk" if on_disk else ""
        besides += f" and {on_nodes} on other nodes" if on_nodes else ""
        raise refusal(
            "invalid_request",
            f"caches of {tokens} tokens{besides} were asked for; one sequence may have {context} (the context): ask for"
            " as many or more, for more on disk or on other nodes, or for a shorter context",
            "cache_tokens",
        )
    if profile.state_bytes and request.keep_prefixes:
        raise refusal(
            "invalid_request",
            f"{profile.name} has layers with recurrent states, of which no prefixes can be kept; start the session"
            " without keeping them",
            "keep_prefixes",
        )
    return Caches(context, tokens, on_disk, on_nodes, request.sequences)
