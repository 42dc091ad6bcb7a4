"""Golden models with heads that predict a token further ahead, which transformers does not have.

What such a head computes is written here once more, from what DeepSeek and vLLM say of it, on whole weights in float64;
only its decoder layer is the described one of a model of the family with one layer more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from motley.daemon.models.description.model import Model, expected_shapes
from motley.daemon.models.files import open_model
from motley.daemon.weights.spec import Piece
from tests.models.by_the_book import F64, layer_by_the_book
from tests.models.cases import Case, golden_case

Tensors = dict[str, npt.NDArray[Any]]
NEXTN = {
    "token": "model.layers.{number}.enorm",
    "row": "model.layers.{number}.hnorm",
    "both": "model.layers.{number}.eh_proj",
    "norm": "model.layers.{number}.shared_head.norm",
    "layer": "model.layers.{number}",
}
MTP = {
    "token": "mtp.pre_fc_norm_embedding",
    "row": "mtp.pre_fc_norm_hidden",
    "both": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}


@dataclass(frozen=True)
class Ahead:
    """How a golden model gets a head.

    Attributes:
        name: of the golden model.
        like: a layer of it that is of the kind of the head's.
        called: its modules in files.
        offset: what is added to the gains of its norms.
        types: what a config with a layer more says of its layers.
    """

    name: str
    like: int
    called: Mapping[str, str]
    offset: float = 0.0
    types: tuple[str, Sequence[str]] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def case(self) -> Case:
        return golden_case(self.name)

    @property
    def number(self) -> int:
        """Of the head's layer."""
        return len(self.case.model.layers)

    def module(self, what: str) -> str:
        """What a module of the head is called in files."""
        return self.called[what].format(number=self.number)


_LINEAR, _FULL = "linear_attention", "full_attention"
HEADS = [
    Ahead("glm4-moe", 1, NEXTN),
    Ahead("deepseek-v3", 1, NEXTN),
    Ahead("glm4-moe-lite", 0, NEXTN, types=("mlp_layer_types", ["sparse", "dense", "sparse"])),
    Ahead("qwen3-next", 3, MTP, 1.0, ("layer_types", [_LINEAR] * 3 + [_FULL] * 2)),
    Ahead("qwen3-5", 1, MTP, 1.0, ("layer_types", [_LINEAR, _FULL, _LINEAR, _FULL])),
    Ahead("qwen3-5-moe", 0, MTP, 1.0, ("layer_types", [_FULL, _LINEAR, _FULL])),
]


def tensors_of(case: Case) -> Tensors:
    """The tensors of a golden model, without what it may have of a head."""
    beyond = f"model.layers.{len(case.model.layers)}."
    whole = load_file(case.folder / "model.safetensors")
    return {name: value for name, value in whole.items() if not name.startswith(beyond)}


def head_of(ahead: Ahead, seed: int = 0) -> Tensors:
    """Random tensors of a head, by their names in files: of its layer, those of `like` in another order."""
    random, hidden = np.random.default_rng(seed), ahead.case.model.hidden
    like = f"model.layers.{ahead.like}."
    made: Tensors = {
        f"{ahead.module('layer')}.{name.removeprefix(like)}": random.permuted(value.astype(np.float32))
        for name, value in tensors_of(ahead.case).items()
        if name.startswith(like)
    }
    for norm in ("token", "row", "norm"):
        gains = random.normal(1 - ahead.offset, 0.3, hidden)
        made[f"{ahead.module(norm)}.weight"] = gains.astype(np.float32)
    both = random.normal(0, hidden**-0.5, (hidden, 2 * hidden))
    return made | {f"{ahead.module('both')}.weight": both.astype(np.float32)}


def write(folder: Path, case: Case, tensors: Tensors, **config: Any) -> Path:
    """A model folder like a golden one, with other tensors and keys."""
    folder.mkdir(parents=True)
    said = json.loads((case.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def ahead_by_the_book(ahead: Ahead, head: Tensors, rows: F64, tokens: Sequence[int], folder: Path) -> tuple[F64, F64]:
    """f64[T, V] and f64[T, D]: the logits of a head after some pairs, and what it hands itself of each.

    Args:
        head: its tensors.
        rows: f64[T, D], what the model has made of some tokens of a text, behind its last norm.
        tokens: those that follow them.
        folder: for a model with a layer more.
    """
    case, number = ahead.case, ahead.number
    layer = {name: value for name, value in head.items() if name.startswith(f"{ahead.module('layer')}.")}
    longer = {
        f"model.layers.{number}{name.removeprefix(ahead.module('layer'))}": value for name, value in layer.items()
    }
    own = [ahead.module(what) for what in ("token", "row", "both", "norm")]
    longer = {name: value for name, value in longer.items() if not name.startswith(tuple(own))}
    types = {} if ahead.types is None else {ahead.types[0]: ahead.types[1]}
    config = {"num_hidden_layers": number + 1, "num_nextn_predict_layers": 0, **types}
    with open_model(write(folder, case, tensors_of(case) | longer, **config)) as opened:
        weights = _weights(opened.model, opened.source.read)
        described = opened.model

    def norm(x: F64, module: str) -> F64:
        scaled = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + described.last_norm.epsilon)
        gain: F64 = scaled * (head[f"{ahead.module(module)}.weight"].astype(np.float64) + ahead.offset)
        return gain

    table = weights[described.embedding.name]
    both = np.concatenate([norm(table[list(tokens)], "token"), norm(rows, "row")], axis=1)
    entered = both @ head[f"{ahead.module('both')}.weight"].astype(np.float64).T
    made = layer_by_the_book(described, number, weights, entered)
    normed = norm(made, "norm")
    logits: F64 = normed @ weights[described.embedding.name if described.tied else "lm_head.weight"].T
    return logits, normed if ahead.called is MTP else made


def _weights(model: Model, read: Any) -> dict[str, F64]:
    shapes = expected_shapes(model)
    return {name: read(Piece(name, *map(range, shape))).astype(np.float64) for name, shape in shapes.items()}


def that_knows(folder: Path, cycle: int) -> Path:
    """A model whose text goes round the first so many tokens, at least if it is greedy, and whose head foresees that.

    Its layers add nothing, so a row is the embedding of a token: equally long ones, at right angles to each other. The
    head makes of a row that of the next token, whichever token it is given with it.
    """
    ahead = HEADS[0]
    case = ahead.case
    tensors = tensors_of(case) | head_of(ahead)
    hidden, words = case.model.hidden, case.model.vocabulary
    ends = (".o_proj.weight", ".down_proj.weight")
    silent = {name: np.zeros_like(value) for name, value in tensors.items() if name.endswith(ends)}
    norms = {name: np.ones(hidden, np.float32) for name, value in tensors.items() if value.shape == (hidden,)}
    axes, _ = np.linalg.qr(np.random.default_rng(3).normal(size=(hidden, hidden)))
    table = np.zeros((words, hidden), np.float32)
    table[:cycle] = axes[:cycle] * hidden**0.5
    after = np.roll(axes[:cycle], 1, axis=0)
    head = np.zeros((words, hidden), np.float32)
    head[:cycle] = after * 1.2
    turn = np.zeros((hidden, 2 * hidden), np.float32)
    turn[:, hidden:] = axes[:cycle].T @ after
    own = {"lm_head.weight": head, "model.embed_tokens.weight": table, f"{ahead.module('both')}.weight": turn}
    return write(folder, case, tensors | silent | norms | own)
