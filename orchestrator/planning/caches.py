"""The KV caches of a session: how much they hold, and the blocks that every rank keeps them in. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from motley.orchestrator.planning.setup import Setup
from motley.protocol import CACHE_BLOCK, CACHE_STRETCH, SNAPSHOTS
from motley.protocol.mesh_pb2 import LayerCosts, ModelProfile

WINDOWS = 4
"""Layers with a window have room for at least so many sequences that are longer than it."""
WINDOWED_PART = 4
"""And for one in so many tokens of all sequences together: short ones, and prefixes, want more."""
MOST_STATES = 8
"""Sequences that may have a recurrent state at a time, at most: each takes as much as some thousand tokens' caches."""
STEP_ROWS = 256
"""Rows that a sequence may have in a step: besides its window, it needs room for these."""


@dataclass(frozen=True)
class Blocks:
    """The blocks in which each rank keeps keys and values, of all its layers and KV heads alike.

    Attributes:
        count: how many there are in memory.
        tokens: positions in each.
        on_disk: how many more each rank has on its disk.
        on_nodes: how many more each rank has on another node. Their numbers follow those on its disk.
        windowed: how many a layer with a window has in place of all these; 0: it has the same as other layers.
        window: the widest window of such layers, in positions.
        slots: how many sequences can have a recurrent state; 0: the model has none.
    """

    count: int
    tokens: int
    on_disk: int = 0
    on_nodes: int = 0
    windowed: int = 0
    window: int = 0
    slots: int = 0

    @property
    def room(self) -> int:
        """Tokens that all blocks in memory together have room for."""
        return self.count * self.tokens


@dataclass(frozen=True)
class Caches:
    """How much the KV caches of a session hold.

    Attributes:
        context: the longest sequence, in tokens.
        tokens: what all sequences together may have there, in memory.
        disk_tokens: what they may have besides on disks.
        node_tokens: what they may have besides on other nodes. All together they are at least `context`.
        sequences: how many there may be at a time.
    """

    context: int
    tokens: int
    disk_tokens: int = 0
    node_tokens: int = 0
    sequences: int = MOST_STATES

    @property
    def far_tokens(self) -> int:
        """What all sequences together may have outside of memory that ranks compute in."""
        return self.disk_tokens + self.node_tokens

    def blocks(self, whole: bool, window: int = 0) -> Blocks:
        """The blocks that hold as much, the same on every rank.

        Args:
            whole: some rank's engine can only have a sequence's whole cache in one block; none are elsewhere then.
            window: the widest of the model's layers, if these are to have fewer blocks where that is possible; else 0.
        """
        each = self.context if whole else CACHE_STRETCH if self.node_tokens else CACHE_BLOCK
        count, on_disk, on_nodes = (-(-own // each) for own in (self.tokens, self.disk_tokens, self.node_tokens))
        if not window:
            return Blocks(count, each, on_disk, on_nodes)
        every = count + on_disk + on_nodes
        a_sequence = -(-(window + STEP_ROWS) // each) + 1
        windowed = max(a_sequence, min(count, max(WINDOWS * a_sequence, every // WINDOWED_PART)))
        if windowed >= every:
            return Blocks(count, each, on_disk, on_nodes)
        return Blocks(count, each, on_disk, on_nodes, windowed, window)


def blocks_of(caches: Caches, profile: ModelProfile, setups: Collection[Setup]) -> Blocks:
    """The blocks of a session's caches, the same on ranks with these setups.

    Layers with a window have fewer if every rank's engine can give them fewer. They never have any elsewhere; so if all
    layers have a window and a part of the caches is to be elsewhere, they have the same.
    """
    whole = any(setup.has_whole_caches for setup in setups)
    spared = all(setup.keeps_windows for setup in setups)
    all_windowed = profile.windowed_bytes_per_token == profile.cache_bytes_per_token
    if caches.far_tokens and all_windowed and not profile.shared_cache_bytes_per_token:
        spared = False
    blocks = caches.blocks(whole, profile.window if spared else 0)
    return replace(blocks, slots=min(caches.sequences, MOST_STATES)) if profile.state_bytes else blocks


def with_tables(profile: ModelProfile, context: int) -> ModelProfile:
    """A model's costs with the rotary tables that every rank has for sequences of so many tokens."""
    costs = ModelProfile()
    costs.CopyFrom(profile)
    costs.fixed_bytes += profile.position_bytes * context
    return costs


def with_blocks(profile: ModelProfile, blocks: Blocks) -> ModelProfile:
    """A model's costs with these blocks, as if all layers had all of them: a token takes less if layers with a window
    have fewer. Its recurrent states are those of all slots, and those that are kept."""
    if not blocks.windowed and not blocks.slots:
        return profile
    costs = ModelProfile()
    costs.CopyFrom(profile)
    all_costs: list[ModelProfile | LayerCosts] = [costs, *costs.layer_costs]
    for each in all_costs:
        if blocks.windowed:
            windowed = -(-each.windowed_bytes_per_token * blocks.windowed // blocks.count)
            each.cache_bytes_per_token += windowed - each.windowed_bytes_per_token
        each.state_bytes *= blocks.slots * (1 + SNAPSHOTS)
    return costs
