"""A model's files, opened by what they are: a Hugging Face folder with safetensors, or a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from motley.daemon.models import config
from motley.daemon.models.config import ModelConfig
from motley.daemon.models.gguf_config import gguf_config
from motley.daemon.models.tensors import expected_shapes
from motley.daemon.weights.checkpoint import Checkpoint
from motley.daemon.weights.gguf_checkpoint import GgufCheckpoint

if TYPE_CHECKING:
    from motley.daemon.text import Tokenizer


@dataclass(frozen=True)
class OpenModel:
    """Config and weights."""

    config: ModelConfig
    source: Checkpoint


def open_weights(path: Path) -> Checkpoint:
    """Open a model's weights.

    Raises:
        CheckpointError: they are absent or broken.
    """
    return GgufCheckpoint(path) if path.is_file() else Checkpoint(path)


def read_config(path: Path) -> ModelConfig:
    """Read a model's config.

    Raises:
        ConfigError: the config is absent or broken, or asks for something that is not supported.
        CheckpointError: a GGUF file is broken.
    """
    if not path.is_file():
        return config.read_config(path)
    with GgufCheckpoint(path) as checkpoint:
        return gguf_config(checkpoint)


@contextmanager
def open_model(path: Path) -> Iterator[OpenModel]:
    """Open a model, and make sure that its weights are what its config says.

    Raises:
        ConfigError: the config is absent or broken, or asks for something that is not supported.
        CheckpointError: the weights are absent or broken, or do not fit the config.
    """
    with open_weights(path) as source:
        of_model = gguf_config(source) if isinstance(source, GgufCheckpoint) else config.read_config(path)
        source.expect(expected_shapes(of_model))
        yield OpenModel(of_model, source)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a model's tokenizer.

    Raises:
        TokenizerError: there is none, or one that is broken or not supported.
    """
    from motley.daemon.gguf_text import load_gguf_tokenizer  # late: workers need no tokenizer
    from motley.daemon.text import Tokenizer

    return load_gguf_tokenizer(path) if path.is_file() else Tokenizer.load(path)
