"""Several adapters of one model made one: as an exact weighted mean, by TIES, or by DARE.

An adapter changes a matrix by ``scale * B @ A``. The mean of such changes is kept exactly, with the ranks of all
adapters together. TIES (arXiv 2306.01708) and DARE (arXiv 2311.03099) choose among a change's single values, so what
they make has any rank; an adapter of it is the nearest one of a given rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import exp
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from motley.training.errors import TrainingError

F32 = npt.NDArray[np.float32]
C = TypeVar("C", bound="Change | Dense")


@dataclass(frozen=True)
class Change:
    """What an adapter does to a matrix W f32[N, K]: it adds ``b @ a`` to it, the scale being in `b`.

    Attributes:
        a: f32[R, K].
        b: f32[N, R].
        lengths: f32[N], which the rows of the result then get (DoRA, arXiv 2402.09353); None: they keep theirs.
        embeds: W is a table of embeddings, f32[vocabulary, D], of whose adapters A is the transposed `b`.
    """

    a: F32
    b: F32
    lengths: F32 | None = None
    embeds: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def dense(self) -> F32:
        """The change itself, f32[N, K]."""
        return self.b @ self.a

    def applied(self, whole: F32) -> F32:
        """What a matrix f32[N, K] becomes."""
        changed = whole + self.dense
        if self.lengths is None:
            return changed
        scaled: F32 = changed * (self.lengths / np.linalg.norm(changed, axis=1))[:, None]
        return scaled


@dataclass(frozen=True)
class Dense:
    """What an adapter does to a matrix W f32[N, K] that it has another one in place of: their difference `dense`."""

    dense: F32

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.dense.shape[0], self.dense.shape[1]


Changes = Mapping[str, Change]
"""By the name of the module whose matrix is changed."""
AnyChanges = Mapping[str, Change | Dense]


def weights_of_losses(losses: Sequence[float]) -> list[float]:
    """Weights, 1 in sum, in proportion to 1 / perplexity, from held-out losses in nats per token."""
    inverse = [exp(min(losses) - loss) for loss in losses]
    return [each / sum(inverse) for each in inverse]


def normalised(weights: Sequence[float], count: int) -> list[float]:
    """The weights of `count` adapters over their sum; equal ones where none are given.

    Raises:
        TrainingError: there are not as many, one is below zero, or all are zero.
    """
    weights = list(weights) or [1.0] * count
    if len(weights) != count or min(weights) < 0 or sum(weights) <= 0:
        raise TrainingError(f"weights should be {count} numbers, none below zero and not all zero")
    return [weight / sum(weights) for weight in weights]


def weighted_mean(adapters: Sequence[Changes], weights: Sequence[float]) -> dict[str, Change]:
    """The exact mean of the adapters' changes, whose rank is that of all of them together.

    An adapter that leaves a module alone changes it by nothing. All modules get the same rank.
    """
    ranks = [max((change.a.shape[0] for change in adapter.values()), default=0) for adapter in adapters]
    merged = {}
    for name, like in _modules(adapters).items():
        parts_a, parts_b = [], []
        for adapter, weight, rank in zip(adapters, weights, ranks, strict=True):
            a, b = np.zeros((rank, like.shape[1]), np.float32), np.zeros((like.shape[0], rank), np.float32)
            if change := adapter.get(name):
                own = change.a.shape[0]
                a[:own], b[:, :own] = change.a, weight * change.b
            parts_a.append(a)
            parts_b.append(b)
        merged[name] = Change(np.concatenate(parts_a), np.concatenate(parts_b, axis=1), embeds=like.embeds)
    return merged


def mean_of_changes(adapters: Sequence[AnyChanges], weights: Sequence[float], name: str) -> F32:
    """One module's change by the weighted mean."""
    like = _modules(adapters)[name]
    total = np.zeros(like.shape, np.float32)
    for adapter, weight in zip(adapters, weights, strict=True):
        if (change := adapter.get(name)) is not None:
            total += np.float32(weight) * change.dense
    return total


def mean_of_tables(tables: Sequence[F32], weights: Sequence[float]) -> F32:
    """The weighted mean of matrices, f32[N, K] each, that are in one's place."""
    total = np.zeros(tables[0].shape, np.float32)
    for table, weight in zip(tables, weights, strict=True):
        total += np.float32(weight) * table
    return total


def ties(adapters: Sequence[AnyChanges], weights: Sequence[float], density: float, name: str) -> F32:
    """One module's change by TIES: of each adapter's change the largest values stay; of those, where signs differ, the
    ones on the side that weighs more; and of these the weighted mean.

    Args:
        density: the share of the values that stay.
    """
    like = _modules(adapters)[name]
    trimmed = np.stack([_trimmed(_dense(adapter, name, like), density) for adapter in adapters])
    scales = np.array(weights, np.float32)[:, None, None]
    side = np.sign((scales * trimmed).sum(axis=0))
    agreeing = (np.sign(trimmed) == side) & (trimmed != 0)
    total = (scales * agreeing).sum(axis=0)
    mean: F32 = (scales * trimmed * agreeing).sum(axis=0) / np.where(total > 0, total, 1)
    return mean


def _trimmed(values: F32, density: float) -> F32:
    kept = max(1, round(density * values.size))
    least = np.partition(np.abs(values).ravel(), values.size - kept)[values.size - kept]
    return np.where(np.abs(values) >= least, values, np.float32(0))


def dare(adapters: Sequence[AnyChanges], weights: Sequence[float], density: float, seed: int, name: str) -> F32:
    """One module's change by DARE: of each adapter's change values are dropped by chance, those that stay are scaled
    up, so that the expectation is what it was, and the weighted mean is taken.

    Args:
        density: how likely a value stays.
    """
    like = _modules(adapters)[name]
    digest = int.from_bytes(sha256(name.encode()).digest()[:8], "little")
    merged = np.zeros(like.shape, np.float32)
    for index, (adapter, weight) in enumerate(zip(adapters, weights, strict=True)):
        stays = np.random.default_rng([seed, digest, index]).random(merged.shape) < density
        merged += np.where(stays, _dense(adapter, name, like), 0) * np.float32(weight / density)
    return merged


def nearest_of_rank(change: F32, rank: int) -> tuple[Change, float]:
    """The change of a rank that is nearest to any f32[N, K], and what it misses of it: 0 nothing, 1 all."""
    left, values, right = np.linalg.svd(change, full_matrices=False)
    missed = float(np.sqrt((values[rank:] ** 2).sum() / max(float((values**2).sum()), 1e-30)))
    roots = np.sqrt(values[:rank])
    a, b = np.zeros((rank, change.shape[1]), np.float32), np.zeros((change.shape[0], rank), np.float32)
    a[: len(roots)], b[:, : len(roots)] = roots[:, None] * right[:rank], left[:, :rank] * roots
    return Change(a, b), missed


def module_names(adapters: Sequence[AnyChanges]) -> list[str]:
    """The modules that any of the adapters changes.

    Raises:
        TrainingError: two of them change matrices of different shapes under one name.
    """
    return list(_modules(adapters))


def _modules(adapters: Sequence[Mapping[str, C]]) -> dict[str, C]:
    found: dict[str, C] = {}
    for adapter in adapters:
        for name, change in adapter.items():
            if found.setdefault(name, change).shape != change.shape:
                raise TrainingError(f"{name}: the adapters are not of one model: their matrices differ in shape")
    return found


def _dense(adapter: AnyChanges, name: str, like: Change | Dense) -> F32:
    change = adapter.get(name)
    return change.dense if change else np.zeros(like.shape, np.float32)
