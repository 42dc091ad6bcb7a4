"""What a training is asked to be, as the file in its folder keeps it, and the rate at which each step learns."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import cos, pi
from pathlib import Path
from typing import Any

from motley.training.errors import TrainingError
from motley.training.files import written_whole

FILE = "training.json"


class How(StrEnum):
    """The ways to merge adapters: the weighted mean; the mean weighed by 1 / perplexity; TIES; DARE."""

    LINEAR = "linear"
    LOSS = "loss"
    TIES = "ties"
    DARE = "dare"


@dataclass(frozen=True)
class Settings:
    """How a training goes. With the model and the data they decide the adapter, bit for bit on the same machine.

    Attributes:
        steps: of the optimiser.
        batch: examples that are computed at a time.
        accumulate: batches whose gradients make one step.
        rate: at which AdamW learns after `warm_up` steps; from there it falls to 0 as a cosine.
        clip: the largest norm of a step's gradient; larger ones are scaled down to it.
        rank, alpha, dropout: of LoRA; its update is weighed by alpha / rank.
        targets: names of the modules that get an adapter; empty: every linear one but the head.
        context: tokens of an example at most; 0: as many as the model reads.
        cut: longer examples are cut; otherwise they are refused.
        held_out: the share of the examples that is not learnt but evaluated with, unless there is a file of its own.
        evaluate_every: steps between two evaluations; 0: before the first and after the last step only.
        memory: how memory is spared, some of `motley.training.memory.switches.SWITCHES`.
        near: tokens that are near to each one, for the softmax over near tokens.
        top: so many of the last layers are trained, see `motley.training.truncation`; 0: all.
        half: the model is held in float16, its adapters and AdamW in float32 all the same.
    """

    steps: int = 100
    batch: int = 4
    accumulate: int = 1
    rate: float = 2e-4
    warm_up: int = 10
    weight_decay: float = 0.0
    clip: float = 1.0
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    seed: int = 0
    context: int = 0
    cut: bool = True
    held_out: float = 0.05
    evaluate_every: int = 0
    memory: tuple[str, ...] = ()
    near: int = 1000
    half: bool = False
    top: int = 0


def rate_at(step: int, settings: Settings) -> float:
    """The rate of a step, counted from 0: rising in a line over the warm-up, then a cosine down to 0."""
    if step < settings.warm_up:
        return settings.rate * (step + 1) / settings.warm_up
    done = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    return settings.rate * 0.5 * (1 + cos(pi * done))


def agree(folder: Path, settings: Settings, made_of: dict[str, str]) -> None:
    """Write down in a training's folder what it is, or see that one begun there is the same.

    Args:
        made_of: digests or names of the model and the data.

    Raises:
        TrainingError: another training was begun in this folder, or the folder cannot be written.
    """
    told: dict[str, Any] = json.loads(json.dumps(asdict(settings))) | made_of
    file = folder / FILE
    try:
        kept = json.loads(json.dumps(asdict(Settings()))) | json.loads(file.read_bytes())  # it may be of before some
    except FileNotFoundError:
        if (folder / "adapter").exists():
            raise TrainingError(f"{folder} holds an adapter of another training; choose another folder") from None
        with written_whole(file) as partial:
            partial.write_text(json.dumps(told, indent=1), encoding="utf-8")
        return
    except (OSError, ValueError, TypeError) as error:
        raise TrainingError(f"{file}: cannot be read: {error}") from error
    if kept != told:
        keys = sorted(key for key in {*kept, *told} if kept.get(key) != told.get(key))
        raise TrainingError(
            f"{folder} holds a training that differs in {', '.join(keys)}; choose another folder, or remove that one"
        )
