"""Some ranks of a mesh, with collectives of their own: sums are taken over these alone, beside those of other groups.

A group uses the mesh's links, clocks and patience, and ends with it. Its ranks have numbers of their own, and so have
its calls; no two groups of a rank may share a link. Messages go on between all ranks of the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from .collectives import Communicator
from .errors import UsageError


def group_of(mesh: Communicator, ranks: Sequence[int]) -> Communicator:
    """The collectives of some ranks, in this order; the mesh itself if they are all that it has, in order.

    The same call must be made on each of these ranks, before they exchange anything else. Errors name ranks by their
    numbers in the mesh, which is broken by them as by those of its own calls.

    Raises:
        UsageError: they are no ranks of the mesh, this one is not among them, or one is there twice.
    """
    if [*ranks] == [*range(mesh.size)]:
        return mesh
    if mesh.rank not in ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(mesh.size)):
        raise UsageError(f"rank {mesh.rank} of {mesh.size} can be in no group of ranks {[*ranks]}")
    return _Group(mesh, ranks)


class _Group(Communicator):
    """This rank's end of a group."""

    def __init__(self, mesh: Communicator, ranks: Sequence[int]) -> None:
        others = {place: mesh._links[rank] for place, rank in enumerate(ranks) if rank != mesh.rank}
        super().__init__(ranks.index(mesh.rank), others, wire_format=mesh.wire_format)
        self._mesh = mesh
        self._exchange, self._started = mesh._exchange, mesh._started
        self.stats, self.deadline_s = mesh.stats, mesh.deadline_s
        self.network = mesh.network.among(ranks)

    def close(self) -> None:
        """Nothing: whoever made the mesh closes it."""

    def _check_open(self) -> None:
        self._mesh._check_open()

    def _give_up(self, error: BaseException) -> NoReturn:
        try:
            self._mesh._give_up(error)
        finally:
            self._broken = self._mesh._broken
