"""A model's files, opened by what they are: a Hugging Face folder with safetensors, packed or not, or a GGUF file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from motley.daemon.models import reading
from motley.daemon.models.cutting.holding import Formats
from motley.daemon.models.cutting.units import fused_matrices
from motley.daemon.models.description.hashed_rows import I64, HashedRows, with_those_before
from motley.daemon.models.description.model import Model, expected_shapes, tensors
from motley.daemon.models.gguf.keys import gguf_model
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.packing_keys import PACKINGS, read_packing
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.checkpoint import GgufCheckpoint
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring, TensorFiles
from motley.daemon.weights.located import Located
from motley.daemon.weights.stored import Source
from motley.plugins.engine import F32

if TYPE_CHECKING:
    from motley.daemon.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenModel:
    """A model's description, its weights, and how each matrix that it multiplies with is stored."""

    model: Model
    source: Source
    stored: Formats

    def rows(self, tokens: Sequence[int], recent: I64 | None = None, layers: range | None = None) -> F32:
        """What a step of some tokens begins with: f32[T, D], their embeddings, and behind them the rows of
        `Model.beside`, the first one for tokens beyond it, or those of `Model.hashed`.

        Args:
            recent: i64[T, `Model.recent` + 1]: each token and those before it, see `HashedRows.numbers`; None: the
                tokens are those that a sequence begins with.
            layers: of the first stage; None: there are no others.

        Raises:
            IndexError: there is no such token.
            CheckpointError: a file cannot be read (any more).
        """
        embeddings, beside = self.source.rows(self.model.embedding.name, tokens), self.model.beside
        if beside is not None:
            there = [token if token < beside.out.size else 0 for token in tokens]
            return np.concatenate([embeddings, self.source.rows(beside.name, there)], axis=1)
        return self.with_hashed(embeddings, tokens, recent, layers)

    def with_hashed(self, rows: F32, tokens: Sequence[int], recent: I64 | None, layers: range | None) -> F32:
        """Rows that enter a stage, and behind them those of `Model.hashed` that some layers are given; see `rows`."""
        hashed = [own for own in self.model.hashed if layers is None or own.layer in layers]
        if not hashed:
            return rows
        if recent is None:
            recent = with_those_before(np.array(tokens, np.int32), 0, len(tokens), self.model.recent)
        return np.concatenate([rows, *(self._hashed(own, recent) for own in hashed)], axis=1)

    def _hashed(self, rows: HashedRows, recent: I64) -> F32:
        """f32[T, N]: what some tokens need of a table; errors as `rows`."""
        numbers = rows.numbers(recent).reshape(-1)
        stops = np.cumsum([part.out.size for part in rows.parts])
        owners = np.searchsorted(stops, numbers, side="right")
        found = np.empty((len(numbers), rows.parts[0].shape[1]), np.float32)
        for owner in np.unique(owners):
            own, part = owners == owner, rows.parts[owner]
            found[own] = self.source.rows(part.name, (numbers[own] - (stops[owner] - part.out.size)).tolist())
        return found.reshape(len(recent), -1)


def open_weights(path: Path, bring: Bring | None = None) -> TensorFiles:
    """Open a model's weights.

    Args:
        bring: what brings their bytes here, where not all of them are.

    Raises:
        ConfigError: they are packed in a way that cannot be read.
        CheckpointError: they are absent or broken.
    """
    if path.is_file():
        return GgufCheckpoint(path, bring)
    packing = read_packing(path)
    checkpoint = packing.open(path, bring) if packing else SafetensorsCheckpoint(path, bring)
    endings = packing.endings if packing else tuple(ending for each in PACKINGS for ending in each.endings)
    packed = next((name for name in checkpoint.names() if name.endswith(endings)), None)
    if packing is None and packed is not None:
        problem = f"{packed!r} is packed, but config.json has no quantization_config for it"
    elif packing is not None and packed is None:
        problem = (
            f"config.json's quantization_config says {packing.called}, but no tensor is packed (X{endings[0]}): take "
            "the files that belong to it, or remove it if the weights are meant to be floats"
        )
    else:
        return checkpoint
    checkpoint.close()
    raise CheckpointError(f"{path}: {problem}")


def read_model(path: Path) -> Model:
    """Read a model's description, from the config of a folder or the metadata of a GGUF file.

    Raises:
        ConfigError: the config is absent or broken, or asks for something that is not supported.
        CheckpointError: a GGUF file is broken.
    """
    if not path.is_file():
        return reading.read_model(path)
    with GgufCheckpoint(path) as checkpoint:
        return gguf_model(checkpoint)


@contextmanager
def open_model(path: Path, bring: Bring | None = None, *, ahead: bool = False) -> Iterator[OpenModel]:
    """Open a model, and make sure that its weights are what its config says.

    Args:
        bring: as `open_weights` has it.
        ahead: not the model, but its head that predicts a token further ahead.

    Raises:
        ConfigError: the config is absent or broken, or asks for something that is not supported.
        CheckpointError: the weights are absent or broken, or do not fit the config.
    """
    with open_weights(path, bring) as files:
        if ahead and isinstance(files, GgufCheckpoint):
            raise ConfigError(
                f"{path}: of a GGUF file no head is read that predicts tokens further ahead; take the model's folder of"
                " safetensors, another draft model, or none"
            )
        model = gguf_model(files) if isinstance(files, GgufCheckpoint) else reading.read_model(path, ahead)
        source = Located(files, tensors(model))
        try:
            source.expect(expected_shapes(model))
        except CheckpointError as error:
            if not ahead:
                raise
            raise CheckpointError(
                f"{path}: these files lack the head that predicts tokens further ahead, as many quantised ones do, or"
                f" have another than their config says; take another draft model, or none:\n{error}"
            ) from error
        if isinstance(files, SafetensorsCheckpoint):  # of a GGUF file, whoever describes it looks at all names
            trunks = ("model.", *model.prefixes)
            ignored = [trunk + name.removeprefix("model.") for trunk in trunks for name in model.ignored]
            source.refuse_others(trunks, sys.maxsize if ahead else len(model.layers), ignored)
        stored = {name: source.format(name) for _, names in fused_matrices(model) for name in names}
        yield OpenModel(model, source, stored)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a model's tokenizer.

    Raises:
        TokenizerError: there is none, or one that is broken or not supported.
    """
    from motley.daemon.text.gguf_tokenizer import load_gguf_tokenizer  # late: workers need no tokenizer
    from motley.daemon.text.tokenizer import Tokenizer

    return load_gguf_tokenizer(path) if path.is_file() else Tokenizer.load(path)
