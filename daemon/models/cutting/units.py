"""How a model can be cut: its units and quantisation blocks. They depend on the model alone, never on the shares.

A matrix is quantised in blocks along its inner dimension K. Cutting rows (q, k, v, gate, up, head) leaves blocks
alone. Cutting columns (output and down projections) must fall between blocks, so their block divides the width of
the finest unit: the quantised values are then the same however the model is cut. A checkpoint's own blocks are never in
the way of a cut: a block is held as several of the same scale where need be.

A model with experts has MLPs of several widths: the experts', all alike, the shared expert's, and that of layers
without experts. They have the same number of units: a unit is some columns of each of them.

Ranks of one session may hold the model in different quantisations. Their units are the same, and suit all of them: what
may not be cut in one of them is whole in all.

In *exact* mode units are coarser: they fall on the leaves of the tree in which the output and down projections are
summed (see `motley.daemon.models.cutting.tree`). A leaf is a matmul of its own, so there are few. Blocks are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from motley.daemon.models.cutting.holding import (
    FLOATS,
    QUANTISATIONS,
    STORED,
    UNQUANTISED,
    Formats,
    blocks_together,
    narrowed,
    wanted_format,
)
from motley.daemon.models.cutting.share import Share, ShareError
from motley.daemon.models.description.axes import Axis, Heads, Kind
from motley.daemon.models.description.model import Model, products
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.description.operations.recurrence import DeltaRule, ShortConvolution, StateSpace
from motley.daemon.models.description.operations.rows import Linear
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.places import numbered
from motley.daemon.weights.stored import Format
from motley.protocol import BLOCKS

FINE = 32
"""Units that a matrix should at least be cut in, so that shares can follow the ranks' speeds closely."""
NARROW = 32
"""Blocks are not made narrower than this only to have fine units."""
WIDEST = 128
"""Columns or rows that a unit has at most, unless the quantisation block is wider."""
LEAVES = 8
"""Leaves that the attention and the MLP of a layer have at most in exact mode: each costs a decode step some 8 us."""
EXPERT_LEAF = 128
"""Columns of an expert that a leaf has at least in exact mode, but there are two: a narrower product costs as much."""
EXACT_ROWS = 16
"""Rows of the head that a unit has at least in exact mode: kernels compute tiles of columns, and the rest otherwise."""


@dataclass(frozen=True)
class Units:
    """The units of a model and how its matrices are held.

    Attributes:
        kv_groups: KV heads, each with the query heads that read it; where layers differ, as many as the layer with
            most has; each has as many key heads of a layer with a recurrent state as any other. In exact mode, runs of
            neighbouring KV heads where there are more than `LEAVES`.
        attention_splits: into how many units a KV group may be cut, ascending, the first is 1. In exact mode the
            others divide the last, whose units are the leaves.
        mlp: runs of blocks of MLP columns; of one block each, unless in exact mode or where others are wider.
        mlp_blocks: columns of a block, by the columns of an MLP.
        vocabulary: blocks of `vocabulary_rows` rows of the head; the last may be shorter.
        held: every matrix of the graph by its tensor's name. Blocks of output projections divide the columns of the
            finest attention unit, those of down projections `mlp_blocks`. What is absent is float32.
    """

    kv_groups: int
    attention_splits: tuple[int, ...]
    mlp: int
    mlp_blocks: Mapping[int, int]
    vocabulary: int
    vocabulary_rows: int
    held: Formats
    exact: bool = False

    def query_heads(self, attention: range, split: int, heads: Heads) -> range:
        """The query heads of a layer that some attention units have at a split of the KV groups."""

        def first(unit: int) -> int:
            group, part = divmod(unit, split)
            if heads.keys < self.kv_groups:  # several groups of units share a KV head
                each = heads.queries // self.kv_groups
                return each * group + each * part // split
            begin, end = (heads.keys * at // self.kv_groups * heads.group for at in (group, group + 1))
            return begin + (end - begin) * part // split

        return range(first(attention.start), first(attention.stop))

    def columns(self, mlp: range, width: int) -> range:
        """The columns of some MLP units in an MLP of `width` columns."""
        block = self.mlp_blocks[width]
        blocks = width // block
        return range(*(blocks * bound // self.mlp * block for bound in (mlp.start, mlp.stop)))


def units(
    model: Model,
    quantisation: str,
    block: int,
    stored: Formats | None = None,
    exact: bool = False,
    beside: Collection[str] = (),
) -> Units:
    """The units of a model in an encoding.

    Args:
        quantisation: ``fp32``, ``fp16``, ``int8``, ``int4``, or ``stored``: see `motley.daemon.models.cutting.holding`.
        block: elements along K per scale, one of `BLOCKS`, of what is quantised while loading; a matrix whose cuts do
            not allow it gets the largest smaller one, and so does the down projection of a small model, to have `FINE`
            units. Ignored in fp32 and fp16.
        stored: how the checkpoint stores each matrix; None: as floats.
        exact: cuts must fall on the leaves of the tree of sums.
        beside: other quantisations, in which other ranks hold the model: the units suit them too.

    Raises:
        ConfigError: no such encoding or block, or a width of the model is no multiple of the smallest block; exact, and
            the model is held in several quantisations; layers whose heads cannot be cut alike.
    """
    everyone = {quantisation, *beside}
    for name in everyone.difference(QUANTISATIONS):
        raise ConfigError(f"quantisation {name!r} is not supported; supported: {', '.join(QUANTISATIONS)}")
    blocked = sorted(everyone.difference(UNQUANTISED))
    if blocked and block not in BLOCKS:
        raise ConfigError(f"quantisation block {block} is not supported; supported: {', '.join(map(str, BLOCKS))}")
    if exact and len(everyone) > 1:
        raise ConfigError(f"exact=true needs one quantisation on all ranks, not {' and '.join(sorted(everyone))}")
    matrices = list(fused_matrices(model))
    fused = {name: _wanted(matrices, name, block, stored or {}) for name in everyone}
    in_blocks = [matrix for name in blocked for matrix in fused[name]]
    together = max((blocks_together(form) for _, _, form in in_blocks), default=1)
    attentions, most = _attentions(model)
    kv_groups = most
    inner_axes = list(_inner_axes(model))
    outputs = [axis.heads for axis in inner_axes if axis.heads is not None]
    splits = _splits(outputs, attentions, most, BLOCKS[0] * together if blocked else 1)
    blocks = {}
    for columns in dict.fromkeys(axis.size for axis in inner_axes if axis.kind is Kind.MLP):
        down = [form for inner, _, form in in_blocks if inner.kind is Kind.MLP and inner.size == columns]
        blocks[columns] = _mlp_block(columns, down, block, together)
    finest = splits[-1] if splits else 1

    def cut_width(inner: Axis) -> int:
        """Cuts of this input axis fall on multiples of so many elements, in exact mode too."""
        if inner.kind is Kind.MLP:
            return blocks[inner.size]
        return _attention_columns(inner.heads, most, finest) if inner.heads else inner.size

    vocabulary_rows = min(WIDEST, _power_of_two_up_to(max(1, model.vocabulary // FINE)))
    mlp = min(columns // block for columns, block in blocks.items())
    if exact:
        vocabulary_rows = max(vocabulary_rows, EXACT_ROWS)
        kv_groups, mlp = _leaf_groups(attentions, most), min(mlp, LEAVES)
        routed = [axis.size for axis in inner_axes if axis.routed]
        if routed:
            mlp = min(mlp, max(2, min(routed) // EXPERT_LEAF))
        finest_leaf = max((split for split in splits if most * split <= LEAVES), default=1)
        splits = [split for split in splits if finest_leaf % split == 0]
    return Units(
        kv_groups=kv_groups,
        attention_splits=tuple(splits),
        mlp=mlp,
        mlp_blocks=blocks,
        vocabulary=-(-model.vocabulary // vocabulary_rows),
        vocabulary_rows=vocabulary_rows,
        held={
            name: held
            for inner, names, form in fused[quantisation]
            for held in [narrowed(form, cut_width(inner), inner.called)]
            for name in names
        },
        exact=exact,
    )


def fused_matrices(model: Model) -> Iterator[tuple[Axis, tuple[str, ...]]]:
    """The matrices that a model multiplies with, by input axis; those that are one product, together."""
    for product, expert in products(model):
        inner = product.ws[0].in_
        assert inner is not None
        yield inner, tuple(numbered(w.name, expert) for w in product.ws)


def _wanted(
    matrices: Sequence[tuple[Axis, tuple[str, ...]]], quantisation: str, block: int, stored: Formats
) -> list[tuple[Axis, tuple[str, ...], Format]]:
    """How each of `fused_matrices` should be held, before cuts are taken into account."""
    if quantisation != STORED:
        form = wanted_format((), quantisation, block)
        return [(inner, names, form) for inner, names in matrices]
    return [
        (inner, names, wanted_format([stored.get(each, FLOATS) for each in names], quantisation, block))
        for inner, names in matrices
    ]


def _inner_axes(model: Model) -> Iterator[Axis]:
    """The input axes of all products."""
    for each in model.operations:
        if isinstance(each, Linear) and each.ws[0].in_ is not None:
            yield each.ws[0].in_


def _attentions(model: Model) -> tuple[list[Heads], int]:
    """The heads of each kind of attention that the model has, then the key heads of each kind of recurrence; and how
    many KV heads an attention has at most.

    Raises:
        ConfigError: they cannot be cut alike.
    """
    operations = list(model.operations)
    kinds = list(dict.fromkeys(each.heads for each in operations if isinstance(each, Attend)))
    convolved = [each.filter.out.heads for each in operations if isinstance(each, ShortConvolution)]
    recurrent = dict.fromkeys(each.heads for each in operations if isinstance(each, DeltaRule | StateSpace))
    if not kinds:
        raise ConfigError("a model without attention is not supported")
    most = max(heads.keys for heads in kinds)
    kinds = list(dict.fromkeys([*kinds, *filter(None, convolved)]))
    for heads in kinds:
        if most % heads.keys or heads.queries % most:
            raise ConfigError(
                f"layers of {most} and of {heads.keys} KV heads (with {heads.queries} query heads) cannot be cut alike"
            )
    for each in recurrent:
        if each.keys % most:
            raise ConfigError(
                f"layers of {most} KV heads and layers with a recurrent state of {each.keys} key heads cannot be cut"
                " alike"
            )
    return [*kinds, *(each.per_key(each.group * each.value_size) for each in recurrent)], most


def _leaf_groups(attentions: Sequence[Heads], most: int) -> int:
    """Runs of KV heads in exact mode: of any lengths, or of equal ones if layers have unlike heads."""
    if len(attentions) == 1:
        return min(most, LEAVES)
    return max(count for count in range(1, LEAVES + 1) if most % count == 0)


def _splits(outputs: Collection[Heads], attentions: Collection[Heads], kv_groups: int, multiple: int) -> list[int]:
    """Into how many parts the query heads of a KV group can be cut in every layer, so that what a part has of the
    output projection's columns is a multiple of a number.

    Args:
        outputs: the heads that output projections read.
        attentions: those that are not cut apart, of which a group of KV heads may have fewer.
    """
    most = max(heads.queries // kv_groups for heads in outputs)
    return [
        split
        for split in range(1, most + 1)
        if all(heads.queries // kv_groups % split == 0 for heads in {*outputs, *attentions})
        and all(_attention_columns(heads, kv_groups, split) % multiple == 0 for heads in set(outputs))
    ]


def _mlp_block(columns: int, down: Sequence[Format], block: int, together: int) -> int:
    """Columns of the blocks that an MLP of so many columns is cut in.

    Args:
        down: how its down projections should be held, in each quantisation; empty: as floats alone.
        together: as many quantisation blocks may not be parted.
    """
    if not down:
        widths, least = [width for width in range(1, WIDEST + 1) if columns % width == 0], 1
    else:
        widest = max(WIDEST, *(form.block * together for form in down))
        widths = [size for size in BLOCKS if size <= widest and columns % size == 0][together - 1 :]
        fine_enough = max(NARROW, columns // FINE)
        least = max((size for size in widths if size <= min(block, fine_enough)), default=1)
    fine = [width for width in widths if columns // width >= FINE]
    return max(least, fine[-1] if fine else widths[0] if widths else columns)


def validate_shares(units: Units, shares: Sequence[Share], *, head: bool = True) -> None:
    """Check that the ranges of ranks that share the same layers tile these in rank order.

    Args:
        head: whether they have the head, too; else nobody may have units of the vocabulary.

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
    if head:
        _tile("vocabulary", [share.vocabulary for share in shares], units.vocabulary)
    elif any(share.vocabulary for share in shares):
        raise ShareError("ranks have units of the vocabulary whose stage does not have the head")


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


def _attention_columns(heads: Heads, kv_groups: int, split: int) -> int:
    """Columns of the output projection that one attention unit has."""
    return heads.queries // kv_groups // split * heads.size


def _power_of_two_up_to(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
