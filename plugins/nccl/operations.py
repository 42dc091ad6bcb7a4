"""NCCL's operations in terms of Motley's: from a call to what it reads, what it writes, and what happens between.

Pure but for the communicator. Buffers are flat arrays; sums and averages of floats are taken in FP32 (float64: in
float64) and in rank order by the transport. Integers, products, minima and maxima, which the transport does not know,
are collected from all ranks and reduced here, in rank order too: every rank holds the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from motley.transport.collectives import Sums

from .codes import DATA_TYPES, NcclError, Reduction, Result
from .memory import Array, Region, Step

_TRANSPORT_SUMS = ("float32", "float64", "float16", "bfloat16")
_FOLDS: dict[Reduction, Callable[..., object]] = {
    Reduction.SUM: np.add,
    Reduction.AVG: np.add,
    Reduction.PROD: np.multiply,
    Reduction.MAX: np.maximum,
    Reduction.MIN: np.minimum,
}


class Kind(IntEnum):
    """What a call asks for; the numbers are those of library.c."""

    ALL_REDUCE = 0
    REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    ALL_TO_ALL = 5
    GATHER = 6
    SCATTER = 7
    SEND = 8
    RECV = 9
    INIT = 10
    SPLIT = 11


@dataclass(frozen=True)
class Call:
    """One call of the NCCL API that passed library.c's checks. Handles and addresses are integers, NULL is 0."""

    kind: Kind
    dtype: np.dtype[Any]
    op: Reduction
    peer: int
    """Or the root, or the color."""
    count: int
    send: int
    recv: int
    stream: int
    comm: int
    child: int
    key: int

    @property
    def nbytes(self) -> int:
        """How many bytes `count` elements have."""
        return self.count * self.dtype.itemsize


class Ranks(Sums, Protocol):
    """What all operations need of a `motley.transport.Communicator`; its methods are described there."""

    def reduce_scatter(self, data: Array, out: Array, lengths: Sequence[int] | None = None) -> None: ...
    def all_gather(self, local: Array, out: Sequence[Array]) -> None: ...
    def broadcast(self, buffer: Array, root: int) -> None: ...
    def all_to_all(self, data: Sequence[Array], out: Sequence[Array]) -> None: ...


def collective(call: Call, ranks: Ranks) -> tuple[list[Region], list[Region], Step]:
    """One rank's part in a collective call: what it reads, what it writes, and the step from one to the other.

    The step raises `TransportError` as the communicator does.
    """
    size, rank, root, nbytes = ranks.size, ranks.rank, call.peer, call.nbytes
    is_root = rank == root
    row = nbytes * size
    reads, writes = {
        Kind.ALL_REDUCE: (nbytes, nbytes),
        Kind.REDUCE: (nbytes, is_root * nbytes),
        Kind.REDUCE_SCATTER: (row, nbytes),
        Kind.ALL_GATHER: (nbytes, row),
        Kind.BROADCAST: (is_root * nbytes, nbytes),
        Kind.ALL_TO_ALL: (row, row),
        Kind.GATHER: (nbytes, is_root * row),
        Kind.SCATTER: (is_root * row, nbytes),
    }[call.kind]

    def step(given: Sequence[Array], taken: Sequence[Array]) -> None:
        nothing = np.empty(0, np.uint8)
        source, target = given[0] if given else nothing, taken[0] if taken else nothing
        typed = source.view(call.dtype), target.view(call.dtype)
        match call.kind:
            case Kind.ALL_REDUCE:
                reduce(ranks, *typed, call.op, None)
            case Kind.REDUCE:
                reduce(ranks, *typed, call.op, [call.count * (each == root) for each in range(size)])
            case Kind.REDUCE_SCATTER:
                reduce(ranks, *typed, call.op, [call.count] * size)
            case Kind.ALL_GATHER:
                ranks.all_gather(source, np.split(target, size))
            case Kind.BROADCAST:
                if is_root:
                    np.copyto(target, source)
                ranks.broadcast(target, root)
            case Kind.ALL_TO_ALL:
                ranks.all_to_all(np.split(source, size), np.split(target, size))
            case Kind.GATHER:
                out = np.split(target, size) if is_root else [nothing] * size
                ranks.all_to_all([source if each == root else nothing for each in range(size)], out)
            case Kind.SCATTER:
                data = np.split(source, size) if is_root else [nothing] * size
                ranks.all_to_all(data, [target if each == root else nothing for each in range(size)])
            case _:
                raise AssertionError(call.kind)

    return (
        [Region(call.send, reads)] if reads else [],
        [Region(call.recv, writes)] if writes else [],
        step,
    )


def reduce(ranks: Ranks, given: Array, taken: Array, op: Reduction, lengths: Sequence[int] | None) -> None:
    """Reduce `given` over all ranks; `taken` gets all of it (`lengths` None) or this rank's part.

    Args:
        taken: may be `given`, or this rank's part of it.
        lengths: the elements of each rank's part, which follow each other.
    """
    dtype = given.dtype
    wide = np.dtype(np.float32) if _is_narrow_float(dtype) else dtype
    if op is Reduction.SUM and dtype.name in _TRANSPORT_SUMS:
        _sum(ranks, given, taken, lengths)
    elif op in (Reduction.SUM, Reduction.AVG) and wide.kind == "f":
        total = np.empty(taken.size, wide)
        _sum(ranks, given.astype(wide), total, lengths)
        _store(total, taken, op, ranks.size)
    else:
        terms = _terms(ranks, given, lengths)
        total = terms[0].astype(wide)
        with np.errstate(all="ignore"):  # what does not fit wraps or becomes infinite, as on a GPU
            for term in terms[1:]:
                _FOLDS[op](total, term.astype(wide), out=total)
        _store(total, taken, op, ranks.size)


def _is_narrow_float(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize < 4 and (dtype.kind == "f" or dtype in (ml_dtypes.bfloat16, *DATA_TYPES[-2:]))


def _sum(ranks: Ranks, given: Array, taken: Array, lengths: Sequence[int] | None) -> None:
    if lengths is None:
        np.copyto(taken, given)
        ranks.all_reduce(taken)
    else:
        ranks.reduce_scatter(given, taken, lengths)


def _terms(ranks: Ranks, given: Array, lengths: Sequence[int] | None) -> list[Array]:
    """Every rank's values for what this rank gets, by rank. They travel as bytes: no type is foreign to the wire."""
    mine = given.size if lengths is None else lengths[ranks.rank]
    terms = [np.empty(mine, given.dtype) for _ in range(ranks.size)]
    out = [term.view(np.uint8) for term in terms]
    if lengths is None:
        ranks.all_gather(given.view(np.uint8), out)
    else:
        parts = np.split(given, np.cumsum(lengths[:-1]))
        ranks.all_to_all([part.view(np.uint8) for part in parts], out)
    return terms


def _store(total: Array, taken: Array, op: Reduction, size: int) -> None:
    """Write a reduction in the caller's type; an average is divided here, of integers towards zero."""
    with np.errstate(all="ignore"):
        if op is Reduction.AVG:
            total = total / total.dtype.type(size) if total.dtype.kind == "f" else _quotient(total, size)
        taken[:] = total.astype(taken.dtype)


def _quotient(total: Array, size: int) -> Array:
    divisor = total.dtype.type(size)
    quotient: Array = (total - np.fmod(total, divisor)) // divisor
    return quotient


class Messages:
    """Sends and receives of one communicator, over the transport's messages.

    A send is over when its receiver has said so: it returns neither before its bytes have left, nor with a message
    under way that a later collective would meet. Those of a group are under way together, so that ranks that send to
    each other in a group do not wait for each other. Each message of the transport begins with a byte that tells what
    it is: what comes before its time (a receipt, or data that is wanted later) is kept.
    """

    CHUNK = 32 << 20
    """Bytes of one message of the transport at most; longer buffers take several."""
    _DATA, _RECEIPT = b"D", b"R"

    def __init__(self, ranks: MessageRanks) -> None:
        self._ranks = ranks
        self._early: dict[tuple[int, bytes], list[bytes]] = {}

    def exchange(self, sends: Sequence[tuple[int, Array]], receives: Sequence[tuple[int, Array]]) -> None:
        """Send and receive ``(peer, uint8[nbytes])`` at once, those of each pair of ranks in order.

        Raises:
            NcclError: a message is not as long as its receiver expects, or this rank sends itself what it does not
                receive in the same group.
            TransportError: as the transport's messages.
        """
        rank = self._ranks.rank
        to_self = [data for peer, data in sends if peer == rank]
        from_self = [out for peer, out in receives if peer == rank]
        if [data.size for data in to_self] != [out.size for out in from_self]:
            why = f"rank {rank} sends itself {len(to_self)} messages and receives {len(from_self)}"
            raise NcclError(Result.INVALID_USAGE, f"{why}: they must be in one group and of equal sizes")
        for data, out in zip([data.copy() for data in to_self], from_self, strict=True):
            out[:] = data
        for peer, data in sends:
            if peer != rank:
                for start in range(0, data.size, self.CHUNK):
                    self._ranks.send(self._DATA + data[start : start + self.CHUNK].tobytes(), peer)
        for peer, out in receives:
            if peer != rank:
                for start in range(0, out.size, self.CHUNK):
                    self._fill(out[start : start + self.CHUNK], peer)
                self._ranks.send(self._RECEIPT, peer)
        for peer, _ in sends:
            if peer != rank:
                self._next(peer, self._RECEIPT)

    def _fill(self, out: Array, peer: int) -> None:
        data = self._next(peer, self._DATA)
        if len(data) != out.size:
            why = f"rank {peer} sent {len(data)} bytes where rank {self._ranks.rank} receives {out.size}"
            raise NcclError(Result.INVALID_USAGE, f"{why}; both ends must give the same count and type")
        out[:] = np.frombuffer(data, np.uint8)

    def _next(self, peer: int, kind: bytes) -> bytes:
        while not self._early.get((peer, kind)):
            message = self._ranks.recv(peer, self._ranks.deadline_s)
            self._early.setdefault((peer, message[:1]), []).append(message[1:])
        return self._early[peer, kind].pop(0)


class MessageRanks(Protocol):
    """What `Messages` needs of a `motley.transport.Communicator`; its methods are described there."""

    deadline_s: float

    @property
    def rank(self) -> int: ...
    def send(self, data: bytes, to: int) -> None: ...
    def recv(self, source: int, deadline_s: float | None) -> bytes: ...
