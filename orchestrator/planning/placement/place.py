"""Which nodes hold which experts of a mixture-of-experts model, and how to get there from where they are now.

Words. An *expert* is one feed-forward network of one layer. A *host* is a node with memory for whole experts. A
*replica* is one expert's weights on one host. A *zone* is what fails together: a room, a fuse, a line. The *load* of an
expert is the rows it is sent per token: the chance that the router picks it.

Cost model. A row sent to a host is back after its *answer time*; decoding reads an expert's weights once per row:

    answer[e, h] = latency_h + row_bytes / bandwidth_h + bytes_e / speed_h

The trunk sends a row to the replica that answers soonest, by queue and link, so the replicas of an expert share its
load in inverse proportion to their answer times, and all are occupied by it for equally long:

    seconds[e]  = load_e / sum_{h holds e} 1 / answer[e, h]
    seconds[h]  = sum_{e on h} seconds[e]
    cost        = max_h seconds[h]

The cost bounds what concurrent requests get together: one token per `cost` seconds. A token alone also waits for the
slowest host of every layer, so layers are dealt out one by one, and each uses only its part of every host's memory.

1.  Layer by layer, the busiest expert first, the asked-for replicas go where they are done soonest (longest processing
    time first: Graham 1969), in different zones while that is possible. Where no host has room, room is made by moving
    others along a shortest chain. With experts of one size this finds a place whenever there is one; with different
    sizes (bin packing, NP-hard) a refusal may come although the last bytes could have been used.
2.  If more replicas are allowed, the expert with the highest load per replica gets the next one while there is room;
    of these the longest sequence is kept that costs no more than `SPARE_COST` times what it costs without.
3.  A local search moves and swaps replicas of the busiest host while that makes it less busy; from scratch, where
    no single step helps, it deals a few experts anew by branch and bound.

With a previous placement the same steps begin from what the hosts already hold, and a replica that has a host stays
there, but for a bounded number of moves (see `place_experts`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from motley.orchestrator.planning.placement.balance import improve
from motley.orchestrator.planning.placement.board import Board
from motley.orchestrator.planning.placement.replicas import pack, place_asked, place_spare, restore
from motley.orchestrator.planning.placement.terms import (
    Expert,
    ExpertKey,
    Host,
    Placement,
    PlacementError,
    expert_name,
    require,
)
from motley.protocol.wording import counted


def place_experts(
    experts: Iterable[Expert],
    hosts: Iterable[Host],
    *,
    replicas: int = 1,
    most: int | None = None,
    row_bytes: int = 0,
    previous: Mapping[str, Collection[ExpertKey]] | None = None,
    moves: int | None = None,
) -> Placement:
    """Give every expert its hosts. The same input, in any order, gives the same placement.

    Args:
        replicas: of every expert, on different hosts, at least 1.
        most: replicas of an expert if there is memory to spare; None: no more than `replicas`.
        row_bytes: of one row on the wire, there and back.
        previous: what every host holds now (`Placement.held`). Those not among `hosts` have left; hosts that are not
            in it have joined.
        moves: fetches for the sake of balance and spare replicas, at most; only with `previous`. None: as many as
            replicas were lost with hosts that left, and the fair share (by speed) of those that joined, less the
            fetches that the asked-for replicas need. So after one node left, no more is fetched than it held, and
            after one joined, no more than its fair share, unless room must be made for replicas asked for.

    Raises:
        PlacementError: the asked-for replicas do not fit.
        PlacementInputError: a nonsensical number, or a name or an expert that is there twice.
    """
    ordered = sorted(experts, key=lambda expert: expert.key)
    offers = sorted(hosts, key=lambda host: host.name)
    most = replicas if most is None else most
    require(len(ordered) > 0, "there are no experts to place")
    require(replicas >= 1, f"{replicas} replicas asked for; at least 1 is needed")
    require(most >= replicas, f"at most {most} replicas, but {replicas} are asked for")
    require(row_bytes >= 0, f"row_bytes {row_bytes} is negative")
    require(moves is None or moves >= 0, f"moves {moves} is negative")
    require(moves is None or previous is not None, "moves are bounded only from a previous placement")
    _refuse_twice([expert_name(expert.key) for expert in ordered])
    _refuse_twice([f"host {host.name}" for host in offers])
    if len(offers) < replicas:
        raise PlacementError(
            f"{counted(replicas, 'replica')} of every expert need {counted(replicas, 'different node')};"
            f" with room for experts {_there(offers)}, {replicas - len(offers)} missing"
        )
    board = Board(ordered, offers, row_bytes, replicas)
    budget = math.inf
    if previous is not None:
        caused = restore(board, previous, replicas, most)
        place_asked(board, replicas)
        budget = max(0, caused - board.fetches) if moves is None else moves
    else:
        try:
            place_asked(board, replicas)
        except PlacementError:
            if len({expert.bytes for expert in ordered}) == 1:  # then no other order finds more
                raise
            board = Board(ordered, offers, row_bytes, replicas)
            pack(board, replicas)
    if most > replicas:
        if previous is None:
            improve(board, budget)  # what spare replicas may cost is a part of this
        budget -= place_spare(board, most, budget)
    improve(board, budget)
    return board.placement()


def _refuse_twice(names: Sequence[str]) -> None:
    for one, other in pairwise(names):
        require(one != other, f"{one} is there twice")


def _there(hosts: Sequence[Host]) -> str:
    if not hosts:
        return "there is none"
    return f"there {'are' if len(hosts) > 1 else 'is'} {len(hosts)} ({', '.join(host.name for host in hosts)})"
