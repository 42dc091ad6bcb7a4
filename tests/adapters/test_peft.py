"""What PEFT computes with adapters: as the golden files have it, and now, where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.daemon.adapters.reading import read_adapter
from motley.daemon.models.cutting.units import units
from motley.plugins.engine import F32, EngineFactory
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.adapters.adapted import AdaptedSession
from tests.models.cases import MADE_OF_OTHERS, TELLING, Case, golden_case, golden_cases, uneven_shares

GOLDEN = Path(__file__).parent / "golden"


def ours(case: Case, adapter: Path, engine: EngineFactory, ranks: int, folder: Path) -> F32:
    """What some ranks compute of a case's tokens."""
    shares = uneven_shares(units(case.model, "fp32", 32), ranks)
    with AdaptedSession(case.folder, engine, shares, folder) as session:
        session.load(1, read_adapter(adapter, case.model))
        return session.adapted(case.tokens, 1)


def assert_close(got: F32, expected: F32) -> None:
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("engine", [ReferenceEngine, OnnxRuntimeEngine])
@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda folder: folder.name)
def test_golden_adapters(folder: Path, engine: EngineFactory, tmp_path: Path) -> None:
    with np.load(folder / "expected.npz") as expected:
        logits = expected["logits"]
    case = golden_case(folder.name)
    assert np.abs(logits[:-1] - case.logits).max() > 0.1 * np.abs(case.logits).max()
    assert_close(ours(case, folder, engine, 3, tmp_path), logits)


@pytest.mark.filterwarnings("ignore")  # PEFT uses what transformers will do without
@pytest.mark.parametrize(
    "case",
    [case for case in golden_cases() if str(case) in TELLING or case.model.family in MADE_OF_OTHERS],
    ids=str,
)
def test_every_family_with_a_fresh_adapter(case: Case, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    import torch

    from tests.adapters.peft_models import SETTINGS, make_adapter, peft_logits

    if case.model.experts:
        stacked = case.model.family in ("olmoe", "gpt_oss")  # as rows, and as columns that alternate
        names = ["attention", "stacked"] if stacked else ["attention"]
    elif case.model.family == "phi3":
        names = ["all", "fused"]
    else:
        others = ["attention", "pattern", "some layers", "uneven"]
        names = ["all", others[golden_cases().index(case) % len(others)]]
    for name in names:
        adapter = tmp_path / name
        make_adapter(case.folder, adapter, SETTINGS[name], 2026, torch.float32)
        expected = peft_logits(case.folder, adapter, case.tokens)
        assert_close(ours(case, adapter, ReferenceEngine, 3, tmp_path / f"{name} ranks"), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-mha", "saved"),
        ("granite", "saved embeddings"),
        ("olmo2", "saved head"),
        ("llama-mqa", "saved embeddings"),
        ("gemma3-softcaps", "saved head"),
        ("qwen2-some-windows", "saved, tied"),
        ("gemma2", "saved, tied"),
        ("llama-mha", "embeddings"),
        ("gemma3-softcaps", "embeddings"),
        ("qwen2-some-windows", "embeddings"),
        ("granite", "embeddings and head"),
        ("llama-mqa", "embeddings and head"),
        ("llama-mqa", "embeddings, tied"),
        ("gemma2", "embeddings, tied"),
    ],
)
def test_embeddings_and_heads(model: str, name: str, tmp_path: Path) -> None:
    """Tied ones, too: where PEFT was not told to keep them so, one of both is the base's. What is added to them may be
    saved with them."""
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    import torch

    from tests.adapters.peft_models import SETTINGS, make_adapter, peft_logits

    case = golden_case(model)
    assert case.model.tied == (model not in ("llama-mha", "granite", "olmo2"))
    for bases in (False, True) if name.startswith("embeddings") else (False,):
        adapter = tmp_path / f"adapter {bases}"
        make_adapter(case.folder, adapter, SETTINGS[name], 2026, torch.float32, bases)
        expected = peft_logits(case.folder, adapter, case.tokens)
        assert np.abs(expected[:-1] - case.logits).max() > 0.1 * np.abs(case.logits).max()
        for engine in (ReferenceEngine, OnnxRuntimeEngine):
            assert_close(ours(case, adapter, engine, 3, tmp_path / f"{engine.__name__} {bases}"), expected)
