"""Adapters of modules that a base keeps in its files otherwise than the model computes them: fused, by heads, or with
neighbours turning together. Beside the files, they are as if added to them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motley.daemon.adapters.reading import read_adapter
from motley.daemon.models.cutting.units import units
from motley.plugins.reference.engine import ReferenceEngine
from tests.adapters.adapted import AdaptedSession, matrices, write_adapter
from tests.models.cases import Case, LocalSession, golden_cases, uneven_shares

SUFFIX = ".weight"


def own_modules(case: Case) -> dict[str, tuple[int, ...]]:
    """The shapes of the larger tensors, by the modules of the base, in which the files have matrices of the model; and
    those of modules of the same kind in other layers."""
    there = load_file(case.folder / "model.safetensors")
    larger = {part.tensor for w in matrices(case.model) for part in w.parts if not part.transposed} & there.keys()
    kinds = {name.removesuffix(SUFFIX).rpartition(".")[2] for name in larger}
    modules = [name.removesuffix(SUFFIX) for name in sorted(there) if name.endswith(SUFFIX) and there[name].ndim == 2]
    return {module: there[f"{module}{SUFFIX}"].shape for module in modules if module.rpartition(".")[2] in kinds}


CASES = [case for case in golden_cases() if (case.folder / "model.safetensors").is_file() and own_modules(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_adapter_of_the_files_modules_is_as_one_in_the_files(case: Case, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    factors = {
        module: (random.normal(size=(2, inner)) / inner**0.5, random.normal(size=(out, 2)) * 0.3)
        for module, (out, inner) in own_modules(case).items()
    }

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors.clear()
        for module, (down, up) in factors.items():
            tensors[f"base_model.model.{module}.lora_A.weight"] = down.astype(np.float32)
            tensors[f"base_model.model.{module}.lora_B.weight"] = up.astype(np.float32)

    write_adapter(tmp_path / "adapter", case.model, seed=0, rank=2, lora_alpha=2, change=change)
    shutil.copytree(case.folder, tmp_path / "changed")
    files = load_file(case.folder / "model.safetensors")
    for module, (down, up) in factors.items():
        whole = files[f"{module}{SUFFIX}"]
        files[f"{module}{SUFFIX}"] = (whole + up @ down).astype(np.float32)
    save_file(files, tmp_path / "changed" / "model.safetensors")
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with LocalSession(tmp_path / "changed", ReferenceEngine, shares, tmp_path / "baked") as baked:
        expected = baked.step(case.tokens, 0)
    with AdaptedSession(case.folder, ReferenceEngine, shares, tmp_path / "ranks") as session:
        session.load(1, read_adapter(tmp_path / "adapter", case.model))
        got = session.adapted(case.tokens, 1)
    assert np.abs(expected[:-1] - case.logits).max() > 0.05 * np.abs(case.logits).max()
    assert np.abs(got - expected).max() < 5e-5 * np.abs(expected).max()
