"""Where llama.cpp has put rows and columns of matrices whose order it changes; all is undone while reading.

- In files of architectures whose rotation pairs neighbours (``INTERLEAVED``), the rows of every query and key head are
  interleaved; Hugging Face's pairs halves.
- In Qwen3.5's layers with a recurrent state, the value heads of a key head are not neighbours: first stands the first
  one of every key head, then the second one of each, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError

INTERLEAVED = ("arcee", "granite", "granitehybrid", "granitemoe", "llama", "mistral3", "smollm3")
"""The architectures in whose files the rows of a query or key head that are rotated together are neighbours."""
TILED = ("qwen35", "qwen35moe")
"""Those in whose files the value heads of a key head are not neighbours."""
_KV_HEADS = "attention.head_count_kv"
RECURRENT = ".linear_attn."
"""In the names of a layer's tensors that belong to its recurrent state."""


@dataclass(frozen=True)
class Interleaving:
    """Rows of heads, of which those that are rotated together are neighbours.

    Attributes:
        heads: by the module's name.
    """

    heads: Mapping[str, int]

    def rows(self, name: str, rows: Sequence[int], extent: int) -> Sequence[int]:
        """Where rows of a tensor (or elements of a vector) lie in the file's, which has `extent`."""
        heads = self.heads.get(name.split(".")[-2]) if "." in name else None
        if heads is None:
            return rows
        width = extent // heads
        wanted = np.asarray(rows, np.int64)
        head, half, pair = wanted // width, wanted % width // (width // 2), wanted % (width // 2)
        places: list[int] = (head * width + 2 * pair + half).tolist()
        return places

    def columns(self, name: str) -> int:
        """Columns that stay together where some of a matrix stand elsewhere; 0: none do."""
        return 0


@dataclass(frozen=True)
class Tiling:
    """Value heads that stand tiled over the key heads.

    Attributes:
        keys, values: how many heads of each.
        key_size, value_size: elements of a head.
    """

    keys: int
    values: int
    key_size: int
    value_size: int

    def rows(self, name: str, rows: Sequence[int], extent: int) -> Sequence[int]:
        """Where rows of a tensor (or elements of a vector) lie in the file's, which has `extent`."""
        module = name.partition(RECURRENT)[2].partition(".")[0]
        before = 2 * self.keys * self.key_size if module in ("in_proj_qkv", "conv1d") else 0
        if module in ("in_proj_qkv", "conv1d", "in_proj_z"):
            return self.places(rows, self.value_size, before)
        return self.places(rows, 1) if module in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else rows

    def columns(self, name: str) -> int:
        """Columns that stay together where some of a matrix stand elsewhere; 0: none do."""
        return self.value_size if name.endswith(f"{RECURRENT}out_proj.weight") else 0

    def places(self, wanted: Sequence[int], size: int, before: int = 0) -> list[int]:
        """Where elements lie of which each value head has `size`, after some that stay where they are."""
        own = np.asarray(wanted, np.int64)
        head, inner = np.divmod(own - before, size)
        key, number = np.divmod(head, self.values // self.keys)
        tiled = before + (number * self.keys + key) * size + inner
        found: list[int] = np.where(own < before, own, tiled).tolist()
        return found


def order_of(file: Path, metadata: Mapping[str, Any]) -> Interleaving | Tiling:
    """How the tensors of a file are ordered, from its metadata.

    Raises:
        CheckpointError: they do not count its heads.
    """
    architecture = str(metadata.get("general.architecture"))

    def sizes(*keys: str) -> list[int]:
        found = [metadata.get(f"{architecture}.{key}") for key in keys]
        if isinstance(found[-1], list) and keys[-1] == _KV_HEADS:  # with 0 for layers that do not attend
            found[-1] = max(found[-1], default=0)
        whole = [each for each in found if isinstance(each, int) and each > 0]
        if len(whole) < len(found):
            raise CheckpointError(f"{file}: {architecture}.{' and '.join(keys)} should count heads")
        return whole

    if architecture in TILED:
        keys, values, key_size, inner = sizes(
            "ssm.group_count", "ssm.time_step_rank", "ssm.state_size", "ssm.inner_size"
        )
        if values % keys or inner % values:
            raise CheckpointError(f"{file}: {architecture}.ssm.inner_size = {inner} is of no {values} heads of values")
        return Tiling(keys, values, key_size, inner // values)
    if architecture not in INTERLEAVED:
        return Interleaving({})
    heads = ["attention.head_count"]
    if f"{architecture}.{_KV_HEADS}" in metadata:
        heads.append(_KV_HEADS)
    counts = sizes(*heads)
    return Interleaving({"q_proj": counts[0], "k_proj": counts[-1]})
