"""The tensors of experts under one set of names, whatever a checkpoint calls them.

Within a layer they are ``mlp.gate.weight`` (the router) and ``mlp.experts.N.gate_proj.weight``, ``up_proj``,
``down_proj``. Mixtral's checkpoints call them ``block_sparse_moe.gate`` and ``block_sparse_moe.experts.N.w1``, ``w3``,
``w2``. As transformers 5 keeps them in memory, and writes them if asked to, the experts of a layer lie in two tensors:
``mlp.experts.gate_up_proj`` [E, 2F, D] and ``mlp.experts.down_proj`` [E, D, F].
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_MIXTRAL_NAME = re.compile(
    r"(?P<layer>.+)\.block_sparse_moe\.(?:gate|experts\.(?P<number>\d+)\.(?P<part>w[123]))\.(?P<kind>\w+)"
)
_FUSED_NAME = re.compile(r"(?P<experts>.+\.mlp\.experts)\.(?P<part>gate_up_proj|down_proj)")


def expert_name(name: str) -> str:
    """What a tensor is called here; one that is not of a Mixtral's experts keeps its name."""
    found = _MIXTRAL_NAME.fullmatch(name)
    if found is None:
        return name
    module = "gate" if found["part"] is None else f"experts.{found['number']}.{_MIXTRAL[found['part']]}"
    return f"{found['layer']}.mlp.{module}.{found['kind']}"


def split_experts(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The matrices that a tensor consists of if it holds the experts of a layer, and their shapes, in their order."""
    found = _FUSED_NAME.fullmatch(name)
    if found is None or len(shape) != 3 or (found["part"] == "gate_up_proj" and shape[1] % 2):
        return
    count, rows, columns = shape
    parts = ("gate_proj", "up_proj") if found["part"] == "gate_up_proj" else ("down_proj",)
    for number in range(count):
        for part in parts:
            yield f"{found['experts']}.{number}.{part}.weight", (rows // len(parts), columns)
