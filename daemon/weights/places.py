"""Where a model's tensors may lie in files: under their own names, or as rows of larger tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Part:
    """Where a matrix (or vector) may lie in a checkpoint that has no tensor of its name: rows of a larger one.

    Attributes:
        tensor: the larger one; ``X[3]`` is matrix 3 of the three-dimensional tensor X, or row 3 of the matrix X.
        shape: of it, ``(rows, columns)``, or ``(columns, rows)`` where it is transposed; ``(elements,)`` for a vector.
        start, step: the first row, and how far it is to the next: 2 where two matrices' rows alternate.
        transposed: the tensor has columns where the matrix has rows.
    """

    tensor: str
    shape: tuple[int, ...]
    start: int = 0
    step: int = 1
    transposed: bool = False

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
        parts = tuple(replace(part, tensor=numbered(part.tensor, expert)) for part in self.parts)
        return Tensor(numbered(self.name, expert), self.shape, parts)


def numbered(name: str, expert: int | None) -> str:
    """A name with the number of an expert in its place, which is ``{expert}``; None: the name as it is."""
    return name if expert is None else name.replace("{expert}", str(expert))
