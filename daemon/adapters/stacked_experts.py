"""Adapters of experts that the base keeps stacked, a tensor [E, ...] for a layer's (PEFT's ``target_parameters``).

PEFT wraps the module of the experts once for each tensor, so a file tells them apart by shape alone: A is [E * R, K]
with an expert's R rows together, B is [N, R * E] with every E-th column of an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from motley.daemon.adapters.config import BASE_LAYER, PREFIX, Sides
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.rows import Linear
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError

_EACH = "[{expert}]"

Stacks = dict[str, tuple[int, int, int]]
"""(E, N, K) of stacked tensors, by their names."""


def experts_apart(
    file: Path, sides: Sides, parameters: Sequence[str], model: Model, own_name: Callable[[str], str]
) -> Sides:
    """The matrices of an adapter, where those for a stacked tensor X are in E pairs, for ``X[0]``, ``X[1]``, ...

    Args:
        parameters: the stacked tensors that the config targets, by the ends of their names.
        own_name: what a module of the base is called in the model.

    Raises:
        CheckpointError: they fit no such tensor, or one has none.
    """
    if not parameters:
        return sides
    targeted = tuple(f".{own}" for own in parameters)
    stacks = {name: shape for name, shape in _stacks(model).items() if f".{name}".endswith(targeted)}
    missing = dict(stacks)
    apart: Sides = {}
    for module, pair in sides.items():
        inner = own_name(module)
        while inner.endswith(BASE_LAYER):
            inner = inner.removesuffix(BASE_LAYER)
        here = {name: shape for name, shape in stacks.items() if name.rpartition(".")[0] == inner}
        if not here:
            apart[module] = pair
            continue
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{file}: {PREFIX}{module!r} has only {', '.join(pair)} of LoRA's A and B")
        a, b = pair["A"], pair["B"]
        rank = b.shape[-1]
        fits = [name for name, (_, out, k) in here.items() if (a.shape, b.shape) == ((rank, k), (out, rank))]
        if len(fits) != 1 or fits[0] not in missing or rank % stacks[fits[0]][0]:
            raise CheckpointError(
                f"{file}: tensor {f'{PREFIX}{module}.lora_A.weight'!r} has shape {list(a.shape)}, its B"
                f" {list(b.shape)}: they are of none of {', '.join(f'{own} {[*each]}' for own, each in here.items())}"
            )
        count, out, columns = missing.pop(fits[0])
        each_a, each_b = a.reshape(count, -1, columns), b.reshape(out, -1, count)
        for number in range(count):
            apart[f"{fits[0]}[{number}]"] = {"A": each_a[number], "B": each_b[:, :, number]}
    if missing:
        raise CheckpointError(f"{file}: has no matrices for {min(missing)}, which target_parameters names")
    return apart


def _stacks(model: Model) -> Stacks:
    """The stacked tensors that files may have for a model's experts."""
    found: Stacks = {}
    for each in model.operations:
        if isinstance(each, Experts):
            for w in (w for one in each.body if isinstance(one, Linear) for w in one.ws):
                for part in w.parts:
                    if part.tensor.endswith(_EACH):
                        out, inner = part.shape[::-1] if part.transposed else part.shape
                        found[part.tensor.removesuffix(_EACH)] = each.count, out, inner
    return found
