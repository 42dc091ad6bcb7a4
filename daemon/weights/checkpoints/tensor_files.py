"""What all formats of checkpoints have in common: a table of the tensors in some files, and reading pieces of them.

A format opens its files, fills the table and says what the bytes of a row mean; see `TensorFiles`.

Files are read, not mapped: pages of a mapping count as this process's memory once they are touched (and their
neighbours with them), and a file that shrinks under a mapping kills the process, where a read raises an error.
"""

from __future__ import annotations

import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError, expect_each
from motley.daemon.weights.closing import Closing
from motley.daemon.weights.git_lfs import pointer_told
from motley.daemon.weights.places import FLAT, WHOLE
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import F32, U8, Codes, Format

_SCRATCH = 1 << 20
"""Bytes read at a time (or one row, if that is longer)."""
_GAP = 1 << 14
"""Bytes between two wanted ones that cost no more to read than another call does."""
_SAMPLE = 64
"""Bytes of each tensor that enter a fingerprint."""
Bring = Callable[[Path, Sequence[tuple[int, int]]], None]
"""Makes sure that stretches of a file, (offset, length) in bytes, are on this machine, before they are read: where the
files are another machine's."""

_INNER = re.compile(r"(?P<outer>.+)\[(?P<number>\d+)\]", re.ASCII)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        dtype: as the format spells it, ``"F16"``.
        offset: of the first byte, from the start of the file.
        size: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int

    @property
    def row_bytes(self) -> int:
        """How many bytes lie between the beginnings of two rows; a vector is one row."""
        return self.size if len(self.shape) < 2 else self.size // max(1, self.shape[0])


_PARTS = (
    *("weight", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
    *("weight_zero_point", "weight_shape", "weight.absmax", "weight.quant_map"),
)
"""What the tensors of a matrix are called in its module, in all the ways to pack it."""


class TensorFiles(Closing):
    """The tensors in some files (`motley.daemon.weights.stored.Source`), each opened by its path and, where not all
    of its bytes are here, what brings them.

    A tensor X of three dimensions is there as matrices too, and a matrix X as vectors: ``X[3]`` is the third of them,
    counted from 0. One of shape [N, 1, M] is there as a matrix besides: ``X[:, 0]``, and one of shape [1, N, 1] as a
    vector: ``X[:]``. Rows and columns of pieces may have steps.

    Not thread-safe: reads share a scratch buffer and the files' positions.

    Attributes:
        path: the folder or file of the checkpoint, for messages.
        readable: the types that a weight may have. Tensors of others may stand in a file as long as nobody asks for
            them.
        naming: what a message adds that a tensor is absent.

    Raises:
        CheckpointError: a file is absent, cannot be read or is not what its header says.
    """

    readable: ClassVar[Collection[str]]
    naming: ClassVar[str] = ""

    def __init__(self, path: Path, bring: Bring | None = None) -> None:
        self.path = path
        self._bring = bring
        self._files: dict[Path, FileIO] = {}
        self._sizes: dict[Path, int] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._within: dict[str, TensorInfo] = {}
        """Tensors that are there within others, as far as somebody has asked for them."""
        self._scratch = bytearray(_SCRATCH)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    # -- what a format says -------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self) -> None:
        """Open the files with `_add_file`, and put their tensors in the table."""

    @abstractmethod
    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        """f32[rows, columns] of a readable matrix, which holds them; a vector is one row."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Identify the model: equal on two machines whose files are equal.

        Raises:
            CheckpointError: a file cannot be read.
        """

    def format(self, name: str) -> Format:
        """How a weight is stored: as floats, unless a format says otherwise.

        Raises:
            CheckpointError: as `tensor`.
        """
        return Format.floats(self.tensor(name).dtype)

    def codes(self, piece: Piece) -> Codes:
        """A piece of a quantised matrix, exactly as it is stored; its columns are whole blocks of its format.

        Raises:
            CheckpointError: as `read`.
        """
        raise AssertionError(f"{piece.tensor} is stored as floats")

    def transposed(self, name: str) -> bool:
        """Whether a matrix lies with columns for rows, so that few rows at a time are slow to read."""
        return False

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a readable tensor.

        Raises:
            CheckpointError: as `tensor`.
        """
        return self.tensor(name).shape

    def parts(self, name: str) -> Collection[str]:
        """Which of `names` a tensor is read from: a packed one from several, not all of which may be there."""
        return (name,)

    def adds_nothing(self, name: str) -> bool:
        """Whether a tensor that no model has asked for would change nothing.

        Raises:
            CheckpointError: its file cannot be read (any more).
        """
        return False

    # -- what there is ------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def names(self) -> list[str]:
        """The tensors there are, whole ones alone."""
        return list(self._tensors)

    def tensor(self, name: str, dtypes: Collection[str] = ()) -> TensorInfo:
        """Find a tensor.

        Raises:
            CheckpointError: it is absent or of none of these types, by default those that weights can have.
        """
        info, allowed = self._find(name), dtypes or self.readable
        if info is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is absent{self.naming}{self._beside(name)}")
        if info.dtype not in allowed:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has dtype {info.dtype}; expected one of {', '.join(allowed)}"
                f"{self._beside(name)}"
            )
        return info

    def _beside(self, name: str) -> str:
        """What a message adds of other tensors of the same matrix, of which a packed one has several."""
        module = name.rpartition(".")[0].removesuffix(".weight")
        found = [each for ending in _PARTS if (each := f"{module}.{ending}") in self._tensors and each != name]
        return f"; beside it there are {', '.join(found)}" if found else ""

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make sure that these tensors are there, readable, and of these shapes.

        Raises:
            CheckpointError: all that is wrong, a line each, at most `MAX_PROBLEMS`.
        """
        expect_each(shapes, self._expect)

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        own = self.shape(name)
        if own != shape:
            raise CheckpointError(
                f"{self._place(name)}: tensor {name!r} has shape {list(own)}; the config makes it {list(shape)}"
            )

    def check(self, piece: Piece) -> None:
        """Make sure that a piece lies within its tensor.

        Raises:
            CheckpointError: as `tensor`, or the tensor's shape does not hold the piece.
        """
        shape = self.shape(piece.tensor)
        if not piece.lies_in(shape):
            raise CheckpointError(
                f"{self._place(piece.tensor)}: tensor {piece.tensor!r} has shape {list(shape)}; "
                f"expected to hold {piece.region}"
            )

    def _find(self, name: str) -> TensorInfo | None:
        info = self._tensors.get(name) or self._within.get(name)
        if info is None and (info := self._find_within(name)):
            self._within[name] = info
        return info

    def _find_within(self, name: str) -> TensorInfo | None:
        if name.endswith(FLAT):
            whole = self._tensors.get(name.removesuffix(FLAT))
            flat = whole is not None and len(whole.shape) == 3 and whole.shape[1] == 1
            return replace(whole, shape=(whole.shape[0], whole.shape[2])) if whole is not None and flat else None
        if name.endswith(WHOLE):
            whole = self._tensors.get(name.removesuffix(WHOLE))
            size = 0 if whole is None else prod(whole.shape)
            is_meant = whole is not None and (len(whole.shape) == 2 or size in whole.shape)
            return replace(whole, shape=(size,)) if whole is not None and is_meant else None
        if not (inner := _INNER.fullmatch(name)):
            return None
        outer, number = self._find(inner["outer"]), int(inner["number"])
        if outer is None or len(outer.shape) < 2 or number >= outer.shape[0]:
            return None
        size = outer.row_bytes
        return replace(outer, shape=outer.shape[1:], offset=outer.offset + number * size, size=size)

    def _place(self, name: str) -> Path:
        """The file of a tensor, for messages; the whole checkpoint where it is in no file by this name."""
        info = self._find(name)
        return self.path if info is None else info.file

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, piece: Piece) -> F32:
        """Read a piece, dequantised if need be: f32[rows, columns] or f32[rows], C-contiguous.

        Raises:
            CheckpointError: as `check`, or the file cannot be read (any more).
        """
        self.check(piece)
        if piece.columns is None:
            line: F32 = self._values(piece.tensor, range(1), piece.rows)[0]
            return line
        return self._values(piece.tensor, piece.rows, piece.columns)

    def rows(self, name: str, ids: Sequence[int]) -> F32:
        """Look rows up in a matrix, such as embeddings of tokens.

        Returns:
            f32[len(ids), D]: one row for each of `ids`, in their order.

        Raises:
            CheckpointError: as `tensor`, the tensor is not a matrix, or its file cannot be read (any more).
            IndexError: an id is not a row of it.
        """
        shape = self.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{self._place(name)}: tensor {name!r} has shape {list(shape)}; expected a matrix")
        check_rows(name, shape[0], ids)
        return self._values(name, ids, range(shape[1]))

    def _items(
        self, info: TensorInfo, of: np.dtype[Any], rows: Sequence[int], columns: range, to: npt.DTypeLike | None = None
    ) -> npt.NDArray[Any]:
        """Some of a tensor's rows and columns, [rows, columns], as items of a fixed size.

        Args:
            of: the items' type in the file.
            to: their type in the result; None: the same.
        """
        items = np.empty((len(rows), len(columns)), of if to is None else to)
        if items.size:
            wanted = range(columns[0] * of.itemsize, (columns[-1] + 1) * of.itemsize)
            for part, lines in self._lines(info, rows, wanted):
                items[part] = lines.view(of)[:, :: columns.step]
        return items

    def _lines(self, info: TensorInfo, rows: Sequence[int], columns: range) -> Iterator[tuple[slice, U8]]:
        """The same bytes of some rows, as many rows at a time as the scratch buffer holds.

        Short stretches between them are read over.

        Args:
            columns: the bytes, counted from the start of a row; some.

        Yields:
            which of `rows` they are, and u8[rows, bytes], which is valid until the next.
        """
        line = len(columns)
        start = info.offset + columns.start
        apart = rows.step * info.row_bytes if isinstance(rows, range) and rows.step > 0 else 0
        together = apart and apart - line <= _GAP
        each = apart if together else line
        at_once = max(1, _SCRATCH // each)
        if self._bring is not None:
            self._bring(info.file, [(start + row * info.row_bytes, line) for row in rows])
        for done in range(0, len(rows), at_once):
            part = rows[done : done + at_once]
            size = each * (len(part) - 1) + line
            raw = self._buffer(size)
            if together:
                self._read_here(info.file, start + part[0] * info.row_bytes, raw)
            else:
                for index, row in enumerate(part):
                    self._read_here(info.file, start + row * info.row_bytes, raw[index * line : (index + 1) * line])
            yield slice(done, done + len(part)), np.ndarray((len(part), line), np.uint8, raw, strides=(each, 1))

    def _samples(self) -> Iterator[tuple[str, TensorInfo, bytearray]]:
        """A few bytes from the middle of every tensor, by name: two fine-tunes of one model differ in nothing else."""
        sampled = {name: _sample_of(info) for name, info in sorted(self._tensors.items())}
        if self._bring is not None:
            for file in self._files:
                self._bring(file, [place for name, place in sampled.items() if self._tensors[name].file == file])
        for name, (offset, size) in sampled.items():
            sample = bytearray(size)
            self._read_here(self._tensors[name].file, offset, memoryview(sample))
            yield name, self._tensors[name], sample

    def _buffer(self, size: int) -> memoryview:
        """The scratch buffer, at least as large as this, as much of it."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    # -- files --------------------------------------------------------------------------------------------------

    def _add_file(self, file: Path) -> int:
        """Open a file; returns its size in bytes."""
        if told := pointer_told(file):
            raise CheckpointError(told)
        try:
            self._files[file] = FileIO(file)
            size = self._sizes[file] = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be opened: {error.strerror or error}") from error
        return size

    def _add_tensor(self, name: str, info: TensorInfo, own_name: str = "") -> None:
        """Put a tensor in the table; `own_name` is the file's, for the message."""
        if name in self._tensors:
            raise CheckpointError(
                f"{info.file}: tensor {(own_name or name)!r} is in {self._tensors[name].file.name} too"
            )
        self._tensors[name] = info

    def _read_at(self, path: Path, offset: int, view: memoryview) -> None:
        """Read as many bytes as `view` has."""
        if self._bring is not None:
            self._bring(path, [(offset, len(view))])
        self._read_here(path, offset, view)

    def _read_here(self, path: Path, offset: int, view: memoryview) -> None:
        """Read bytes that are on this machine already."""
        file = self._files[path]
        try:
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{path}: it has become shorter since it was opened")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def stamp(self) -> str:
        """Changes whenever a file that is read here does: sizes and times of modification.

        Raises:
            CheckpointError: a file cannot be looked at (any more).
        """
        try:
            stats = [(path.name, os.fstat(file.fileno())) for path, file in self._files.items()]
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        return json.dumps(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    def close(self) -> None:
        """Close the files; nothing can be read any more."""
        for file in self._files.values():
            file.close()


def _sample_of(info: TensorInfo) -> tuple[int, int]:
    """Where the bytes of a tensor lie that enter a fingerprint: offset and length."""
    size = min(_SAMPLE, info.size)
    return info.offset + (info.size - size) // 2, size


def check_rows(name: str, count: int, ids: Sequence[int]) -> None:
    """Make sure that a matrix of `count` rows has these.

    Raises:
        IndexError: it has not.
    """
    for row in ids:
        if not 0 <= row < count:
            raise IndexError(f"{row} is not a row of {name!r}, which has {count}")
