"""Where a model's tensors may lie in files: under their own names, or as rows of larger tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from motley.daemon.weights.spec import Piece

FLAT, WHOLE = "[:, 0]", "[:]"
"""What follows the name of a tensor [N, 1, M] that is meant as a matrix [N, M], and of a matrix, or a tensor with one
dimension that is not 1, that is meant as the vector of its elements."""


@dataclass(frozen=True)
class Part:
    """Where a matrix (or vector) may lie in a checkpoint that has no tensor of its name: rows of a larger one.

    Attributes:
        tensor: the larger one; ``X[3]`` is matrix 3 of the three-dimensional tensor X, or row 3 of the matrix X.
        shape: of it, ``(rows, columns)``, or ``(columns, rows)`` where it is transposed; ``(elements,)`` for a vector.
        start, step: the first row, and how far it is to the next: 2 where two matrices' rows alternate.
        transposed: the tensor has columns where the matrix has rows.
        heads: how many rows of the larger tensor each head has, where the matrix is some rows of each; 0: it is not of
            heads. Transposed, a head's rows in the tensor are its columns in the matrix.
        of_head: which rows of each head, counted from its first, in the matrix's order; a single range if transposed.
    """

    tensor: str
    shape: tuple[int, ...]
    start: int = 0
    step: int = 1
    transposed: bool = False
    heads: int = 0
    of_head: tuple[range, ...] = ()

    def within(self, tensor: str) -> Part:
        """The same of another tensor; `dataclasses.replace` takes twice as long, and some models have 100 000."""
        return Part(tensor, self.shape, self.start, self.step, self.transposed, self.heads, self.of_head)

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """A piece of the matrix as pieces of the larger tensor; one below the other, each transposed if the part is."""
        if not self.heads:
            rows, columns = self.rows(piece.rows), piece.columns
            if self.transposed:
                assert columns is not None
                rows, columns = columns, rows
            yield Piece(self.tensor, rows, columns)
            return
        assert piece.rows, "some rows are read"
        assert piece.rows.step == 1
        each = self.shape[1] if self.transposed else sum(map(len, self.of_head))
        for head in range(piece.rows.start // each, -(-piece.rows.stop // each)):
            first = max(piece.rows.start - head * each, 0)
            own = range(first, min(piece.rows.stop - head * each, each))
            yield from self._of_head(self.start + head * self.heads, own, piece.columns)

    def _of_head(self, begin: int, own: range, columns: range | None) -> Iterator[Piece]:
        """Some of a head's rows in the matrix; in the larger tensor the head begins at row `begin`."""
        if self.transposed:
            assert columns is not None
            (inner,) = self.of_head
            yield Piece(self.tensor, _shifted(inner[columns.start : columns.stop], begin), own)
            return
        for stretch in self.of_head:
            some = stretch[max(own.start, 0) : max(own.stop, 0)]
            if some:
                yield Piece(self.tensor, _shifted(some, begin), columns)
            own = range(own.start - len(stretch), own.stop - len(stretch))

    def rows(self, own: range) -> range:
        """Which rows of the larger tensor (columns, where it is transposed) some rows of the matrix are."""
        if not own:
            return range(0)
        step = self.step * own.step
        first = self.start + own.start * self.step
        return range(first, first + (len(own) - 1) * step + 1, step)


@dataclass(frozen=True)
class Tensor:
    """A tensor that a model wants: its name, its shape, and in which parts it may lie if there is none of the name."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def of(self, expert: int | None) -> Tensor:
        """The same tensor of one expert."""
        if expert is None:
            return self
        parts = tuple(part.within(numbered(part.tensor, expert)) for part in self.parts)
        return Tensor(numbered(self.name, expert), self.shape, parts)


def _shifted(rows: range, by: int) -> range:
    return range(rows[0] + by, rows[-1] + by + 1, rows.step) if rows else range(0)


def numbered(name: str, expert: int | None) -> str:
    """A name with the number of an expert in its place, which is ``{expert}``; None: the name as it is."""
    return name if expert is None else name.replace("{expert}", str(expert))
