"""Who trains on how much of the data, where every node trains alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from motley.training.errors import TrainingError
from motley.training.examples import Example
from motley.training.settings import Settings
from motley.training.tensors import tensors_of

_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
"""What configs call the length of a hidden state, and the number of layers."""


RUNTIME_BYTES = 400 << 20
"""What a process with torch takes before it has a model."""
LAYER_ROWS = 24
"""Values as long as a hidden state that autograd keeps of a token in each layer, about."""


def need_bytes(model: Path, examples: Sequence[Example], settings: Settings) -> int:
    """What training takes of a node's memory, about: a model, and what a batch of long examples makes.

    Args:
        model: its folder.

    Raises:
        TrainingError: its weights cannot be read.
    """
    weights: int = sum(tensor.size for file in model.glob("*.safetensors") for tensor in tensors_of(file).values())
    config = json.loads((model / "config.json").read_bytes())
    width, layers = (max(config.get(name) or 0 for name in names) for names in (_WIDTHS, _LAYERS))
    rows = settings.batch * max(len(example.tokens) for example in examples)
    kept: int = rows * (3 * config.get("vocab_size", 0) + LAYER_ROWS * width * layers)
    return RUNTIME_BYTES + (2 if settings.half else 4) * (weights + kept)


@dataclass(frozen=True)
class Trainer:
    """A node that could train.

    Attributes:
        free_bytes: memory that it has for it.
        speed: how fast it computes, in any unit that is the same for all.
    """

    name: str
    free_bytes: int
    speed: float


def deal_examples(count: int, trainers: Sequence[Trainer], need_bytes: int) -> dict[str, range]:
    """Deal out `count` examples in proportion to speed among the nodes that have the memory, so that all end together.

    Returns:
        By name, each one's examples by number; nodes that get none are left out.

    Raises:
        TrainingError: no node has the memory.
    """
    able = [each for each in trainers if each.free_bytes >= need_bytes and each.speed > 0]
    if not able:
        most = max((each.free_bytes for each in trainers), default=0)
        raise TrainingError(f"training takes {need_bytes} bytes on a node, and none has more than {most} free")
    total = sum(each.speed for each in able)
    dealt: dict[str, range] = {}
    done, so_far = 0, 0.0
    for each in able:
        so_far += each.speed
        end = round(count * so_far / total)
        if end > done:
            dealt[each.name] = range(done, end)
        done = end
    return dealt
