"""Adapters in GGUF files: what llama.cpp's converter makes of PEFT's is read as those; what does not fit is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from motley.daemon.adapters.reading import WEIGHTS, read_adapter
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.plugins.adapted_engine import AdapterProduct
from tests.adapters.adapted import write_adapter
from tests.models.cases import Case, golden_case
from tests.models.to_gguf import INTERLEAVED, gguf_name, interleaved, text_config

Type = gguf.GGMLQuantizationType
ALPHA = 6.0


def to_gguf(
    case: Case, peft: Path, file: Path, type_: Type, change: Callable[[gguf.GGUFWriter], Any] = lambda writer: None
) -> Path:
    """Convert a folder in PEFT's format."""
    architecture = {"qwen2": "qwen2", "granite": "granite", "llama": "llama"}[case.model.family]
    config = text_config(case.folder)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", ALPHA)
    change(writer)
    for name, values in load_file(peft / WEIGHTS).items():
        module, _, side = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        if side == "embedding_A":  # as llama.cpp looks rows up in it
            values = np.ascontiguousarray(values.T)
        side = side.removeprefix("embedding_")
        last = module.split(".")[-1]
        if side == "B" and architecture in INTERLEAVED and last in heads:
            values = interleaved(values, heads[last])
        own = f"{gguf_name(f'{module}.weight', architecture)}.lora_{side.lower()}"
        writer.add_tensor(own, gguf.quants.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.BF16])
@pytest.mark.parametrize("name", ["llama-mqa", "qwen2", "granite"])
def test_a_converted_adapter_is_the_same(name: str, type_: Type, tmp_path: Path) -> None:
    case = golden_case(name)
    peft = write_adapter(tmp_path / "peft", case.model, seed=1, rank=4, lora_alpha=ALPHA, rows=True)
    expected = read_adapter(peft, case.model)
    got = read_adapter(to_gguf(case, peft, tmp_path / "adapter.gguf", type_), case.model)
    assert got.products.keys() == expected.products.keys()
    assert got.ranks == (4,)
    pairs = [(got.products[tensor], product) for tensor, product in expected.products.items()]
    for product, other in [*pairs, (got.embedding, expected.embedding)]:
        assert isinstance(product, AdapterProduct)
        for ours, theirs in zip(product, other, strict=True):  # type: ignore[arg-type]
            limit = {Type.F32: 0.0, Type.F16: 2**-10, Type.BF16: 2**-7}[type_]
            theirs = theirs.astype(np.float32)
            assert (np.abs(ours.astype(np.float32) - theirs) <= limit * np.abs(theirs) + 1e-7 * (limit > 0)).all()
    if type_ is not Type.F32:
        assert {product.down.itemsize for product in got.products.values()} == {2}, "as they are stored"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda writer: writer.add_array("adapter.alora.invocation_tokens", [1]), r"adapter\.alora\.invocation_tokens"),
        (lambda writer: writer.add_tensor("output_norm.weight", np.ones(4, np.float32)), "is no matrix of LoRA"),
        (
            lambda writer: writer.add_tensor("blk.0.ffn_up_exps.weight.lora_a", np.ones((2, 2, 4), np.float32)),
            "no matrices of routed experts",
        ),
        (
            lambda writer: writer.add_tensor("blk.7.attn_q.weight.lora_a", np.ones((2, 4), np.float32)),
            r"blk\.7\.attn_q\.weight\.lora_a': this model .* has no such matrix",
        ),
    ],
)
def test_what_does_not_fit_is_told(change: Callable[[gguf.GGUFWriter], Any], told: str, tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    peft = write_adapter(tmp_path / "peft", case.model, seed=1)
    file = to_gguf(case, peft, tmp_path / "adapter.gguf", Type.F32, change)
    with pytest.raises(CheckpointError, match=told):
        read_adapter(file, case.model)


def test_a_model_is_no_adapter_and_half_a_file_none_either(tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"its general\.type is None"):
        read_adapter(tmp_path / "model.gguf", case.model, most=0)  # which is told before how large it is
    peft = write_adapter(tmp_path / "peft", case.model, seed=1)
    file = to_gguf(case, peft, tmp_path / "adapter.gguf", Type.F32)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapter(file, case.model)
