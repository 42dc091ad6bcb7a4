"""What quantised weights cost: the error of weights, and how much worse a model foresees a text.

Weights are random: *gaussian*, and *heavy-tailed* (Student's t with 5 degrees of freedom), as trained ones lie between
the two. A model reads a text in one step, by the CPU engine in FP32, with its matrices replaced by what their codes
stand for; its embedding is read as it is. Codes are ours (`motley.daemon.weights.quantise`) or, to compare, those of
rounding to nearest with the scale of each block's largest value over -8. The bundled models were trained on plays: the
text is none they know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import numpy as np

from motley.bench.measurements.accuracy.drift import even_shares, execute, layer_graph, on_disk, refuse_whole
from motley.bench.measurements.accuracy.reading import POSITIONS, TEXT, divergences, log_softmax, with_head
from motley.bench.meshes.thread_mesh import thread_mesh
from motley.daemon.models.cutting.units import fused_matrices
from motley.daemon.models.description.model import Model, tensors
from motley.daemon.models.files import load_tokenizer, open_model, open_weights
from motley.daemon.weights.checkpoints.tensor_files import TensorFiles
from motley.daemon.weights.located import Located
from motley.daemon.weights.quantise import quantise
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import Codes, Format, dequantised
from motley.plugins.engine import F32

WEIGHTS = ("gaussian", "heavy-tailed")
BLOCKS = (32, 64)
NEAREST = "int4, nearest"
FORMATS = (Encoding.INT8, Encoding.INT4, NEAREST)
_ROWS, _COLUMNS = 512, 2048


@dataclass(frozen=True)
class WeightError:
    """The root mean square error of weights, in percent of their root mean square."""

    format: str
    block: int
    weights: str
    percent: float


@dataclass(frozen=True)
class Foresight:
    """How well a model foresees a text with weights of a format; ``fp32`` has no blocks.

    Rows that blocks of this size do not divide are in blocks of the largest that does.

    Attributes:
        mean_kl: the Kullback-Leibler divergence from the distributions with weights as they are stored, in nats.
    """

    format: str
    block: int
    positions: int
    perplexity: float
    mean_kl: float


def rounded(values: F32, form: str, block: int) -> F32:
    """What the codes of rows stand for, of one of `FORMATS`."""
    if form != NEAREST:
        encoding = Encoding(form)
        return dequantised(Codes(*quantise(values, block, encoding)), Format(encoding, block))
    blocks = values.reshape(-1, block)
    peaks = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)][:, None]
    scales = np.where(peaks == 0, np.float32(1), peaks) / np.float32(-8)
    nearest: F32 = (np.clip(np.floor(blocks / scales + np.float32(0.5)), -8, 7) * scales).astype(np.float32)
    return nearest.reshape(values.shape)


def measure_weight_errors() -> list[WeightError]:
    """The error of every format, with blocks of two sizes."""
    random = np.random.default_rng(0)
    shape = _ROWS, _COLUMNS
    drawn = {"gaussian": random.standard_normal(shape), "heavy-tailed": random.standard_t(5, shape)}
    errors = []
    for kind, values in drawn.items():
        matrix = values.astype(np.float32)
        for form in FORMATS:
            for block in BLOCKS:
                lost = np.linalg.norm(rounded(matrix, form, block) - matrix) / np.linalg.norm(matrix)
                errors.append(WeightError(str(form), block, kind, 100 * float(lost)))
    return errors


def measure_foresight(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[Foresight]:
    """Have a model (a folder, or a GGUF file) read a text with its matrices in every format.

    Args:
        progress: called with the layers done and all of them.

    Raises:
        ConfigError, CheckpointError, TokenizerError, ShareFileError: the model cannot be run.
    """
    with open_model(folder) as opened, open_weights(folder) as files, thread_mesh(1) as alone:
        model, source = opened.model, opened.source
        refuse_whole(folder, model)
        tokens = load_tokenizer(folder).encode(TEXT)[: min(POSITIONS, model.context)]
        kinds: list[tuple[str, int]] = [("fp32", 0), *((str(form), block) for form in FORMATS for block in BLOCKS)]
        states: dict[tuple[str, int], F32] = dict.fromkeys(kinds, source.rows(model.embedding.name, tokens))
        share, layers = even_shares(model, 1), len(model.layers)
        for layer in range(layers):
            progress(layer, layers)
            part = with_head if layer == layers - 1 else layer_graph
            for kind, state in states.items():
                held = source if kind == kinds[0] else _Rounded(files, model, *kind)
                with on_disk(held, [part(model, share, 0, layer, len(tokens))]) as graphs:
                    states[kind] = execute(graphs, alone, state)
        progress(layers, layers)
    return list(_foresights(states, tokens))


def _foresights(states: dict[tuple[str, int], F32], tokens: list[int]) -> Iterator[Foresight]:
    right = log_softmax(states["fp32", 0])
    for (form, block), logits in states.items():
        got = log_softmax(logits)
        surprise = -got[np.arange(len(tokens) - 1), tokens[1:]].mean()
        divergence = divergences(right, got)
        yield Foresight(form, block, len(tokens), float(np.exp(surprise)), float(divergence.mean()))


class _Rounded(Located):
    """A model's tensors, of which the matrices that it multiplies with are what their codes stand for."""

    def __init__(self, files: TensorFiles, model: Model, form: str, block: int) -> None:
        super().__init__(files, tensors(model))
        self._matrices = frozenset(name for _, names in fused_matrices(model) for name in names)
        self._form, self._block = form, block

    def read(self, piece: Piece) -> F32:
        values = super().read(piece)
        if piece.tensor not in self._matrices:
            return values
        return rounded(values, self._form, gcd(self._block, values.shape[1]))
