"""The model that a session was planned for: its files found, checked, opened, and shares of its weights made of them.

A rank takes one share of it, an expert host one for every expert.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from motley.daemon.lending.borrower import Borrower
from motley.daemon.lending.hub_mirror import HubMirror
from motley.daemon.loading.fetching import LoadError, found
from motley.daemon.loading.progress import Progress
from motley.daemon.models.cutting.holding import for_engine
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.files import OpenModel, open_model
from motley.daemon.weights.cache import Label, ShareCache, share_key
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Placed
from motley.daemon.weights.stored import Source
from motley.protocol import mesh_pb2 as pb

_ELEMENTS = 8 << 20
"""Of a matrix that is read through, so many at a time."""


@dataclass(frozen=True)
class PlannedModel:
    """The model that a session was planned for, opened on this machine.

    Attributes:
        opened: its config, weights, and how they are stored.
        spec: as the session was asked for.
        quantisation: how matrices are held here, as the engine takes them
            (`motley.daemon.models.cutting.holding.for_engine`).
        path: of its folder or GGUF file.
        fingerprint, stamp: of its files; the one reads samples of them, the other sees files that were edited.
        beside: other quantisations that ranks of the session may hold it in.
        borrower: brings its bytes here, of which another node has the files, or which was pulled in part; None: they
            are here.
        elements: of its weights, without the embeddings, which no share holds unless they are the head too.
    """

    opened: OpenModel
    spec: pb.ModelSpec
    quantisation: str
    path: Path
    fingerprint: str
    stamp: str
    beside: Collection[str]
    elements: int
    borrower: Borrower | HubMirror | None

    def share(
        self, cache: ShareCache, weights: Sequence[Placed], size: int, progress: Progress, expert: str = ""
    ) -> AbstractContextManager[Path]:
        """A share file for as long as the context lasts, from the cache if it is there, else written.

        Args:
            weights: what is in it, and where.
            size: its bytes in all.
            progress: told how far the reading or writing is.
            expert: what people call the expert whose weights they are; empty: they are a rank's.

        Raises:
            CheckpointError: the files changed since they were opened.
            Exception: what `ShareCache.hold` and `write_share` raise.
        """

        def write(file: Path) -> None:
            write_share(self.opened.source, weights, size, file, progress)
            if stamp_of(self.opened.source, self.borrower) != self.stamp:
                raise CheckpointError(f"{self.path}: the model changed while it was read; start again")

        key = share_key(self.fingerprint, self.stamp, weights, size)
        elements = sum(prod(place.weight.shape) for place in weights)
        label = Label(self.spec.source, self.quantisation, self.spec.block, elements / self.elements, expert)
        return cache.hold(key, label, size, write, progress)

    def end_loan(self, matrices: Sequence[str], progress: Progress) -> None:
        """Have no more lent of the model than what is here, once all of some matrices are, whose rows are read later.

        Args:
            matrices: their tensors.
            progress: told how far each is.

        Raises:
            CheckpointError, LendingError: the rest of a matrix does not come.
        """
        if self.borrower is None:
            return
        for matrix in matrices:
            read_through(self.opened.source, matrix, progress)
        self.borrower.end()


def stamp_of(source: Source, borrower: Borrower | HubMirror | None) -> str:
    """The stamp of a model's files, as `TensorFiles.stamp`; of those that come from elsewhere, with the times that they
    have there, as other workers of this machine put stretches into the same files meanwhile."""
    stamp = source.stamp()
    if borrower is None:
        return stamp
    there = borrower.modified
    return json.dumps([[name, size, there.get(name, modified)] for name, size, modified in json.loads(stamp)])


def read_through(source: Source, matrix: str, progress: Progress) -> None:
    """Read all rows of a matrix, so that they are here.

    Args:
        progress: told how far it is.

    Raises:
        CheckpointError, LendingError: it does not come.
    """
    rows, columns = source.shape(matrix)
    at_once = max(1, _ELEMENTS // columns)
    for first in range(0, rows, at_once):
        source.rows(matrix, range(first, min(rows, first + at_once)))
        progress(min(rows, first + at_once) * columns, rows * columns)


@contextlib.contextmanager
def open_planned(
    assignment: pb.Assignment, models: Path | None, cache: ShareCache, progress: Progress, quantisation: str = ""
) -> Iterator[PlannedModel]:
    """Open the model of an assignment, downloading it if need be, or borrowing it from the node that the assignment
    names.

    Args:
        models: the folder in which model names are looked up, if there is one.
        cache: what is borrowed is kept beside the shares.
        progress: told how far a download is.
        quantisation: in which it is to be held here; empty: that of the session.

    Raises:
        LoadError: its files differ from those that were planned for, or do not come.
        Exception: what `found`, `Borrower` and `open_model` raise.
    """
    with contextlib.ExitStack() as stack:
        borrower: Borrower | HubMirror | None
        if assignment.HasField("loan"):
            borrower = stack.enter_context(Borrower(assignment.loan, cache.folder, cache.limit))
            path = borrower.place
        else:
            path, borrower = stack.enter_context(found(assignment.model.source, models, cache, progress))
        bring = borrower.bring if borrower else None
        opened = stack.enter_context(open_model(path, bring, ahead=assignment.model.ahead))
        stamp, fingerprint = stamp_of(opened.source, borrower), opened.source.fingerprint()
        if fingerprint != assignment.fingerprint:
            raise LoadError(
                f"{path}: these files are not the ones this session was planned for (fingerprint "
                f"{fingerprint[:12]}, planned {assignment.fingerprint[:12]}); give every node the same model"
            )
        shapes = expected_shapes(opened.model)
        table = "" if opened.model.tied else opened.model.embedding.name
        elements = sum(prod(shape) for name, shape in shapes.items() if name != table)
        model = assignment.model
        asked = quantisation or model.quantisation
        held, beside = for_engine(asked, assignment.engine), {model.quantisation, *model.beside} - {asked}
        yield PlannedModel(opened, model, held, path, fingerprint, stamp, beside, elements, borrower)
