"""What narrow caches cost: how far the next-token distributions of a model move when its KV caches are fp16 or int8.

It is held against the one with caches in fp32, by the CPU engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from motley.bench.measurements.accuracy.reading import F64
from motley.bench.measurements.accuracy.ways import Moved, Way, foreseen
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.files import open_model
from motley.daemon.weights.spec import Encoding
from motley.orchestrator.planning.cutting.shares import cached_bytes
from motley.plugins.engine import CACHE_FORMATS


@dataclass(frozen=True)
class CacheError(Moved):
    """What caches in a format do to the distributions of the next token.

    Attributes:
        bytes_per_token: that keys and values take, over all layers.
    """

    format: str
    bytes_per_token: int


def measure_cache_formats(
    folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[CacheError]:
    """Have a model (a folder, or a GGUF file) read a text with caches of every format.

    Args:
        progress: called with the layers done and all of them.

    Raises:
        ConfigError, CheckpointError, TokenizerError, ShareFileError: the model cannot be run.
    """
    with open_model(folder) as opened:
        found = foreseen(folder, opened, {kept: Way(kept) for kept in CACHE_FORMATS}, progress)
        takes = {kept: profile(opened.model, Encoding.FP32, 0, cache_format=kept) for kept in CACHE_FORMATS}
    return [
        _error(kept, cached_bytes(takes[kept], range(takes[kept].kv_groups), 1), found[CACHE_FORMATS[0]], got)
        for kept, got in found.items()
    ]


def _error(kept: str, bytes_per_token: int, right: F64, got: F64) -> CacheError:
    """The error of log-probabilities f64[T, V]."""
    return CacheError(**asdict(Moved.between(right, got)), format=kept, bytes_per_token=bytes_per_token)
