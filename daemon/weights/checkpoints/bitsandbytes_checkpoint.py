"""Checkpoints of bitsandbytes in which matrices are of four bits: NF4, or its FP4.

A matrix X [N, K] is, beside others' tensors:

==========================================  ============================================================
``X``                                       u8[N * K / 2, 1]: two neighbours to a byte, the first in its high nibble
``X.quant_map``                             f32[16]: the value of each nibble, from -1 to 1
``X.absmax``                                f32[N * K / block]: what a block's values are multiplied by; or u8 of the
                                            same shape, if these are quantised themselves:
``X.nested_absmax``, ``X.nested_quant_map``  f32: multiplies blocks of them; f32[256]: the value of each byte
``X.quant_state.bitsandbytes__nf4``         JSON as bytes: the shape, both sizes of blocks, what is added to ``absmax``
==========================================  ============================================================

Source: Dettmers et al. 2023 (https://arxiv.org/abs/2305.14314); the layout is that of ``QuantState.as_dict``. Blocks
run on over the ends of rows, hence rows are whole blocks here. The 16 values lie at no even distance, so they are no
codes of ours: X is a matrix of floats. Held in int8, in blocks of 32, it differs from what NF4 made of Gaussian weights
by 0.6 % of their RMS; NF4 itself lost 9.2 %.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.stored import F32, Format, whole_blocks, within

_STATES = {".quant_state.bitsandbytes__nf4": "NF4", ".quant_state.bitsandbytes__fp4": "bitsandbytes FP4"}
_LONGEST = 1 << 16


@dataclass(frozen=True)
class BitsAndBytes:
    """Matrices are of four bits."""

    called: ClassVar[str] = "bitsandbytes"
    endings: ClassVar[tuple[str, ...]] = tuple(_STATES)

    def open(self, path: Path, bring: Bring | None = None) -> BitsAndBytesCheckpoint:
        """Open a checkpoint of them."""
        return BitsAndBytesCheckpoint(path, bring)


@dataclass(frozen=True)
class _State:
    """How a matrix is stored.

    Attributes:
        block: values that share an ``absmax``.
        nested: how many of these share a scale of their own; 0: they are floats.
        offset: what is added to those that have one.
    """

    shape: tuple[int, int]
    called: str
    block: int
    nested: int
    offset: float


class BitsAndBytesCheckpoint(SafetensorsCheckpoint):
    """A checkpoint in which some matrices are of four bits: those with a ``quant_state``.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def __init__(self, path: Path, bring: Bring | None = None) -> None:
        self._states: dict[str, _State | None] = {}
        super().__init__(path, bring)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a readable tensor.

        Raises:
            CheckpointError: it is absent or of a type that weights do not have; or its parts do not belong together.
        """
        state = self._state(name)
        return state.shape if state else super().shape(name)

    def parts(self, name: str) -> Collection[str]:
        if not any(name + each in self for each in _STATES):
            return super().parts(name)
        endings = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *_STATES)
        return (name, *(name + ending for ending in endings))

    def format(self, name: str) -> Format:
        state = self._state(name)
        return Format.floats(state.called) if state else super().format(name)

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        state = self._state(name)
        if state is None:
            return super()._values(name, rows, columns)
        byte = np.dtype(np.uint8)
        whole = whole_blocks(columns, state.block)
        codes = replace(self.tensor(name, ("U8",)), shape=(state.shape[0], state.shape[1] // 2))
        pairs = self._items(codes, byte, rows, range(whole.start // 2, whole.stop // 2))
        nibbles = np.stack((pairs >> 4, pairs & 15), axis=-1).reshape(len(pairs), len(whole))
        values = self._vector(name + ".quant_map")[nibbles].reshape(len(pairs), len(whole) // state.block, state.block)
        blocks = range(whole.start // state.block, whole.stop // state.block)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale; whoever uses the values finds out
            values *= self._peaks(name, state, rows, blocks)[:, :, None]
        found: F32 = values.reshape(len(pairs), len(whole))
        return np.ascontiguousarray(found[:, within(columns, whole)])

    def _peaks(self, name: str, state: _State, rows: Sequence[int], blocks: range) -> F32:
        """What the values of blocks are multiplied by: f32[rows, blocks]."""
        across = state.shape[1] // state.block
        part = name + ".absmax"
        info = replace(self.tensor(part, ("U8",) if state.nested else ("F32",)), shape=(state.shape[0], across))
        if not state.nested:
            peaks: F32 = self._items(info, np.dtype("<f4"), rows, blocks)
            return peaks
        codes = self._items(info, np.dtype(np.uint8), rows, blocks)
        outer = (np.asarray(rows, np.int64)[:, None] * across + np.arange(blocks.start, blocks.stop)) // state.nested
        levels = self._vector(name + ".nested_quant_map")[codes]
        nested: F32 = levels * self._vector(name + ".nested_absmax")[outer] + np.float32(state.offset)
        return nested

    def _vector(self, name: str) -> F32:
        info = self.tensor(name, ("F32",))
        line: F32 = super()._values(name, range(1), range(info.size // 4))[0]
        return line

    def _state(self, name: str) -> _State | None:
        """How a matrix is stored; None: it is not of four bits."""
        if name not in self._states:
            ending = next((each for each in _STATES if self._find(name + each)), None)
            self._states[name] = None if ending is None else self._read_state(name, ending)
        return self._states[name]

    def _read_state(self, name: str, ending: str) -> _State:
        part = self.tensor(name + ending, ("U8",))

        def refused(reason: str) -> CheckpointError:
            return CheckpointError(f"{part.file}: tensor {name + ending!r} {reason}")

        if part.size > _LONGEST:
            raise refused(f"has {part.size} bytes; the state of a matrix was expected")
        raw = self._items(part, np.dtype(np.uint8), range(1), range(part.size)).tobytes()
        try:
            told: dict[str, Any] = json.loads(raw)
            (rows, columns), block = map(int, told["shape"]), int(told["blocksize"])
            nested = int(told.get("nested_blocksize", 0))
            offset = float(told["nested_offset"]) if nested else 0.0
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise refused(f"is not the state of a matrix: {error!r}") from error
        if rows < 1 or columns < 1 or block < 2 or block % 2 or columns % block or nested < 0:
            raise refused(f"tells of a matrix {[rows, columns]} in blocks of {block}; rows have to be of whole blocks")
        count = rows * columns // block
        sizes = {"": rows * columns // 2, ".quant_map": 64, ".absmax": count * (1 if nested else 4)}
        if nested:
            sizes |= {".nested_quant_map": 1024, ".nested_absmax": -(-count // nested) * 4}
        for other, size in sizes.items():
            kind = "U8" if not other or (nested and other == ".absmax") else "F32"
            info = self.tensor(name + other, (kind,))
            if info.size != size:
                raise CheckpointError(
                    f"{info.file}: tensor {name + other!r} has {info.size} bytes; its state makes it {size}"
                )
        return _State((rows, columns), _STATES[ending], block, nested, offset)
