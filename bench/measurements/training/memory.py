"""How much memory a training takes, and how long a step, with each way to spare memory added to those before it.

A Llama with random weights gets adapters and is trained on random tokens, of which a share are learnt. Every row is
measured in a process of its own, forked of one that has imported torch and computed nothing: the most memory it had
resident while it trained, less what it had before it made the model. What loading takes is not counted, nor what torch
loads at its first step, nor memory that is free and kept.
"""

from __future__ import annotations

import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from motley.training.errors import TrainingError, require_extra

SHAPE = {
    "vocab_size": 8016,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 28,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
"""Of a small machine's size: as deep as Llama 3.2 3B, which the paper measures, and in all else a 16th of it."""
TECHNIQUES: dict[str, tuple[str, ...]] = {
    "lora": (),
    "+ int4": ("int4",),
    "+ layers": ("int4", "layers"),
    "+ near": ("int4", "layers", "near"),
    "+ labels": ("int4", "layers", "near", "labels"),
}
"""By name, the switches of `motley.training.memory`."""
LEARNT = 0.3
"""The share of the tokens that are learnt."""
WARM_UP = 16
"""Tokens of a step before the one that is measured, so that AdamW's state is there."""
DEADLINE_S = 3600.0
IMPORTED = ("torch", "peft", "transformers.models.llama.modeling_llama", "motley.training.memory.spared")
"""By the process of which those that measure are forked, as importing them takes longer than many a row."""


@dataclass(frozen=True)
class TrainingRow:
    """What a technique takes at a context.

    Attributes:
        peak_mb: the most memory beyond that of the process before, in MB.
        step_s: of a step, in seconds.
    """

    context: int
    technique: str
    peak_mb: float
    step_s: float


def measure_training(
    contexts: Sequence[int],
    shape: dict[str, int] = SHAPE,
    near: int = 1000,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[TrainingRow]:
    """Measure every technique at every context.

    Args:
        progress: called with the rows that are measured and all of them.

    Raises:
        TrainingError: the extra is missing, this is no Linux, or a process ran out of memory.
    """
    require_extra("torch", "transformers", "peft")
    if platform.system() != "Linux":
        raise TrainingError("the peak of a process's memory can be begun anew on Linux only")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__, *IMPORTED])
    rows: list[TrainingRow] = []
    total = len(contexts) * len(TECHNIQUES)
    for context in contexts:
        for technique in TECHNIQUES:
            progress(len(rows), total)
            try:
                with ProcessPoolExecutor(1, mp_context=forks) as process:
                    try:
                        row = process.submit(_measure_warm, context, technique, shape, near).result(DEADLINE_S)
                    except TimeoutError:
                        for child in process._processes.values():  # the pool would wait for it
                            child.kill()
                        raise TrainingError(
                            f"{technique} at {context} tokens: took more than {DEADLINE_S:g} s"
                        ) from None
            except (BrokenProcessPool, RuntimeError, OSError) as error:
                why = "out of memory?" if isinstance(error, BrokenProcessPool) else error
                raise TrainingError(f"{technique} at {context} tokens: {why}") from error
            rows.append(row)
    progress(total, total)
    return rows


def ratio_at(rows: Sequence[TrainingRow], context: int) -> float | None:
    """How many times more memory plain LoRA takes at a context than all techniques do; None: not measured there."""
    peaks = [row.peak_mb for row in rows if row.context == context]
    return round(peaks[0] / peaks[-1], 2) if peaks else None


def _measure_warm(context: int, technique: str, shape: dict[str, int], near: int) -> TrainingRow:
    """Measure one row in this process, once it has loaded what torch uses."""
    import torch

    torch.set_num_threads(1)  # several wait for each other, busily, on a machine that does something else
    try:
        _measure(WARM_UP, technique, shape | {"num_hidden_layers": 1}, 1)
        return _measure(context, technique, shape, near)
    except Exception as error:  # not every library's exceptions find their way out of a process
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def _measure(context: int, technique: str, shape: dict[str, int], near: int) -> TrainingRow:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from motley.training.base import with_adapters
    from motley.training.examples import IGNORED, Example
    from motley.training.memory.freeing import give_back_what_is_free
    from motley.training.memory.spared import spare
    from motley.training.training import summed_loss

    give_back_what_is_free()
    torch.manual_seed(0)
    before = psutil.Process().memory_info().rss
    config = LlamaConfig(**shape, max_position_embeddings=context)
    model = with_adapters(AutoModelForCausalLM.from_config(config, dtype=torch.float32), 8, 16.0, 0.0, ())
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, shape["vocab_size"], context)
    labels = np.append(np.where(rng.random(context - 1) < LEARNT, tokens[1:], IGNORED), IGNORED)
    with TemporaryDirectory(prefix="motley-train-") as folder:
        switches = TECHNIQUES[technique]
        spared = spare(model, switches, near, Path(folder)) if switches else None
        optimiser = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
        model.train()
        for example in (Example(tokens[:WARM_UP], np.append(tokens[1:WARM_UP], IGNORED)), Example(tokens, labels)):
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            began = time.perf_counter()
            (spared.summed_loss([example]) if spared else summed_loss(model, [example])).backward()
            optimiser.step()
            optimiser.zero_grad()
            step_s = time.perf_counter() - began
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return TrainingRow(context, technique, round((peak - before) / 1e6, 1), round(step_s, 3))
