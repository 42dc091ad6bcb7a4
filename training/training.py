"""One training in one process: steps of AdamW on LoRA's matrices, with checkpoints from which it goes on after a death.

A step depends on the settings, the data and the step before it alone (its batches, its rate, and the noise of its
dropout), so a training that was killed ends with the adapter of one that was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.training.base import HubTokenizer, context_of, load_base, read_config, save_adapter, with_adapters
from motley.training.errors import TrainingError, import_extra
from motley.training.examples import IGNORED, Example, Examples, batch_of, deal, padded, read_examples
from motley.training.files import CURVE, Checkpoints, Curve, Point, written_whole
from motley.training.settings import Settings, agree, rate_at
from motley.training.truncation import truncate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from motley.training.memory.spared import Spared

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""What a PEFT folder has."""
HALF_SCALE = 1024.0
"""Gradients that pass through float16 are larger by this: small ones would vanish there."""
MOST_LOSS = 700.0
"""In nats; e to a greater power is no float any more."""
_UNKNOWN_CONTEXT = 1024
"""Tokens, where neither the model nor anybody says how many it reads."""


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        folder: with the adapter in PEFT's format.
        points: a point for each step, and for evaluations.
        perplexity: of the held-out examples before and after; None where there are none.
        learnt, cut, unanswered: examples that were learnt, were cut to the context, and had no answer.
        began_at: the steps that were done when this process began.
        missed: the error of the gradient of a truncated graph, see `motley.training.truncation`; 0: it is whole.
    """

    folder: Path
    points: list[Point]
    perplexity: tuple[float, float] | None
    learnt: int
    held_out: int
    cut: int
    unanswered: int
    began_at: int
    missed: float


def train(
    model_folder: Path,
    data: Path,
    out: Path,
    settings: Settings,
    *,
    held_out: Path | None = None,
    template: Path | None = None,
    keep_every: int = 20,
    told: Callable[[Point], None] = lambda point: None,
) -> Trained:
    """Train an adapter, or go on with what was begun in `out`.

    Args:
        data, held_out: files of examples, see `motley.training.lines`; without the latter, the settings' share of
            `data` is held out.
        template: a chat template to use instead of the model's.
        keep_every: steps between two checkpoints, which is what a death costs at most.
        told: called with every point, those from before a death first.

    Raises:
        TrainingError: the extra, the model, the data, the folder or the disk is not as it must be, or losses are no
            numbers any more.
    """
    import_extra("torch", "transformers", "peft")
    read = read_data(model_folder, data, settings, held_out=held_out, template=template)
    points, began_at, missed = train_on(
        model_folder, read.learnt, read.evaluated, out, settings, keep_every=keep_every, told=told
    )
    measured = [point.held_out for point in points if point.held_out is not None]
    return Trained(
        folder=out,
        points=points,
        perplexity=perplexity_of(measured),
        learnt=len(read.learnt),
        held_out=len(read.evaluated),
        cut=read.cut,
        unanswered=read.unanswered,
        began_at=began_at,
        missed=missed,
    )


@dataclass(frozen=True)
class Data:
    """What a training reads.

    Attributes:
        learnt, evaluated: examples to learn, and to evaluate with.
        cut, unanswered: as of `Trained`.
    """

    learnt: list[Example]
    evaluated: list[Example]
    cut: int
    unanswered: int


def read_data(
    model_folder: Path, data: Path, settings: Settings, *, held_out: Path | None = None, template: Path | None = None
) -> Data:
    """Read the examples of a training as a model's tokenizer has them. Needs no torch; arguments as of `train`.

    Raises:
        TrainingError: the extra, the tokenizer or the data is not as it must be.
    """
    tokenizer = HubTokenizer(model_folder, template)
    context = min(filter(None, (settings.context, context_of(read_config(model_folder)))), default=_UNKNOWN_CONTEXT)

    def read(file: Path) -> Examples:
        return read_examples(file, tokenizer.render, tokenizer, context, cut=settings.cut)

    examples = read(data)
    if held_out is not None:
        learnt, evaluated = examples.examples, read(held_out).examples
    else:
        learnt, evaluated = deal(examples.examples, settings.held_out, settings.seed)
    return Data(learnt, evaluated, examples.cut, examples.unanswered)


def train_on(
    model_folder: Path,
    learnt: Sequence[Example],
    evaluated: Sequence[Example],
    out: Path,
    settings: Settings,
    *,
    keep_every: int = 20,
    told: Callable[[Point], None] = lambda point: None,
) -> tuple[list[Point], int, float]:
    """Train on examples that were read; a point for each step, the steps that had been done before, and what a
    truncated graph's gradient misses.

    Args, errors: as `train`.
    """
    model = load_base(model_folder, half=settings.half)
    made_of = {"model": config_digest(model_folder), "data": Examples([*learnt, *evaluated]).digest}
    agree(out, settings, made_of)
    training = _Training(model, settings, learnt, evaluated, out, keep_every, told)
    began_at = training.run()
    return training.points, began_at, training.missed


def config_digest(model_folder: Path) -> str:
    """What tells one model from another: its config, its weights' names and shapes, and some bytes of each.

    Raises:
        TrainingError: the folder has no config or no weights, or they cannot be read.
    """
    try:
        with SafetensorsCheckpoint(model_folder) as checkpoint:
            return checkpoint.fingerprint()
    except CheckpointError as error:
        raise TrainingError(str(error)) from error


class _Training:
    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        learnt: Sequence[Example],
        evaluated: Sequence[Example],
        out: Path,
        keep_every: int,
        told: Callable[[Point], None],
    ) -> None:
        import torch

        torch.manual_seed(settings.seed)  # before the adapters are drawn
        self._model = with_adapters(model, settings.rank, settings.alpha, settings.dropout, settings.targets)
        self.missed = 0.0
        if settings.top:
            shortest = min(learnt, key=lambda example: len(example.tokens))
            self.missed = truncate(self._model, settings.top, lambda: summed_loss(self._model, [shortest]))
        self._spared: Spared | None = None
        if settings.memory:
            from motley.training.memory.spared import spare

            self._spared = spare(self._model, settings.memory, settings.near, out / "memory")
        self._trained = [weight for weight in self._model.parameters() if weight.requires_grad]
        self._optimiser = torch.optim.AdamW(self._trained, weight_decay=settings.weight_decay)
        self._settings, self._learnt, self._evaluated = settings, learnt, evaluated
        self._out, self._keep_every, self._told = out, keep_every, told
        self._checkpoints, self._curve = Checkpoints(out / "checkpoints"), Curve(out / CURVE)
        self._tokens = 0
        """That were read in the latest step."""
        self.points: list[Point] = []

    def run(self) -> int:
        """Do the steps that are left, and write the adapter; returns how many had been done before."""
        settings = self._settings
        latest = self._checkpoints.latest()
        began_at = 0 if latest is None else latest[0]
        if latest is not None:
            self._load(latest[1])
        self.points = self._curve.go_back_to(began_at) if latest is not None else self._curve.go_back_to(-1)
        for point in self.points:
            self._told(point)
        if latest is None and self._evaluated:
            self._add(Point(0, held_out=self._evaluate()))
        for step in range(began_at, settings.steps):
            loss, done = self._step(step), step + 1
            due = done == settings.steps or (settings.evaluate_every and done % settings.evaluate_every == 0)
            held_out = self._evaluate() if due and self._evaluated else None
            self._add(Point(done, loss, rate_at(step, settings), held_out, self._tokens))
            if done % self._keep_every == 0 or done == settings.steps:
                self._checkpoints.save(done, self._save)
        with written_whole(self._out / "adapter") as partial:
            save_adapter(self._model, partial)
        if self._spared is not None:
            self._spared.close()
        return began_at

    def _add(self, point: Point) -> None:
        self._curve.add(point)
        self.points.append(point)
        self._told(point)

    def _step(self, step: int) -> float:
        """Compute the gradients of a step's batches, and go along them; returns the mean loss of the tokens learnt."""
        import torch

        settings = self._settings
        self._model.train()
        torch.manual_seed((settings.seed << 32) ^ step)  # of dropout
        size = settings.batch * settings.accumulate
        chosen = [self._learnt[index] for index in batch_of(step, size, len(self._learnt), settings.seed)]
        batches = [chosen[begin : begin + settings.batch] for begin in range(0, size, settings.batch)]
        tokens = sum(int((example.labels != IGNORED).sum()) for example in chosen)
        self._tokens = sum(len(example.tokens) for example in chosen)
        total, scale = 0.0, HALF_SCALE if settings.half else 1.0
        for batch in batches:
            loss = self._summed_loss(batch) / tokens
            (loss * scale).backward()
            total += float(loss.detach())
        for weight in self._trained if scale != 1.0 else ():
            weight.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(self._trained, settings.clip)
        if not np.isfinite(total) or not torch.isfinite(norm):
            raise TrainingError(f"step {step + 1}: the loss is no number any more; try a lower rate")
        for group in self._optimiser.param_groups:
            group["lr"] = rate_at(step, settings)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return total

    def _summed_loss(self, batch: Sequence[Example]) -> Tensor:
        return summed_loss(self._model, batch) if self._spared is None else self._spared.summed_loss(batch)

    def _evaluate(self) -> float:
        return mean_loss(self._model, self._evaluated, self._settings.batch, self._summed_loss)

    def _save(self, folder: Path) -> None:
        import torch

        torch.save(
            {"adapters": [weight.detach() for weight in self._trained], "optimiser": self._optimiser.state_dict()},
            folder / "state.pt",
        )

    def _load(self, folder: Path) -> None:
        import torch

        try:
            kept: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
            with torch.no_grad():
                for weight, value in zip(self._trained, kept["adapters"], strict=True):
                    weight.copy_(value)
            self._optimiser.load_state_dict(kept["optimiser"])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise TrainingError(f"{folder}: the checkpoint cannot be read: {error}; remove it, and go on") from error


def perplexity_of(losses: Sequence[float]) -> tuple[float, float] | None:
    """The perplexity before and after, of the losses of what is held out; None: there are none, or it is no number."""
    if not losses or not max(losses[0], losses[-1]) < MOST_LOSS:
        return None
    return exp(losses[0]), exp(losses[-1])


def mean_loss(
    model: nn.Module,
    examples: Sequence[Example],
    size: int,
    summed: Callable[[Sequence[Example]], Tensor] | None = None,
) -> float:
    """The mean loss of the tokens that examples learn, in nats.

    Args:
        size: examples that are computed at a time.
        summed: computes a batch's summed loss; None: `summed_loss` of the model.
    """
    import torch

    model.eval()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(examples), size):
            batch = examples[begin : begin + size]
            total += float(summed(batch) if summed else summed_loss(model, batch))
            tokens += sum(int((example.labels != IGNORED).sum()) for example in batch)
    return total / tokens


def summed_loss(model: nn.Module, batch: Sequence[Example]) -> Tensor:
    """The sum over a batch's learnt tokens of their negative log-likelihoods, in nats: a scalar, float32."""
    import torch
    from torch.nn import functional

    tokens, labels = map(torch.from_numpy, padded(batch))
    logits = model(input_ids=tokens, use_cache=False).logits
    return functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
