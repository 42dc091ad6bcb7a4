"""A model's tensors by their own names, wherever a checkpoint has them.

A description names every matrix of a model by itself, and says where it may lie if a file has no tensor of the name: as
rows of a larger tensor, say the queries of a fused ``qkv_proj``, or as a matrix that lies transposed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError, expect_each
from motley.daemon.weights.checkpoints.tensor_files import TensorFiles, check_rows
from motley.daemon.weights.closing import Closing
from motley.daemon.weights.places import Part, Tensor
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import F32, Codes, Format

A = TypeVar("A", bound=np.generic)

HEAD_BIAS = "lm_head.bias"
HARMLESS = (
    ".rotary_emb.inv_freq",  # it follows from the config
    # Scales of caches in 8 bits, of queries, and of what attention weighs: ours follow from what is cached.
    *(".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale", ".output_scale", ".output_zero_point"),
    # What inputs of packed matrices are rounded by: ours are not, or by their own largest.
    *(".input_scale", ".input_global_scale", ".input_zero_point"),
)
"""What the names of tensors end with that files may have in a layer and no model needs."""


class Located(Closing):
    """The tensors of a model in a checkpoint (`motley.daemon.weights.stored.Source`).

    A tensor that the checkpoint has by name is that; else it is in the first of its parts whose larger tensor is there
    and has the part's shape. Tensors that are not the model's are found by their names alone.

    Closes the checkpoint when it is closed. Not thread-safe.
    """

    def __init__(self, files: TensorFiles, tensors: Iterable[Tensor]) -> None:
        self._files = files
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._parts: dict[str, Part | None] = {}

    @property
    def path(self) -> Path:
        return self._files.path

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        expect_each(shapes, self._expect)

    def refuse_others(self, trunks: Collection[str], layers: int, ignored: Collection[str] = ()) -> None:
        """Make sure that nothing of a layer goes unused, and no bias of the head: the model would be another one.

        Args:
            trunks: what the names of the model's own tensors begin with in front of ``layers.N.``.
            layers: how many the model has.
            ignored: what the names of others begin with that may be there.

        Raises:
            CheckpointError: naming the first such tensor.
        """
        wanted = {name for tensor in self._tensors.values() for name in (tensor.name, *_larger(tensor))}
        known = {part for name in wanted for part in self._files.parts(name)}
        for name in sorted(set(self._files.names()) - known):
            if name.startswith(tuple(ignored)) or name.endswith(HARMLESS):
                continue
            trunk, _, number = ".".join(_layer(name)).rpartition("layers.")
            if name == HEAD_BIAS:
                where = "is of the head"
            elif trunk not in trunks or not number.isdecimal():
                continue
            elif int(number) < layers:
                where = "is in a layer of the model"
            else:
                where = f"is in a layer beyond the {layers} of the model"
            if self._files.adds_nothing(name):
                continue
            raise CheckpointError(
                f"{self.path}: tensor {name!r} {where}, which has no use for it by its config: is this the config that"
                " belongs to these weights?"
            )

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        part = self._part(name)
        if part is None:
            self._files.expect({name: shape})
            return
        if self.shape(name) != shape:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}, which lies in {part.tensor!r}, has shape {list(self.shape(name))}; "
                f"the config makes it {list(shape)}"
            )
        self._files.expect({part.tensor: part.shape})
        held = self._files.format(part.tensor)
        if part.transposed and held.encoding is not Encoding.FP32:
            raise CheckpointError(
                f"{self.path}: tensor {part.tensor!r} is stored as {held.called}, in blocks along the rows of "
                f"{name!r}, which lies transposed in it; only blocks along its columns are supported"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape if self._part(name) else self._files.shape(name)

    def check(self, piece: Piece) -> None:
        part = self._part(piece.tensor)
        if part is None:
            self._files.check(piece)
            return
        shape = self.shape(piece.tensor)
        if not piece.lies_in(shape):
            raise CheckpointError(
                f"{self.path}: tensor {piece.tensor!r}, which lies in {part.tensor!r}, has shape {list(shape)}; "
                f"expected to hold {piece.region}"
            )
        for own in part.pieces(piece):
            self._files.check(own)

    def format(self, name: str) -> Format:
        part = self._part(name)
        return self._files.format(part.tensor if part else name)

    def transposed(self, name: str) -> bool:
        part = self._part(name)
        return part.transposed or self._files.transposed(part.tensor) if part else self._files.transposed(name)

    def read(self, piece: Piece) -> F32:
        self.check(piece)
        part = self._part(piece.tensor)
        if part is None:
            return self._files.read(piece)
        values = [self._files.read(own) for own in part.pieces(piece)]
        return np.ascontiguousarray(_stacked([each.T for each in values] if part.transposed else values))

    def codes(self, piece: Piece) -> Codes:
        self.check(piece)
        part = self._part(piece.tensor)
        if part is None:
            return self._files.codes(piece)
        assert not part.transposed
        found = [self._files.codes(own) for own in part.pieces(piece)]
        zeros = [each.zeros for each in found if each.zeros is not None]
        return Codes(
            _stacked([each.codes for each in found]),
            _stacked([each.scales for each in found]),
            _stacked(zeros) if zeros else None,
        )

    def rows(self, name: str, ids: Sequence[int]) -> F32:
        part = self._part(name)
        if part is None:
            return self._files.rows(name, ids)
        count, width = self.shape(name)
        check_rows(name, count, ids)
        if not part.transposed and not part.heads:
            return self._files.rows(part.tensor, [part.start + row * part.step for row in ids])
        lines = [self.read(Piece(name, range(row, row + 1), range(width))) for row in ids]
        return np.concatenate([np.empty((0, width), np.float32), *lines])

    def fingerprint(self) -> str:
        return self._files.fingerprint()

    def stamp(self) -> str:
        return self._files.stamp()

    def close(self) -> None:
        self._files.close()

    def _part(self, name: str) -> Part | None:
        """Where a tensor lies; None: under its own name.

        Raises:
            CheckpointError: it is nowhere.
        """
        if name not in self._parts:
            self._parts[name] = self._find(name)
        return self._parts[name]

    def _find(self, name: str) -> Part | None:
        tensor = self._tensors.get(name)
        if tensor is None or not tensor.parts or name in self._files:
            return None
        there = [part for part in tensor.parts if part.tensor in self._files]
        if not there:
            places = ", ".join(repr(part.tensor) for part in tensor.parts)
            raise CheckpointError(f"{self.path}: tensor {name!r} is absent, and so is what it could lie in: {places}")
        return next((part for part in there if self._files.shape(part.tensor) == part.shape), there[0])


def _stacked(parts: Sequence[npt.NDArray[A]]) -> npt.NDArray[A]:
    """Arrays one below the other."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _larger(tensor: Tensor) -> Iterator[str]:
    """The larger tensors that a tensor may be a part of."""
    return (part.tensor.partition("[")[0] for part in tensor.parts)


def _layer(name: str) -> list[str]:
    """The words of a tensor's name up to its layer's number: ``model``, ``layers`` and ``3``; all, if it has none."""
    words = name.split(".")
    return words[: words.index("layers") + 2] if "layers" in words else words
