"""Which versions of the protocol two machines speak, and whether they have one in common. Pure.

A schema only ever grows (fields keep their numbers), so machines of neighbouring versions understand each other, but
for what one would misread or wait for in vain: that is what `OLDEST` is raised for. A node tells both numbers in the
metadata of its stream, before anything else.
"""

from __future__ import annotations

VERSION = 10
"""Grows with every release that changes what nodes and the orchestrator say to each other. 10: a model is described by
its config alone (`ModelSpec.config_json`); a node may tell several versions (`NEWEST`); nodes train (`JobOrder`); a
model's own head guesses tokens (`ModelSpec.ahead`); caches are on disks and on other nodes at a time
(`Assignment.far_blocks_on_disk`)."""
OLDEST = 9
"""The oldest that is still spoken here. Raise it to `VERSION` with a change that an older one would misread."""
PROTOCOL = "motley-protocol"
"""The key of the oldest version that a node speaks, in decimal digits; nodes before version 4 have none. Orchestrators
of version 9 take no other number here than their own."""
NEWEST = "motley-newest"
"""The key of the newest; absent: it speaks one version only."""
_BY_CONFIG = 10
"""The version from which on a model can be described by its config alone."""
_READS_AHEAD = 10
"""The version from which on a model's head that predicts further ahead is told from the model."""
_TWO_TIERS = 10
"""The version from which on caches may be on disks and on other nodes at a time."""
_TRAINS = 10
"""The version from which on nodes take part in trainings."""


def told() -> tuple[tuple[str, str], tuple[str, str]]:
    """What a node tells in the metadata of its stream."""
    return (PROTOCOL, str(OLDEST)), (NEWEST, str(VERSION))


def disagreement(oldest: str, newest: str) -> str:
    """Why a node may not join that tells these versions; empty: it may.

    Args:
        oldest, newest: as in its metadata; empty where it tells none.
    """
    first = _read(oldest)
    last = _read(newest) if newest else first
    if last >= OLDEST and 0 < first <= VERSION:
        return ""
    theirs = str(first) if first == last else f"{first} to {last}"
    ours = str(VERSION) if OLDEST == VERSION else f"{OLDEST} to {VERSION}"
    older, name = ("the orchestrator", "its machine") if first > VERSION else ("this node", "this machine")
    return (
        f"this node speaks protocol version {theirs if first else 'before 4'}, the orchestrator version {ours}:"
        f" {older} has the older one; update {name}, with `pipx upgrade motley-mesh` or as `motley update` says there"
    )


def describes_by_config(version: int) -> bool:
    """Whether a node that speaks up to this version knows a model by its config alone."""
    return version >= _BY_CONFIG


def reads_ahead(version: int) -> bool:
    """Whether a node that speaks up to this version can have a model's own head guess tokens."""
    return version >= _READS_AHEAD


def has_two_tiers(version: int) -> bool:
    """Whether a node that speaks up to this version can have caches on its disk and on another node at a time."""
    return version >= _TWO_TIERS


def trains(version: int) -> bool:
    """Whether a node that speaks up to this version takes part in trainings on the mesh."""
    return version >= _TRAINS


def _read(told: str) -> int:
    return int(told) if told.isascii() and told.isdecimal() and len(told) < 9 else 0
