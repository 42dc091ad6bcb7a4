"""Answers of an engine, taken to see whether it computes what the reference computes from the same weights.

An answer is a *fingerprint* of rows that were computed: their products with a few random directions. The reference's
answers are kept beside the weights that they are about. What is asked, `motley.daemon.rank.gate` says for a rank, and
`motley.daemon.experts.gate` for a whole expert.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import onnx

from motley.plugins.engine import F32

F64 = npt.NDArray[np.float64]
Answers = Mapping[str, F64]
"""Fingerprints, by what they are of."""

FORMAT = 4
"""The version of kept answers; to be raised whenever other questions are asked, or answers taken otherwise."""

PROJECTIONS = 8
"""Random directions that a row is measured along: a wrong row stays undetected only if it is wrong across all."""
LIMIT = 0.1
"""How far an answer may be off, as a part of its norm: activations quantised to int8 per block make 0.02, a misread
weight 1."""
LOGITS = "logits"
"""What the names of answers that are logits begin with."""
CHOICES = "choices"
"""What the names of answers begin with whose rows are judged one by one, of which more than half must be right: what a
row sees is chosen by scores, and rounding brings some of these to the other side."""


class GateError(Exception):
    """An engine on this machine computes wrongly; the message says where, and by how much."""


def kept_answers(
    proto: onnx.ModelProto, compute: Callable[[], Answers], folder: Path | None, anew: bool, caches: str = ""
) -> Answers:
    """The answers about a graph: those that are kept in `folder`, or else computed ones, which are then kept there.

    Args:
        proto: the graph; its bytes name the file, and so does `caches`.
        folder: None: nothing is kept.
        anew: compute them even if they are kept.
        caches: the format of the KV caches, where there are any.
    """
    if folder is None:
        return compute()
    digest = sha256(f"{FORMAT} {caches}\n".encode() + proto.SerializeToString(deterministic=True)).hexdigest()
    kept = folder / f"answers-{digest[:16]}.npz"
    if anew:
        kept.unlink(missing_ok=True)
    with suppress(OSError, ValueError, EOFError, BadZipFile), kept.open("rb") as file, np.load(file) as stored:
        return dict(stored)
    answers = compute()
    partial = kept.with_suffix(f".{os.getpid()}.partial.npz")
    with suppress(OSError):  # without room for them they are computed again
        np.savez(partial, **answers)  # type: ignore[arg-type]
        os.replace(partial, kept)
    return answers


def difference(answers: Answers, expected: Answers) -> str:
    """Say where answers differ from the reference's by more than rounding does; empty if they do not."""
    if answers.keys() != expected.keys():
        return f"this rank answers other questions than the reference: {sorted(answers.keys() ^ expected.keys())[0]}"
    usual = _usual_logits(expected)
    for what, right in expected.items():
        if what.startswith(CHOICES):
            error = _error_of_choices(answers[what], right)
        else:
            error = _error(answers[what], right, usual if what.startswith(LOGITS) else 0.0)
        if not error <= LIMIT:  # a NaN is not
            return (
                f"this rank computes wrongly: {what} differs from the reference by {error:.3g} of its norm (at most"
                f" {LIMIT:g} is rounding). Leave this node out, or have it use another engine or driver; if none is"
                " right, its memory may be faulty"
            )
    return ""


def fingerprint(values: F32) -> F64:
    """Measure rows f32[T, N] along random directions: f64[T, PROJECTIONS]."""
    return values.astype(np.float64) @ _directions(values.shape[1])


def noise(seed: str, shape: tuple[int, ...]) -> F32:
    """Standard normal numbers, the same for the same text on every machine."""
    letters = np.frombuffer(seed.encode(), np.uint8).astype(np.uint32)  # a list gives the same in six times the time
    return np.random.default_rng(letters).standard_normal(shape, np.float32)


@lru_cache(maxsize=8)  # an exam has thousands of rows, of a few widths
def _directions(width: int) -> F32:
    directions: F32 = np.sign(noise(f"{width} directions", (width, PROJECTIONS)))
    return directions


def _usual_logits(answers: Answers) -> float:
    """The norm of a row of logits, over all questions.

    A single row of a small slice may nearly vanish along the direction that its weights share, where rounding does not.
    """
    norms = [np.linalg.norm(values, axis=1) for what, values in answers.items() if what.startswith(LOGITS)]
    return float(np.sqrt(np.mean(np.concatenate(norms) ** 2))) if norms else 0.0


def _error(got: F64, right: F64, least: float) -> float:
    """Give an error relative to the norm, or to `least` if that is more."""
    scale = max(float(np.linalg.norm(right)), least)
    error = float(np.linalg.norm(got - right))
    return error / scale if scale else error


def _error_of_choices(got: F64, right: F64) -> float:
    """Give the error that more than half of the rows do not exceed; a NaN if any row is no number."""
    if not np.isfinite(got).all():
        return float("nan")
    return sorted(_error(*rows, 0.0) for rows in zip(got, right, strict=True))[len(right) // 2]
