"""How a model's experts are laid out over the nodes of a session.

*Sliced*: every rank has a slice of every expert, as of every other matrix. Nothing but sums travels, and every node
works on every token; an expert can be larger than any node.

*Parallel*: a trunk of few ranks (attention, norms, routers, head) sends each row to the hosts of the experts that the
row has chosen. Most nodes are idle for a token and free for others, and an expert that is on two nodes outlives one.
Where one is larger than any node, a few nodes are a host together (`motley.orchestrator.planning.experts.groups`).

Which of them is chosen by itself is a rule, not a forecast. A token alone costs two sums per layer in the one and a
round trip per layer in the other, which is about the same. What is left are bytes over speeds, by which sliced would
always win, as more nodes read; the one measurement of both (`bench/LOG.md`, 2026-11-20) says the contrary. And only in
parallel does a node's loss not end the session.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from motley.orchestrator.session_request import SessionRequest
from motley.protocol.mesh_pb2 import ModelProfile


class LayoutError(Exception):
    """The layout asked for is not possible with this model or engine; the message says why."""


def is_parallel(
    request: SessionRequest, profile: ModelProfile, engines: Mapping[str, Collection[str]], *, on_gpus: bool = False
) -> bool:
    """Whether the experts of a session are parallel, else they are sliced.

    ``auto`` means: wherever that is possible on more than one node. It is sliced on one node, where engines have no
    experts of their own, on GPUs that were chosen (their engines have no experts elsewhere), in stages, with shares by
    hand or nodes that hold it in their own way (both are of slices: the replicas of a whole expert must have the same
    bits), and if the session is exact: the layouts round differently, and bits that are the same on any number of nodes
    include those of one.

    Args:
        engines: of every node that takes part, by its name, the engines that compute single experts, and trunks whose
            experts are elsewhere.
        on_gpus: a rank would be on a GPU, as the request leaves that open.

    Raises:
        LayoutError: parallel experts were asked for, and are not possible.
    """
    if not profile.expert_layers:
        if request.wants_parallel:
            raise LayoutError(
                f"{profile.name} ({profile.family}) has no experts that could be on nodes of their own; leave out"
                " experts, replicas and trunk"
            )
        return False
    able = sum(request.expert_engine in has for has in engines.values())
    if request.wants_parallel and not able:
        others = " or ".join(map(repr, sorted(set[str]().union(*engines.values()))))
        instead = f"engine {others}, or " if others else ""
        raise LayoutError(
            f"engine {request.expert_engine!r} cannot have experts elsewhere on {', '.join(engines)}; use"
            f" {instead}experts 'sliced'"
        )
    if request.experts != "auto" or request.wants_parallel:
        return request.wants_parallel
    by_hand = bool(request.shares or request.named or request.wants_stages)
    return able > 1 and not by_hand and not request.exact and not on_gpus
