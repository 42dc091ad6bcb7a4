"""Fetching of a model of the hub what some ranks will read of it, before they are started."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from motley.daemon.lending.hub_mirror import HubMirror, joined
from motley.daemon.lending.wire import Stretch
from motley.daemon.loading.planned import read_through
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.weights.share_file import read_share
from motley.protocol import CACHE_BLOCK

SMALL = 1 << 14
"""Bytes that are fetched when they are asked for: what else is read may depend on them."""


class _Noted:
    """Notes what is read of a mirror in place of fetching it: it reads as zeros, from the holes of the files."""

    def __init__(self, mirror: HubMirror) -> None:
        self._mirror = mirror
        self.wanted: defaultdict[Path, list[Stretch]] = defaultdict(list)

    def bring(self, file: Path, stretches: Sequence[Stretch]) -> None:
        """See `motley.daemon.weights.checkpoints.tensor_files.Bring`."""
        if sum(length for _, length in stretches) <= SMALL:
            self._mirror.bring(file, stretches)
        else:
            self.wanted[file].extend(joined(sorted(stretches)))


def pull_shares(
    mirror: HubMirror,
    shares: Sequence[Share],
    ranks: Sequence[int],
    held: Sequence[str],
    block: int,
    progress: Callable[[int, int], None],
) -> int:
    """Have here what some ranks' shares are made of.

    Args:
        shares: of every rank.
        ranks: those whose shares are wanted.
        held: the quantisations that shares may be held in.
        block: of quantisation, as it was asked for.
        progress: called with the bytes that have come and those that have to.

    Returns:
        the bytes that have come.

    Raises:
        LendingError: they do not come, or there is no room here.
        ConfigError, CheckpointError, ShareError: the model cannot be had, or not like that.
    """
    noted = _Noted(mirror)
    with open_model(mirror.place, noted.bring) as opened:
        opened.source.fingerprint()  # by which it is known where it is looked for
        for rank in ranks:
            declared = build_rank_graph(
                opened.model, shares, rank, held[0], block, CACHE_BLOCK, opened.stored, beside=held[1:]
            )
            read_share(opened.source, declared.weights)
            for table in opened.model.tables_of(declared.stage.layers):
                read_through(opened.source, table.name, lambda done, total: None)
    total = sum(mirror.missing_bytes(file, stretches) for file, stretches in noted.wanted.items())
    came = 0

    def more(size: int) -> None:
        nonlocal came
        came += size
        progress(came, total)

    for file, stretches in noted.wanted.items():
        mirror.bring(file, stretches, more)
    return mirror.fetched
