"""The config of an adapter in PEFT's format (``adapter_config.json``): read with care, and refused where it is unknown.

What changes the numbers and is not computed here is refused by name. A key that PEFT may have added since is refused,
too, unless it says that something is off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Protocol, TypeVar

from motley.daemon.adapters.pattern_cost import ways
from motley.daemon.models.keys import ConfigError, Keys
from motley.plugins.adapted_engine import Factor

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Of the names of tensors in PEFT's files."""
ALL_LINEAR = "all-linear"
_LONGEST_PATTERN = 500
_MOST_WAYS = 100_000
"""In which all patterns together may be tried on a name: milliseconds."""
_ENDING = r"(.*\.)?({})$"
"""What the name of a module matches that a pattern of ranks or of alphas is for."""
_NUMBERED = r"(?:^|.*?\.){}\.(?P<number>\d+)\."
"""What the name of a module of a layer begins with, by the pattern of what stands before the number."""
_ANYTHING = r"[^.]*"
N = TypeVar("N", int, float)
_READ = {
    *("peft_type", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "r", "rank_pattern"),
    *("target_parameters", "modules_to_save", "ensure_weight_tying"),
    *("lora_alpha", "alpha_pattern", "use_rslora", "bias", "init_lora_weights"),
}
"""Keys that say what is computed."""
_SILENT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "runtime_config"),
}
"""Keys that say nothing about the numbers of an adapter that was trained."""
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""What ``init_lora_weights`` may be: other ways to begin a training change the base model's weights."""


Sides = dict[str, dict[str, Factor]]
"""By the modules of the base and the letters ``A`` and ``B``: its A, [R, K], and its B, [N, R]. Those of an embedding
table are its ``embedding_A``, [R, vocabulary], and ``embedding_B``, [D, R]."""
Whole = dict[str, Factor]
"""By the modules of the base: what an adapter has in place of their matrices, [N, K] each. Behind a module's name
`BASE_LAYER`: what its A and B are added to."""
BASE_LAYER = ".base_layer"


class Said(Protocol):
    """What is said of an adapter's matrices beside them."""

    def adapts(self, module: str) -> bool:
        """Whether a module of the base model has matrices."""

    def promises(self, module: str) -> bool:
        """Whether an adapter without a module's matrices is half a one."""

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""

    def called(self, module: str, side: str) -> str:
        """What the file calls a module's A or B."""


@dataclass(frozen=True)
class AdapterConfig:
    """What an adapter's config says.

    Attributes:
        targets: which modules have matrices, or a pattern that their names match, or `ALL_LINEAR`.
        parameters: which stacked tensors of experts have, by the ends of their names.
        excluded: which of them have none after all; likewise.
        layers: only modules of these layers have; None: of all.
        layers_patterns: what stands before a layer's number in names; empty: anything.
        rank, ranks: of the matrices; by patterns of modules' names, where they differ.
        alpha, alphas: what the scale is made of; likewise.
        rslora: the scale is ``alpha / sqrt(rank)``, and not ``alpha / rank``.
        saved: the modules that have a whole matrix, by the ends of their names.
        tied: where the base's head is its embedding table, a matrix in place of one is in place of both.
    """

    targets: tuple[str, ...] | str
    parameters: tuple[str, ...]
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    layers_patterns: tuple[str, ...]
    rank: int
    ranks: Mapping[str, int]
    alpha: float
    alphas: Mapping[str, float]
    rslora: bool
    saved: tuple[str, ...]
    tied: bool

    def adapts(self, module: str) -> bool:
        """Whether a module of the base model has matrices; of a model's linear ones alone if it is `ALL_LINEAR`."""
        if module.endswith("]"):
            return any(f".{module.rpartition('[')[0]}".endswith(f".{own}") for own in self.parameters)
        if self.excluded and _names(self.excluded, module):
            return False
        if self.targets == ALL_LINEAR:
            return True
        if not _names(self.targets, module):
            return False
        if self.layers is None or isinstance(self.targets, str) or module in self.targets:
            return True
        return _layer(self.layers_patterns, module) in self.layers

    def saves(self, module: str) -> bool:
        """Whether a module of the base has a whole matrix."""
        return _names(self.saved, module)

    def promises(self, module: str) -> bool:
        """Whether an adapter without a module's matrices is half a one."""
        return self.targets != ALL_LINEAR and self.adapts(module)

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices."""
        return _by_pattern(self.ranks, module.partition("[")[0], self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied by."""
        rank = self.rank_of(module)
        alpha = _by_pattern(self.alphas, module.partition("[")[0], self.alpha)
        return alpha / (sqrt(rank) if self.rslora else rank) if rank else 0.0

    def called(self, module: str, side: str) -> str:
        """What the file calls a module's A or B."""
        return f"{PREFIX}{module}.lora_{side}" + ("" if side.startswith("embedding_") else ".weight")


def read_config(file: Path) -> AdapterConfig:
    """Read an adapter's config.

    Raises:
        ConfigError: it cannot be read, is not of a LoRA adapter, or asks for something that is not computed here.
    """
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; an adapter in PEFT's format is a folder that has one")
    keys = Keys.load(file)
    if keys.get("peft_type") != "LORA":
        raise keys.refusal("peft_type", "LORA")
    for key in ("fan_in_fan_out", "use_dora", "use_qalora", "lora_bias"):
        if keys.flag(key, False):
            raise keys.refusal(key, "false")
    keys.only("bias", "none")
    start = keys.get("init_lora_weights")
    if start is not None and start not in _PLAIN_STARTS:
        raise keys.refusal("init_lora_weights", "true: other starts change the base model's weights")
    layers = keys.get("layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers and (not isinstance(layers, list) or not all(type(layer) is int for layer in layers)):
        raise keys.refusal("layers_to_transform", "numbers of layers")
    targets = _words(keys, "target_modules")
    parameters = _words(keys, "target_parameters")
    if isinstance(parameters, str) and parameters:
        raise keys.refusal("target_parameters", "a list of names of parameters")
    if not targets and not parameters:
        raise keys.refusal("target_modules", "names of modules, a pattern of them, or all-linear")
    saved = _words(keys, "modules_to_save")
    if isinstance(saved, str) and saved:
        raise keys.refusal("modules_to_save", "a list of names of modules")
    patterns = _words(keys, "layers_pattern")
    config = AdapterConfig(
        targets=targets,
        parameters=tuple(parameters),
        excluded=_words(keys, "exclude_modules"),
        layers=tuple(layers) if layers else None,
        layers_patterns=(patterns,) if isinstance(patterns, str) and patterns else tuple(patterns),
        rank=keys.size("r", 8, least=0),
        ranks={pattern: int(rank) for pattern, rank in _numbers(keys, "rank_pattern", whole=True).items()},
        alpha=_number(keys, "lora_alpha", keys.get("lora_alpha"), 8.0),
        alphas=_numbers(keys, "alpha_pattern"),
        rslora=keys.flag("use_rslora", False),
        saved=tuple(saved),
        tied=keys.flag("ensure_weight_tying", False),
    )
    for key, value in keys.values.items():
        if key not in _READ | _SILENT and value not in (None, False, [], {}, ""):
            raise keys.refusal(key, "only its absence")
    _check_patterns(keys, config)
    return config


def _check_patterns(keys: Keys, config: AdapterConfig) -> None:
    """Make sure that everything that is taken for a pattern is one, and that they are matched in a moment."""
    whole = [own for own in (config.targets, config.excluded) if isinstance(own, str)]
    endings = [_ENDING.format(own) for own in (*config.ranks, *config.alphas)]
    numbered = [_NUMBERED.format(own) for own in config.layers_patterns]
    tried = 0
    for pattern in (*whole, *endings, *numbered):
        if len(pattern) > _LONGEST_PATTERN:
            raise ConfigError(f"{keys.where}: a pattern of {len(pattern)} characters is too long")
        try:
            _compiled(pattern)
            tried += ways(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"{keys.where}: {pattern!r} is no regular expression: {error}") from error
        if tried > _MOST_WAYS:
            raise ConfigError(
                f"{keys.where}: {pattern!r} may take for ever to match: give a pattern with fewer repetitions and"
                " alternatives, or the names of modules"
            )


def _words(keys: Keys, key: str) -> tuple[str, ...] | str:
    """A word, or several; empty where the key is absent."""
    value = keys.get(key)
    if value is None or isinstance(value, str):
        return value or ()
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise keys.refusal(key, "a word or a list of words")
    return tuple(value)


def _numbers(keys: Keys, key: str, whole: bool = False) -> dict[str, float]:
    value = keys.get(key) or {}
    if not isinstance(value, dict):
        raise keys.refusal(key, "numbers by patterns of modules' names")
    numbers = {pattern: _number(keys, key, number) for pattern, number in value.items()}
    if whole and any(number < 0 or number % 1 for number in numbers.values()):
        raise keys.refusal(key, "whole numbers by patterns of modules' names")
    return numbers


def _number(keys: Keys, key: str, value: Any, default: float | None = None) -> float:
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
        raise keys.refusal(key, "finite numbers")
    return float(value)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _names(wanted: Sequence[str] | str, module: str) -> bool:
    """Whether a module is one of those that are named, or that a pattern matches."""
    if isinstance(wanted, str):
        return _compiled(wanted).fullmatch(module) is not None
    return any(module == own or module.endswith(f".{own}") for own in wanted)


def _layer(patterns: Sequence[str], module: str) -> int | None:
    """The number of the layer that a module is of, by the patterns of what stands before it; None: of none."""
    for pattern in patterns or [_ANYTHING]:
        if found := _compiled(_NUMBERED.format(pattern)).match(module):
            return int(found["number"])
    return None


def _by_pattern(numbers: Mapping[str, N], module: str, default: N) -> N:
    """The number of the first pattern that the end of a module's name matches."""
    found = (number for pattern, number in numbers.items() if _compiled(_ENDING.format(pattern)).match(module))
    return next(found, default)
