"""A model's files, opened: its config, its weights, and how they are stored, which fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from motley.daemon.models.config import ModelConfig, read_config, read_packing
from motley.daemon.models.holding import Formats
from motley.daemon.models.tensors import expected_shapes, fused_matrices
from motley.daemon.weights.checkpoint import Checkpoint, CheckpointError
from motley.daemon.weights.packed import PackedCheckpoint
from motley.daemon.weights.stored import Source


@dataclass(frozen=True)
class OpenModel:
    """Config, weights, and how each matrix that the model multiplies with is stored."""

    config: ModelConfig
    source: Source
    stored: Formats


def open_weights(folder: Path) -> Source:
    """Open a model's weights, packed or not.

    Raises:
        ConfigError: they are packed in a way that cannot be read.
        CheckpointError: they are absent or broken.
    """
    packing = read_packing(folder)
    if packing is not None:
        return PackedCheckpoint(folder, packing)
    plain = Checkpoint(folder)
    if packed := [name for name in plain.names() if name.endswith(".qweight")]:
        plain.close()
        raise CheckpointError(f"{folder}: {packed[0]!r} is packed, but config.json has no quantization_config for it")
    return plain


@contextmanager
def open_model(folder: Path) -> Iterator[OpenModel]:
    """Open the model in a folder, and make sure that its weights are what its config says.

    Raises:
        ConfigError: the config is absent or broken, or asks for something that is not supported.
        CheckpointError: the weights are absent or broken, or do not fit the config.
    """
    config = read_config(folder)
    with open_weights(folder) as source:
        source.expect(expected_shapes(config))
        stored = {name: source.format(name) for _, names in fused_matrices(config) for name in names}
        yield OpenModel(config, source, stored)
