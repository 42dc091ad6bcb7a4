"""Adapters with random weights, to measure with: no text of theirs makes sense."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.daemon.adapters.config import CONFIG
from motley.daemon.adapters.reading import WEIGHTS
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.rows import Linear
from motley.training.tensors import write_tensors

SPREAD = 0.01
"""Of what is multiplied with the rows of an adapter's products: texts change, and stay within a model's range."""


def write_random_adapter(folder: Path, model: Model, rank: int, seed: int) -> None:
    """Write a PEFT folder with an adapter in float16 of all of a model's matrices that may have one.

    Raises:
        OSError: the folder exists, or cannot be written.
    """
    random = np.random.default_rng(seed)
    matrices: dict[str, npt.NDArray[np.float16]] = {}
    linear = [w for layer in model.layers for each in layer.operations if isinstance(each, Linear) for w in each.ws]
    targets = [w for w in linear if w.in_ is not None and not w.stays_float]
    for w in targets:
        assert w.in_ is not None
        name = f"base_model.model.{w.name.removesuffix('.weight')}"
        a = random.standard_normal((rank, w.in_.size), np.float32) / w.in_.size**0.5
        b = SPREAD * random.standard_normal((w.out.size, rank), np.float32)
        matrices |= {f"{name}.lora_A.weight": a.astype(np.float16), f"{name}.lora_B.weight": b.astype(np.float16)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [w.name.removesuffix(".weight") for w in targets],
    }
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    write_tensors(folder / WEIGHTS, matrices)
