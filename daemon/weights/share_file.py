"""Writing a share file: a rank's weights, read from a checkpoint, quantised and put in their places.

The work streams in chunks of rows, so its memory is bounded whatever the size of a weight. The file appears under
its name only when it is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.quantise import quantise
from motley.daemon.weights.spec import Encoding, Piece, Placed, Weight
from motley.daemon.weights.stored import Codes, Format, Source, converted, packed_zeros, whole_blocks
from motley.protocol.wording import human_bytes

FP16_MAX = 65504.0
_CHUNK = 1 << 17
"""Elements quantised at a time (or one row, if that is longer): in float32 they fit a core's cache."""
_CODES = 1 << 21
"""Elements read at a time of a tensor that is quantised already or lies transposed: few are slow to collect."""
_REPORT = 8 << 20
"""Bytes between two calls of `progress`."""


class ShareFileError(Exception):
    """The share file cannot be written; the message says where, and what is missing."""


def write_share(
    source: Source,
    placed: Sequence[Placed],
    total: int,
    path: Path,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the weights to `path`, a file of `total` bytes (both as `spec.lay_out` gives them).

    Args:
        progress: is called with the bytes of weights and scales written so far, and all of them, now and then and
            at the end.

    Raises:
        CheckpointError: the checkpoint does not hold the pieces (all that is wrong with it is named, and nothing
            has been written), cannot be read, or holds a NaN or an infinity.
        ShareFileError: the disk lacks the space or cannot be written.
    """
    _check_pieces(source, placed)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        _check_space(path.parent, total)
        try:
            with FileIO(partial, "w") as file:
                file.truncate(total)
                _write_weights(source, placed, file, progress)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ShareFileError(
            f"{path}: cannot write this rank's weights ({human_bytes(total)}): {error.strerror or error}"
        ) from error


def read_share(source: Source, placed: Sequence[Placed]) -> None:
    """Read what `write_share` reads, and no more than that: where it is brought from elsewhere, it then is here.

    Raises:
        CheckpointError: the checkpoint does not hold the pieces, or cannot be read.
    """
    _check_pieces(source, placed)
    for item in placed:
        for piece in _chunks(source, item.weight.pieces):
            _stored(source, piece, item.weight)


def _check_pieces(source: Source, placed: Sequence[Placed]) -> None:
    problems = []
    for item in placed:
        for piece in item.weight.pieces:
            try:
                source.check(piece)
            except CheckpointError as error:
                problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems)))


def _check_space(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total:
        raise ShareFileError(
            f"{folder}: this rank's weights need {human_bytes(total)} of disk, of which {human_bytes(free)} is free; "
            f"make room for {human_bytes(total - free)} there, or give that node another folder (MOTLEY_CACHE, or"
            " --cache of `motley join` and `motley up`)"
        )


def _write_weights(
    source: Source,
    placed: Sequence[Placed],
    file: FileIO,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(item.weight.all_bytes for item in placed)
    done = reported = 0
    for item in placed:
        offsets = [item.data_offset, item.scale_offset, item.zero_offset]
        for piece in _chunks(source, item.weight.pieces):
            for index, values in enumerate(_encoded(source, piece, item.weight)):
                _write_at(file, offsets[index], values)
                offsets[index] += values.nbytes
                done += values.nbytes
            if progress and done - reported >= _REPORT:
                progress(done, total)
                reported = done
    if progress:
        progress(done, total)


def _chunks(source: Source, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces cut into runs of rows of a bounded number of elements."""
    for piece in pieces:
        width = 1 if piece.columns is None else len(piece.columns)
        if not width:
            continue
        large = source.transposed(piece.tensor) or source.format(piece.tensor).encoding is not Encoding.FP32
        elements = _CODES if large else _CHUNK
        at_once = max(1, elements // width)
        for start in range(0, len(piece.rows), at_once):
            yield replace(piece, rows=piece.rows[start : start + at_once])


def _encoded(source: Source, piece: Piece, weight: Weight) -> list[npt.NDArray[np.generic]]:
    """A piece as `weight` holds it: values, or codes and scales, and zero points where it has them."""
    held, stored = _held(weight), source.format(piece.tensor)
    values = _stored(source, piece, weight)
    if isinstance(values, Codes):
        assert piece.columns is not None
        begin = whole_blocks(piece.columns, stored.block).start
        codes = converted(values, stored, range(piece.columns.start - begin, piece.columns.stop - begin), held)
    else:
        _check_finite(source, piece, values)
        if weight.offset:
            values = values + np.float32(weight.offset)
        if held.encoding is Encoding.FP32:
            return [values]
        if held.encoding is Encoding.FP16:
            return [_halved(source, piece, values)]
        assert not held.zeros
        codes = Codes(*quantise(values, held.block, held.encoding))
    _check_finite(source, piece, codes.scales)
    zeros = [] if codes.zeros is None else [packed_zeros(codes.zeros, held.encoding)]
    return [codes.codes, codes.scales, *zeros]


def _stored(source: Source, piece: Piece, weight: Weight) -> Codes | npt.NDArray[np.float32]:
    """What a piece is made of: codes of whole blocks where `weight` holds them as they are, else values."""
    stored = source.format(piece.tensor)
    if piece.columns is not None and _held(weight).expresses(stored):
        return source.codes(replace(piece, columns=whole_blocks(piece.columns, stored.block)))
    return source.read(piece)


def _held(weight: Weight) -> Format:
    return Format(weight.encoding, weight.block, weight.zeros)


def _halved(source: Source, piece: Piece, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
    largest = np.abs(values).max(initial=0)
    if largest > FP16_MAX:
        raise CheckpointError(
            f"{source.path}: tensor {piece.tensor!r} holds {largest:g}, and fp16 ends at {FP16_MAX:.0f}; "
            "use int8 or fp32"
        )
    return values.astype(np.float16)


def _check_finite(source: Source, piece: Piece, values: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(values).all():
        raise CheckpointError(f"{source.path}: tensor {piece.tensor!r} holds a NaN or an infinity")


def _write_at(file: FileIO, offset: int, values: npt.NDArray[np.generic]) -> None:
    view = values.data.cast("B")
    file.seek(offset)
    while view:
        view = view[file.write(view) :]
