"""How fast collectives follow each other between rank processes of this machine, against the cost model and gloo.

Physics: with N ranks an all-reduce of S bytes moves at least 2 S (N-1)/N bytes through every rank; on loopback that is
memory copies, and small sizes cost system calls and the wake-up of the peer (9 us were seen for a bare exchange of
8 KiB between two spinning processes, 31 us when they block). Where ranks outnumber cores the figures are those of
the scheduler. With an emulated network (`motley.bench.meshes.emulator`) the wire rules, as it does in a home.

Method: calls follow each other without a pause, and what is told is the time per call of such a row, its throughput; a
lone call after a pause takes longer. A call lasts from when the last rank has done the one before until the last rank
has done it: all processes of a machine read one clock, and a rank that was early in one call and waits in the next has
not made it slower. Gloo, where torch is installed, gets processes of its own, and every
row's two measurements follow each other at once, so that both meet the same machine.
"""

from __future__ import annotations

import importlib
import importlib.util
import secrets
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.bench.meshes.emulator import LinkSpec, Nic, sleep_exactly
from motley.bench.meshes.rank_processes import TIMEOUT_S, Answer, Question, RankProcesses, clock, percentile_us, serve
from motley.orchestrator.trust.certificates import issue_credentials
from motley.protocol.mesh_pb2 import Credentials
from motley.transport import Communicator, Listener, Membership, Plain, Tls, WireFormat, connect_mesh
from motley.transport.schedules.schedule import Operation, even_parts

SESSION = "bench"
TRIAL_ROUNDS = 20
"""They warm up, and tell how many rounds are worth their time."""
BUDGET_S = 2.0
"""No row takes much longer; slow ones get fewer rounds."""
MIN_ROUNDS = 20

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setup:
    """Which collectives are measured, and between what.

    Attributes:
        sizes: bytes, multiples of 4: of the vector that every rank gives or has in the end, whichever is longer.
        rounds: calls to time for each row, if they fit in `BUDGET_S`.
        tls: links are encrypted.
        link: emulate this network between the ranks.
    """

    ranks: int
    sizes: Sequence[int]
    operations: Sequence[Operation] = (Operation.ALL_REDUCE,)
    rounds: int = 1000
    tls: bool = False
    link: LinkSpec | None = None
    wire_format: WireFormat = WireFormat.FP32


@dataclass(frozen=True)
class Row:
    """Microseconds per call of calls in a row, from the last rank's end of one to the last rank's end of the next.

    `predicted_us` is the cost model's, from the matrices measured when the mesh was built.
    `gloo_p50_us` is None where torch is missing, and on an emulated network, which gloo cannot use.
    """

    op: str
    bytes: int
    ranks: int
    algorithm: str
    p50_us: float
    p99_us: float
    predicted_us: float
    gloo_p50_us: float | None


def measure(setup: Setup, progress: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """Start the rank processes and time every operation with every size. `progress` gets each row as it is done.

    Raises:
        RuntimeError: a rank process ended before it had answered, or did not answer in time.
    """
    rows = []
    with ExitStack() as stack:
        motley = stack.enter_context(RankProcesses(_motley_ranks(setup)))
        motley.exchange_addresses()
        motley.ready()  # nothing else starts while the mesh measures its links
        gloo = None
        if setup.link is None and importlib.util.find_spec("torch") is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="motley-")))
            ranks = [partial(_gloo_rank, rank, setup.ranks, folder / "store") for rank in range(setup.ranks)]
            gloo = stack.enter_context(RankProcesses(ranks))
            gloo.ready()
        for operation in setup.operations:
            for size in setup.sizes:
                answers = _time(motley, operation, size // 4, setup.rounds)
                gloo_us = None
                if gloo is not None:
                    gloo_us = percentile_us(_time(gloo, operation, size // 4, setup.rounds), 50)
                row = Row(
                    op=operation,
                    bytes=size,
                    ranks=setup.ranks,
                    algorithm=answers[0].algorithm,
                    p50_us=percentile_us(answers, 50),
                    p99_us=percentile_us(answers, 99),
                    predicted_us=round(1e6 * answers[0].predicted_s, 1),
                    gloo_p50_us=gloo_us,
                )
                rows.append(row)
                progress(row)
    return rows


def _time(group: RankProcesses, operation: Operation, elements: int, rounds: int) -> list[Answer]:
    trial = group.ask(Question(operation, elements, TRIAL_ROUNDS))
    usual_s = percentile_us(trial, 50) / 1e6
    affordable = int(BUDGET_S / usual_s)
    return group.ask(Question(operation, elements, min(rounds, max(MIN_ROUNDS, affordable))))


# -- Motley ---------------------------------------------------------------------------------------------------------


def _motley_ranks(setup: Setup) -> list[Callable[[Any], None]]:
    secret = secrets.token_bytes(32)
    members = [Membership(SESSION, 0, rank, setup.ranks, secret, bytes(32)) for rank in range(setup.ranks)]
    papers: list[Credentials] | list[None]
    papers = issue_credentials(SESSION, setup.ranks) if setup.tls else [None] * setup.ranks
    return [partial(_motley_rank, setup, *each) for each in zip(members, papers, strict=True)]


def _motley_rank(setup: Setup, member: Membership, papers: Credentials | None, pipe: Any) -> None:
    if setup.link is not None:
        sleep_exactly()
    listener = Listener("127.0.0.1")
    pipe.send(listener.port)
    communicator = connect_mesh(
        listener,
        member,
        pipe.recv(),
        TIMEOUT_S,
        security=Plain() if papers is None else Tls(papers.certificate, papers.key, papers.authority),
        wire_format=setup.wire_format,
        wrap=None if setup.link is None else Nic(setup.link, seed=member.rank).wrap,
    )
    with communicator:
        serve(pipe, partial(_time_motley, communicator))
    listener.close()


def _time_motley(communicator: Communicator, question: Question) -> Answer:
    ranks, rank = communicator.size, communicator.rank
    operation, elements, rounds = question
    schedule, seconds = communicator.forecast(operation, elements)
    whole, batch = np.zeros(elements, np.float32), 1
    parts = [whole[part.start : part.stop] for part in even_parts(elements, ranks)]
    call: Callable[[], object]
    match operation:
        case Operation.ALL_REDUCE:
            call = partial(communicator.all_reduce, whole)
        case Operation.REDUCE_SCATTER:
            call = partial(communicator.reduce_scatter, whole, parts[rank].copy())
        case Operation.ALL_GATHER:
            call = partial(communicator.all_gather, parts[rank].copy(), parts)
        case Operation.BROADCAST:
            call, batch = _in_turn(ranks, lambda root: communicator.broadcast(whole, root)), ranks
        case Operation.ALL_TO_ALL:
            call = partial(communicator.all_to_all, parts, [parts[rank].copy() for _ in range(ranks)])
    return Answer(clock(call, rounds, batch), batch, schedule.algorithm, seconds)


def _in_turn(ranks: int, call: Callable[[int], object]) -> Callable[[], object]:
    """Each rank is the root in turn: a root that is always the same would run ahead, and time only its sends."""
    roots = cycle(range(ranks))
    return lambda: call(next(roots))


# -- gloo -----------------------------------------------------------------------------------------------------------


def _torch() -> tuple[Any, Any]:
    """Torch and its collectives; nothing of Motley depends on them."""
    return importlib.import_module("torch"), importlib.import_module("torch.distributed")


def _gloo_rank(rank: int, ranks: int, store: Path, pipe: Any) -> None:
    torch, distributed = _torch()
    warnings.filterwarnings("ignore", category=FutureWarning)  # names that torch wants to change
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    serve(pipe, partial(_time_gloo, rank, ranks))
    distributed.destroy_process_group()


def _time_gloo(rank: int, ranks: int, question: Question) -> Answer:
    torch, distributed = _torch()
    operation, elements, rounds = question
    share = -(-elements // ranks)  # its parts must be equal
    whole, other, batch = torch.zeros(share * ranks), torch.zeros(share * ranks), 1
    parts, own = [whole[at * share : (at + 1) * share] for at in range(ranks)], torch.zeros(share)
    call: Callable[[], object]
    match operation:
        case Operation.ALL_REDUCE:
            call = partial(distributed.all_reduce, whole[:elements])
        case Operation.REDUCE_SCATTER:
            call = partial(distributed.reduce_scatter, own, parts)
        case Operation.ALL_GATHER:
            call = partial(distributed.all_gather, parts, own)
        case Operation.BROADCAST:
            call, batch = _in_turn(ranks, lambda root: distributed.broadcast(whole[:elements], root)), ranks
        case Operation.ALL_TO_ALL:
            call = partial(distributed.all_to_all_single, other, whole)
    return Answer(clock(call, rounds, batch), batch)
