"""Live parity: whatever the installed transformers computes now, where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import load_tokenizer, read_model
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import GOLDEN, LocalSession, uneven_shares
from tests.models.to_gguf import to_gguf

pytest.importorskip("torch")
pytest.importorskip("transformers")

BUNDLED = Path(__file__).parents[2] / "cli" / "models" / "shakespeare-2.6m"


@pytest.mark.parametrize("model", [*sorted(GOLDEN.iterdir()), BUNDLED], ids=lambda folder: folder.name)
def test_logits_of_a_fresh_prompt(model: Path, tmp_path: Path) -> None:
    from tests.models.make_golden import transformers_logits

    config = read_model(model)
    tokens = np.random.default_rng(2026).integers(0, config.vocabulary, 50).tolist()
    expected = transformers_logits(model, tokens)
    with LocalSession(model, ReferenceEngine, uneven_shares(units(config, "fp32", 32), 3), tmp_path) as ranks:
        got = ranks.step(tokens, 0)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("type_", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama-mha", "llama-mqa", "qwen2"])
def test_gguf_files(name: str, type_: str, tmp_path: Path) -> None:
    """Of the golden models those whose shape and rope transformers takes from GGUF metadata."""
    pytest.importorskip("accelerate")  # transformers reads GGUF with it only
    from gguf import GGMLQuantizationType
    from torch import from_numpy
    from transformers import AutoModelForCausalLM

    width = read_model(GOLDEN / name).hidden
    kind = GGMLQuantizationType[type_ if width % 32 == 0 else "F16"]
    file = to_gguf(GOLDEN / name, tmp_path / "m.gguf", lambda name: kind)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype="float32")
    config = read_model(file)
    tokens = np.random.default_rng(2026).integers(0, config.vocabulary, 50)
    expected = reference(from_numpy(tokens)[None]).logits[0].detach().numpy()
    with LocalSession(file, ReferenceEngine, uneven_shares(units(config, "fp32", 32), 3), tmp_path) as ranks:
        got = ranks.step(tokens.tolist(), 0)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_tokenizer_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import AutoTokenizer

    file = to_gguf(BUNDLED, tmp_path / "m.gguf")
    reference, ours = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name), load_tokenizer(file)
    for text in ("ROMEO:\nLook, good sir", "  12345 größer 漢字 👩‍👩‍👧\n\n", "<|begin|>Don't<|end|>"):
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
