"""What words mean that `motley status` shows, in a line each, for who sees them for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def of_nodes(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """About the table of nodes, as the API tells them."""
    lines = ["bandwidth: how fast a node reads its memory; of a link, how fast it carries data"] if nodes else []
    if any(node["memory_reserved_bytes"] for node in nodes):
        lines.append("planned: memory that sessions may take there; used: what their processes have taken at most")
    if any(node["speeds"] for node in nodes):
        lines.append("computes: how fast it works through weights of so many bits (int4: 4, fp32: 32)")
    return lines


def of_sessions(sessions: Sequence[dict[str, Any]]) -> list[str]:
    """About sessions and their tables, as the API tells them: of what is shown, and no more."""
    ranks = [rank for session in sessions for rank in session["ranks"]]
    doing = [session["activity"] for session in sessions if session["activity"]]
    lines = []
    if sessions:
        lines.append("context: tokens (short words, or parts of longer ones) that a text may have, with its answer")
    if any(session["quantisation"] == "stored" for session in sessions):
        lines.append("stored: weights are as in the model's files, or as near to that as can be computed with")
    if ranks:
        lines.append("rank: a node that takes part in every token; share: how much of the weights it has")
    if any(session["hosts"] for session in sessions):
        lines.append("experts: parts of a model of which each token needs only some")
    if any(rank["timing"] for rank in ranks) or any(session["forecast"] for session in sessions):
        lines.append("step: gives each request under way its next token, and more where guesses are right")
        lines.append(
            "compute, wire, wait: milliseconds of a step for computing, for the network, and for waiting for ranks; the"
            " rest of it goes into choosing tokens, and into layers that only other ranks have"
        )
    if doing:
        lines.append("caches: what ranks keep of texts, in blocks; kept: for other texts that begin alike")
    if any(activity["far_tiers"] for activity in doing):
        lines.append(
            "far blocks: what ranks have no memory for; of disks and nodes, what costs a step less is filled first"
        )
    if any(activity["tried_drafts"] for activity in doing):
        lines.append("guesses: of next tokens; those that are right save time, others change nothing")
    return lines
