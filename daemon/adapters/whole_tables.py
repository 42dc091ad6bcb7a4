"""Whole matrices of an adapter: an embedding table or a head that was trained as it is (PEFT's ``modules_to_save``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from motley.daemon.adapters.config import BASE_LAYER, CONFIG, PREFIX, AdapterConfig, Whole
from motley.daemon.models.description.axes import W
from motley.daemon.models.description.model import HEAD, Model
from motley.daemon.models.description.operations.rows import Linear
from motley.daemon.weights.checkpoints.checkpoint import refuse_all
from motley.plugins.adapted_engine import Factor

_WEIGHT = ".weight"


@dataclass(frozen=True)
class Tables:
    """What an adapter has in place of tables of the model.

    Attributes:
        head: [N, K], by the name of the tensor of the head's matrix; empty: nothing.
        embedding: [vocabulary, D]; None: nothing.
        head_base, embedding_base: likewise, what A and B are added to, which are in the adapter, too.
    """

    head: Mapping[str, Factor] = field(default_factory=dict)
    embedding: Factor | None = None
    head_base: Mapping[str, Factor] = field(default_factory=dict)
    embedding_base: Factor | None = None


def whole_tables(
    file: Path, given: Whole, config: AdapterConfig, model: Model, own_name: Callable[[str], str]
) -> Tables:
    """Read an adapter's whole matrices. Where PEFT was not asked to keep tied tables so (``ensure_weight_tying``), one
    in place of the embeddings leaves the head as it is, and the other way round.

    Args:
        own_name: what a module of the base is called in the model.

    Raises:
        CheckpointError: one is of something else, of the wrong shape or not in the config, or one is absent.
    """
    embedding, head = model.embedding.name.removesuffix(_WEIGHT), HEAD.removesuffix(_WEIGHT)
    (linear,) = (each for each in model.head if isinstance(each, Linear))
    expected = {embedding: model.embedding, head: linear.ws[0]}
    ties = config.tied and model.tied
    problems = []
    own: dict[str, Factor] = {}
    bases: dict[str, Factor] = {}
    for whole, matrix in given.items():
        module = whole.removesuffix(BASE_LAYER)
        name, tensor = own_name(module), f"{file}: tensor {PREFIX + whole + _WEIGHT!r}"
        w = expected.get(name)
        if w is None:
            problems.append(f"{tensor} is whole; of an adapter, only those of {embedding} and {head} are computed here")
        elif module != whole and not (config.adapts(module) or ties):
            problems.append(f"{tensor} is not among what {CONFIG} targets")
        elif module == whole and not (config.saves(module) or ties):
            problems.append(f"{tensor} is not among what {CONFIG} saves as a whole (modules_to_save)")
        elif trouble := _trouble(matrix, w, name == head):
            problems.append(f"{tensor} {trouble}")
        else:
            (own if module == whole else bases)[name] = matrix
    saved = [module for module in given if not module.endswith(BASE_LAYER)]
    there = {*saved, *map(own_name, saved)}
    tables = {*expected, *(module for module in saved if own_name(module) in expected)}
    for name in config.saved:
        if own_name(name) not in expected and not any(_ends(module, name) for module in tables):
            problems.append(f"{file}: {CONFIG} saves {name!r} as a whole; only {embedding} and {head} may be")
        elif not any(_ends(module, name) for module in there):
            problems.append(f"{file}: has no matrix for {name!r}, which {CONFIG} saves as a whole (modules_to_save)")
    refuse_all(problems)
    if ties and own:
        own = dict.fromkeys((embedding, head), own[embedding] if embedding in own else own[head])
    of_head, of_its_base = ({expected[head].name: each[head]} if head in each else {} for each in (own, bases))
    return Tables(of_head, own.get(embedding), of_its_base, bases.get(embedding))


def _trouble(matrix: Factor, w: W, head: bool) -> str:
    """Why a matrix cannot be in the place of one of the model's; empty: it can."""
    if matrix.shape != w.shape:
        return f"has shape {list(matrix.shape)}; the model's is {list(w.shape)}"
    if head and w.bias:
        return "is of a head with a bias, which no adapter can have here"
    return "" if np.isfinite(matrix).all() else "has values that are no finite numbers"


def _ends(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
