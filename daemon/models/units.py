"""How a model can be cut: its units and quantisation blocks. They depend on the model alone, never on the shares.

A matrix is quantised in blocks along its inner dimension K. Cutting rows (q, k, v, gate, up, head) leaves blocks
alone. Cutting columns (output and down projections) must fall between blocks, so their block divides the width of
the finest unit: the quantised values are then the same however the model is cut. A checkpoint's own blocks are never in
the way of a cut: a block is held as several of the same scale where need be.

In *exact* mode units are coarser: they fall on the leaves of the tree in which the output and down projections are
summed (see `motley.daemon.models.tree`). A leaf is a matmul of its own, so there are few. Blocks are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from motley.daemon.models.config import ConfigError, ModelConfig
from motley.daemon.models.holding import (
    BLOCKS,
    FLOATS,
    QUANTISATIONS,
    Formats,
    blocks_together,
    narrowed,
    wanted_format,
)
from motley.daemon.models.share import Share, ShareError
from motley.daemon.models.tensors import Inner, fused_matrices
from motley.daemon.weights.spec import Encoding

FINE = 32
"""Units that a matrix should at least be cut in, so that shares can follow the ranks' speeds closely."""
NARROW = 32
"""Blocks are not made narrower than this only to have fine units."""
WIDEST = 128
"""Columns or rows that a unit has at most, unless the quantisation block is wider."""
LEAVES = 8
"""Leaves that the attention and the MLP of a layer have at most in exact mode: each costs a decode step some 8 us."""
EXACT_ROWS = 16
"""Rows of the head that a unit has at least in exact mode: kernels compute tiles of columns, and the rest otherwise."""


@dataclass(frozen=True)
class Units:
    """The units of a model and how its matrices are held.

    Attributes:
        kv_groups: KV heads, each with the query heads that read it; in exact mode, runs of neighbouring KV heads
            where there are more than `LEAVES`.
        attention_splits: into how many units a KV group may be cut, ascending, the first is 1. In exact mode the
            others divide the last, whose units are the leaves.
        mlp: runs of blocks of `mlp_columns` MLP columns; of one block each, unless in exact mode.
        vocabulary: blocks of `vocabulary_rows` rows of the head; the last may be shorter.
        held: every matrix of the graph by its tensor's name. Blocks of output projections divide the columns of the
            finest attention unit, those of down projections `mlp_columns`.
    """

    kv_groups: int
    attention_splits: tuple[int, ...]
    mlp: int
    mlp_columns: int
    vocabulary: int
    vocabulary_rows: int
    held: Formats
    exact: bool = False

    def kv_heads(self, groups: range, config: ModelConfig) -> range:
        """The KV heads of some KV groups."""
        return range(*(config.kv_heads * bound // self.kv_groups for bound in (groups.start, groups.stop)))

    def query_heads(self, attention: range, split: int, config: ModelConfig) -> range:
        """The query heads of some attention units at a split of the KV groups."""

        def first(unit: int) -> int:
            group, part = divmod(unit, split)
            return self.kv_heads(range(group), config).stop * config.group + config.group * part // split

        return range(first(attention.start), first(attention.stop))

    def columns(self, mlp: range, config: ModelConfig) -> range:
        """The MLP columns of some MLP units."""
        blocks = config.intermediate // self.mlp_columns
        return range(*(blocks * bound // self.mlp * self.mlp_columns for bound in (mlp.start, mlp.stop)))


def units(
    config: ModelConfig, quantisation: str, block: int, stored: Formats | None = None, exact: bool = False
) -> Units:
    """The units of a model in an encoding.

    Args:
        quantisation: ``fp32``, ``int8``, ``int4``, or ``stored``: see `motley.daemon.models.holding`.
        block: elements along K per scale, one of `BLOCKS`, of what is quantised while loading; a matrix whose cuts do
            not allow it gets the largest smaller one, and so does the down projection of a small model, to have `FINE`
            units. Ignored in fp32.
        stored: how the checkpoint stores each matrix; None: as floats.
        exact: cuts must fall on the leaves of the tree of sums.

    Raises:
        ConfigError: no such encoding or block, or a width of the model is no multiple of the smallest block.
    """
    if quantisation not in QUANTISATIONS:
        raise ConfigError(f"quantisation {quantisation!r} is not supported; supported: {', '.join(QUANTISATIONS)}")
    if quantisation != Encoding.FP32 and block not in BLOCKS:
        raise ConfigError(f"quantisation block {block} is not supported; supported: {BLOCKS}")
    fused = [
        (inner, names, wanted_format([(stored or {}).get(name, FLOATS) for name in names], quantisation, block))
        for inner, names in fused_matrices(config)
    ]
    splits = [split for split in range(1, config.group + 1) if config.group % split == 0]
    if quantisation == Encoding.FP32:
        widths, least = [width for width in range(1, WIDEST + 1) if config.intermediate % width == 0], 1
    else:
        together = max(blocks_together(form) for _, _, form in fused)
        splits = [split for split in splits if _attention_columns(config, split) % (BLOCKS[0] * together) == 0]
        down = [form for inner, _, form in fused if inner is Inner.MLP]
        widest = max(WIDEST, *(form.block * together for form in down))
        widths = [size for size in BLOCKS if size <= widest and config.intermediate % size == 0][together - 1 :]
        fine_enough = max(NARROW, config.intermediate // FINE)
        least = max((size for size in widths if size <= min(block, fine_enough)), default=1)
    fine = [width for width in widths if config.intermediate // width >= FINE]
    mlp_columns = max(least, fine[-1] if fine else widths[0] if widths else config.intermediate)
    cuts = {
        Inner.HIDDEN: (config.hidden, "hidden_size"),
        Inner.HEADS: (_attention_columns(config, splits[-1] if splits else 1), "heads per KV head * head_dim"),
        Inner.MLP: (mlp_columns, "intermediate_size"),
    }
    vocabulary_rows = min(WIDEST, _power_of_two_up_to(max(1, config.vocabulary // FINE)))
    kv_groups, mlp = config.kv_heads, config.intermediate // mlp_columns
    if exact:
        vocabulary_rows = max(vocabulary_rows, EXACT_ROWS)
        kv_groups, mlp = min(kv_groups, LEAVES), min(mlp, LEAVES)
        finest = max((split for split in splits if config.kv_heads * split <= LEAVES), default=1)
        splits = [split for split in splits if finest % split == 0]
    return Units(
        kv_groups=kv_groups,
        attention_splits=tuple(splits),
        mlp=mlp,
        mlp_columns=mlp_columns,
        vocabulary=-(-config.vocabulary // vocabulary_rows),
        vocabulary_rows=vocabulary_rows,
        held={name: held for inner, names, form in fused for held in [narrowed(form, *cuts[inner])] for name in names},
        exact=exact,
    )


def validate_shares(units: Units, shares: Sequence[Share]) -> None:
    """Check that the ranks' ranges tile the model in rank order.

    Raises:
        ShareError: naming the rank and the range that does not fit.
    """
    if not shares:
        raise ShareError("a session has at least one rank")
    split = shares[0].attention_split
    if split not in units.attention_splits:
        allowed = ", ".join(map(str, units.attention_splits))
        raise ShareError(f"attention split {split} is not possible for this model; possible: {allowed}")
    for rank, share in enumerate(shares):
        if share.attention_split != split:
            raise ShareError(f"rank {rank} splits KV groups by {share.attention_split}, rank 0 by {split}")
    _tile("attention", [share.attention for share in shares], units.kv_groups * split)
    _tile("mlp", [share.mlp for share in shares], units.mlp)
    _tile("vocabulary", [share.vocabulary for share in shares], units.vocabulary)


def _tile(what: str, ranges: list[range], total: int) -> None:
    for rank, own in enumerate(ranges):
        if own.step != 1 or own.stop < own.start:
            raise ShareError(f"{what} units of rank {rank} are no range of units: {own}")
    if ranges[0].start != 0:
        raise ShareError(f"{what} units of rank 0 start at {ranges[0].start}, not at 0")
    for rank, (one, other) in enumerate(pairwise(ranges)):
        if one.stop != other.start:
            raise ShareError(
                f"{what} units of rank {rank} stop at {one.stop}, those of rank {rank + 1} start at {other.start}"
            )
    if ranges[-1].stop != total:
        raise ShareError(f"{what} units of the last rank stop at {ranges[-1].stop}; the model has {total}")


def _attention_columns(config: ModelConfig, split: int) -> int:
    return config.group // split * config.head_dim


def _power_of_two_up_to(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
