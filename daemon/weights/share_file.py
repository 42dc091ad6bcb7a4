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

from motley.daemon.weights.checkpoint import Checkpoint, CheckpointError
from motley.daemon.weights.quantise import quantise
from motley.daemon.weights.spec import Encoding, Piece, Placed

_CHUNK = 1 << 17
"""Elements quantised at a time (or one row, if that is longer): in float32 they fit a core's cache."""
_REPORT = 8 << 20
"""Bytes between two calls of `progress`."""


class ShareFileError(Exception):
    """The share file cannot be written; the message says where, and what is missing."""


def write_share(
    checkpoint: Checkpoint,
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
    _check_pieces(checkpoint, placed)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        _check_space(path.parent, total)
        try:
            with FileIO(partial, "w") as file:
                file.truncate(total)
                _write_weights(checkpoint, placed, file, progress)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ShareFileError(
            f"{path}: cannot write this rank's weights ({_gb(total)}): {error.strerror or error}"
        ) from error


def _check_pieces(checkpoint: Checkpoint, placed: Sequence[Placed]) -> None:
    problems = []
    for item in placed:
        for piece in item.weight.pieces:
            try:
                checkpoint.check(piece)
            except CheckpointError as error:
                problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems)))


def _check_space(folder: Path, total: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < total:
        raise ShareFileError(
            f"{folder}: this rank's weights need {_gb(total)} and {_gb(free)} are free; "
            f"make room for {_gb(total - free)} or choose another folder (--cache)"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.3f} GB"


def _write_weights(
    checkpoint: Checkpoint,
    placed: Sequence[Placed],
    file: FileIO,
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(item.weight.data_bytes + item.weight.scale_bytes for item in placed)
    done = reported = 0
    for item in placed:
        data_offset, scale_offset = item.data_offset, item.scale_offset
        for piece in _chunks(item.weight.pieces):
            values = checkpoint.read(piece)
            if not np.isfinite(values).all():
                raise CheckpointError(f"{checkpoint.folder}: tensor {piece.tensor!r} holds a NaN or an infinity")
            if item.weight.encoding is Encoding.FP32:
                data: npt.NDArray[np.generic] = values
            else:
                data, scales = quantise(values, item.weight.block, item.weight.encoding)
                _write_at(file, scale_offset, scales)
                scale_offset += scales.nbytes
                done += scales.nbytes
            _write_at(file, data_offset, data)
            data_offset += data.nbytes
            done += data.nbytes
            if progress and done - reported >= _REPORT:
                progress(done, total)
                reported = done
    if progress:
        progress(done, total)


def _chunks(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces cut into runs of rows of at most `_CHUNK` elements."""
    for piece in pieces:
        width = 1 if piece.columns is None else len(piece.columns)
        if not width:
            continue
        at_once = max(1, _CHUNK // width)
        for start in range(0, len(piece.rows), at_once):
            yield replace(piece, rows=piece.rows[start : start + at_once])


def _write_at(file: FileIO, offset: int, values: npt.NDArray[np.generic]) -> None:
    view = values.data.cast("B")
    file.seek(offset)
    while view:
        view = view[file.write(view) :]
