"""GGUF files served as stored: blocks that the engines have keep their bits, others become int8, and that is told."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.weights.checkpoints.gguf.blocks import block_size
from motley.plugins.engine import F32, EngineFactory
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, uneven_shares
from tests.models.graph.test_whole_experts import joined
from tests.models.to_gguf import add_config, write

HIDDEN, COLUMNS, HEADS, KV_HEADS, WORDS, LAYERS = 256, 512, 4, 2, 96, 2
KV_ROWS = HIDDEN * KV_HEADS // HEADS
TOKENS = np.random.default_rng(7).integers(0, WORDS, 20).tolist()

SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_ROWS, HIDDEN),
    "attn_v": (KV_ROWS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (COLUMNS, HIDDEN),
    "ffn_up": (COLUMNS, HIDDEN),
    "ffn_down": (HIDDEN, COLUMNS),
}
EXPERTS, SHARED = 4, 256
SHAPES_WITH_EXPERTS = {name: shape for name, shape in SHAPES.items() if name.startswith("attn")} | {
    "ffn_gate_exps": (EXPERTS, COLUMNS, HIDDEN),
    "ffn_up_exps": (EXPERTS, COLUMNS, HIDDEN),
    "ffn_down_exps": (EXPERTS, HIDDEN, COLUMNS),
    "ffn_gate_shexp": (SHARED, HIDDEN),
    "ffn_up_shexp": (SHARED, HIDDEN),
    "ffn_down_shexp": (HIDDEN, SHARED),
}


def make(file: Path, type_of: Callable[[str], str], experts: bool = False) -> Path:
    """A model of random blocks: any bits, and scales that make weights of about 0.05."""
    random = np.random.default_rng(5)
    writer = gguf.GGUFWriter(file, "qwen2moe" if experts else "llama")
    config = {
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 64,
        "hidden_size": HIDDEN,
        "intermediate_size": COLUMNS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": WORDS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": 2,
    }
    add_config(writer, config)
    if experts:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(COLUMNS)
        writer.add_expert_shared_feed_forward_length(SHARED)

    def add(name: str, *shape: int) -> None:
        type_ = type_of(name)
        if type_ in ("F32", "F16"):
            values = (0.05 * random.standard_normal(shape)).astype({"F32": "f4", "F16": "f2"}[type_])
            writer.add_tensor(f"{name}.weight", values)
            return
        elements, size = block_size(type_)
        blocks = random.integers(0, 256, (prod(shape) // elements, size), dtype=np.uint8)
        scale, least = {"Q4_0": (0.01, 0), "Q8_0": (7e-4, 0), "Q6_K": (4e-5, 0), "Q4_K": (2e-4, 1.5e-3)}[type_]
        halves = [(208, scale)] if type_ == "Q6_K" else [(0, scale), (2, least)][: 1 + bool(least)]
        for at, size in halves:
            blocks[:, at : at + 2] = (size * random.uniform(0.5, 1.5, (len(blocks), 1))).astype("f2").view(np.uint8)
        rows = blocks.reshape(*shape[:-1], -1)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=gguf.GGMLQuantizationType[type_])

    add("token_embd", WORDS, HIDDEN)
    add("output", WORDS, HIDDEN)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(HIDDEN, np.float32))
        for part, shape in (SHAPES_WITH_EXPERTS if experts else SHAPES).items():
            add(f"blk.{layer}.{part}", *shape)
        if experts:
            router = random.standard_normal((EXPERTS + 1, HIDDEN)).astype(np.float32) / HIDDEN**0.5
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router[1:])
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp_shexp.weight", router[0])
    write(writer)
    return file


def logits(
    file: Path,
    folder: Path,
    engine: EngineFactory,
    ranks: int,
    quantisation: str,
    declare: Callable[..., Declared] = build_rank_graph,
) -> F32:
    with open_model(file) as opened:
        shares = uneven_shares(units(opened.model, quantisation, 32, opened.stored), ranks)
    with LocalSession(file, engine, shares, folder, quantisation, declare=declare) as session:
        return session.step(TOKENS, 0)


def told(file: Path, quantisation: str = "stored") -> str:
    with open_model(file) as opened:
        return profile(opened.model, quantisation, 32, opened.stored).matrices


def distance(got: F32, expected: F32) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0", "Q6_K"])
def test_exact_formats_are_served_bit_for_bit(type_: str, tmp_path: Path) -> None:
    """The reference engine multiplies with the same float32 whether they come from the file or from a share's codes."""
    file = make(tmp_path / "m.gguf", lambda name: type_)
    assert told(file) == f"{7 * LAYERS + 1} {type_} as stored"
    expected = logits(file, tmp_path / "fp32", ReferenceEngine, 2, "fp32")
    assert np.isfinite(expected).all()
    for ranks in (1, 2, 3):
        got = logits(file, tmp_path / f"stored {ranks}", ReferenceEngine, ranks, "stored")
        assert distance(got, expected) < 1e-5
    runtime = logits(file, tmp_path / "runtime", OnnxRuntimeEngine, 2, "stored")
    assert distance(runtime, expected) < 0.02  # it rounds activations to int8


def test_the_usual_mixture(tmp_path: Path) -> None:
    """As llama.cpp's Q4_K_M: values and down projections finer in some layers, the head in Q6_K."""

    def type_of(name: str) -> str:
        return "Q6_K" if name in ("output", "blk.0.attn_v", "blk.0.ffn_down") else "Q4_K"

    file = make(tmp_path / "m.gguf", type_of)
    line = told(file)
    assert "Q6_K as stored" in line
    assert "Q4_K converted to int8" in line
    expected = logits(file, tmp_path / "fp32", ReferenceEngine, 1, "fp32")
    got = logits(file, tmp_path / "stored", OnnxRuntimeEngine, 3, "stored")
    assert distance(got, expected) < 0.03


@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0", "Q6_K"])
def test_experts_are_served_bit_for_bit(type_: str, tmp_path: Path) -> None:
    """In slices, and whole beside a trunk, against the dequantised weights; the routers stay float32."""
    file = make(tmp_path / "m.gguf", lambda name: type_, experts=True)
    assert told(file) == f"{(4 + 3 * (EXPERTS + 1)) * LAYERS + 1} {type_} as stored"
    expected = logits(file, tmp_path / "fp32", ReferenceEngine, 2, "fp32")
    assert np.isfinite(expected).all()
    for layout, declare in (("sliced", build_rank_graph), ("whole", joined)):
        for ranks in (1, 2, 3):
            got = logits(file, tmp_path / f"{layout} {ranks}", ReferenceEngine, ranks, "stored", declare)
            assert distance(got, expected) < 1e-5
        runtime = logits(file, tmp_path / f"{layout} runtime", OnnxRuntimeEngine, 2, "stored", declare)
        assert distance(runtime, expected) < 0.03  # it rounds activations to int8


def test_experts_in_the_usual_mixture(tmp_path: Path) -> None:
    def type_of(name: str) -> str:
        return "Q6_K" if name in ("output", "blk.0.attn_v", "blk.0.ffn_down_exps") else "Q4_K"

    file = make(tmp_path / "m.gguf", type_of, experts=True)
    assert f"{EXPERTS + 1} Q6_K as stored" in told(file)
    expected = logits(file, tmp_path / "fp32", ReferenceEngine, 1, "fp32")
    got = logits(file, tmp_path / "stored", OnnxRuntimeEngine, 3, "stored")
    assert distance(got, expected) < 0.03
