"""How a model can be cut: its units and quantisation blocks. They depend on the model alone, never on the shares.

A matrix is quantised in blocks along its inner dimension K. Cutting rows (q, k, v, gate, up, head) leaves blocks
alone. Cutting columns (output and down projections) must fall between blocks, so their block divides the width of
the finest unit: the quantised values are then the same however the model is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from motley.daemon.models.config import ConfigError, ModelConfig
from motley.daemon.models.share import Share, ShareError
from motley.daemon.weights.spec import Encoding

BLOCKS = (16, 32, 64, 128, 256)
FINE = 32
"""Units that a matrix should at least be cut in, so that shares can follow the ranks' speeds closely."""
NARROW = 32
"""Blocks are not made narrower than this only to have fine units."""
WIDEST = 128
"""Columns or rows that a unit has at most, unless the quantisation block is wider."""


@dataclass(frozen=True)
class Units:
    """The units of a model and the quantisation blocks they respect (0 in fp32).

    Attributes:
        kv_groups: KV heads, each with the query heads that read it.
        attention_splits: into how many units a KV group may be cut, ascending, the first is 1.
        mlp: blocks of `mlp_columns` MLP columns.
        vocabulary: blocks of `vocabulary_rows` rows of the head; the last may be shorter.
        hidden_block: along the residual's width (q, k, v, gate, up, head).
        output_block: along the heads (output projection).
        down_block: along the MLP columns (down projection).
    """

    kv_groups: int
    attention_splits: tuple[int, ...]
    mlp: int
    mlp_columns: int
    vocabulary: int
    vocabulary_rows: int
    encoding: Encoding
    hidden_block: int = 0
    output_block: int = 0
    down_block: int = 0


def units(config: ModelConfig, quantisation: str, block: int) -> Units:
    """The units of a model in an encoding.

    Args:
        quantisation: an `Encoding` by name.
        block: elements along K per scale, one of `BLOCKS`; a matrix whose cuts do not allow it gets the largest
            smaller one, and so does the down projection of a small model, to have `FINE` units. Ignored in fp32.

    Raises:
        ConfigError: no such encoding or block, or a width of the model is no multiple of the smallest block.
    """
    if quantisation not in list(Encoding):
        raise ConfigError(f"quantisation {quantisation!r} is not supported; supported: {', '.join(Encoding)}")
    encoding = Encoding(quantisation)
    splits = [split for split in range(1, config.group + 1) if config.group % split == 0]
    vocabulary_rows = min(WIDEST, _power_of_two_up_to(max(1, config.vocabulary // FINE)))
    if encoding is Encoding.FP32:
        hidden_block = output_block = down_block = 0
        widths = [width for width in range(1, WIDEST + 1) if config.intermediate % width == 0]
    else:
        if block not in BLOCKS:
            raise ConfigError(f"quantisation block {block} is not supported; supported: {BLOCKS}")
        splits = [split for split in splits if _attention_columns(config, split) % BLOCKS[0] == 0]
        hidden_block = _block(config.hidden, block, "hidden_size", quantisation)
        finest = _attention_columns(config, splits[-1] if splits else 1)
        output_block = _block(finest, block, "heads per KV head * head_dim", quantisation)
        fine_enough = max(NARROW, config.intermediate // FINE)
        down_block = _block(config.intermediate, min(block, fine_enough), "intermediate_size", quantisation)
        widths = [width for width in BLOCKS if width <= max(WIDEST, block) and config.intermediate % width == 0]
    fine = [width for width in widths if config.intermediate // width >= FINE]
    mlp_columns = max(down_block, fine[-1] if fine else widths[0])
    return Units(
        kv_groups=config.kv_heads,
        attention_splits=tuple(splits),
        mlp=config.intermediate // mlp_columns,
        mlp_columns=mlp_columns,
        vocabulary=-(-config.vocabulary // vocabulary_rows),
        vocabulary_rows=vocabulary_rows,
        encoding=encoding,
        hidden_block=hidden_block,
        output_block=output_block,
        down_block=down_block,
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


def _block(width: int, block: int, what: str, quantisation: str) -> int:
    """The largest block up to the one asked for that divides `width`."""
    fitting = [size for size in BLOCKS if size <= block and width % size == 0]
    if not fitting:
        raise ConfigError(
            f"quantisation {quantisation} needs {what} to be a multiple of {BLOCKS[0]}, and it is {width};"
            " use fp32 for this model"
        )
    return fitting[-1]


def _power_of_two_up_to(limit: int) -> int:
    return 1 << (limit.bit_length() - 1)
