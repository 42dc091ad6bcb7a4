"""Quantised checkpoints end to end: a tiny model in each format, against float64 with its weights dequantised.

The twin of a packed model has the same weights in float32, by the formats' definitions; only what is not
packed, such as its head, is what int8 makes of it, as that is how a matrix of floats is held.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from motley.daemon.models.cutting.holding import FLOATS, narrowed, wanted_format
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import fused_matrices, units
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import HEAD, expected_shapes
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.packing_keys import read_packing
from motley.daemon.models.reading import read_model
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.packed import Packing
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.quantise import quantise, unpack
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE, Encoding
from motley.daemon.weights.stored import Codes, Format, dequantised
from motley.plugins.engine import F32, EngineFactory, EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, shaped, uneven_shares
from tests.weights.packing import (
    Array,
    Tensors,
    awq,
    compressed,
    dequantised_awq,
    dequantised_gptq,
    fp8,
    gptq,
    nf4,
    nvfp4,
    random_matrix,
    save,
)

EXACT_TOLERANCE = 2e-6
"""Relative, between float64 forward passes of weights that are equal but for the rounding of the twin to float32."""
FP32_TOLERANCE = 1e-4
QUANTISED_TOLERANCE = 0.05
"""Relative RMS: the runtime quantises activations to int8."""
TOKENS = [5, 9, 40, 2, 61, 33, 17, 8, 50, 21]


@dataclass(frozen=True)
class Kind:
    """A way to pack a model."""

    name: str
    config: dict[str, Any]
    pack: Callable[[int, int, int], tuple[Tensors, Array]]
    """Rows, columns and a seed to a matrix's tensors, by the last parts of their names, and its values."""
    bias: bool = False
    plain: str = ""
    """A matrix that is not packed, and becomes int8."""
    exact: bool = True
    """Whether its codes are kept; else matrices become int8."""

    def __str__(self) -> str:
        return self.name


def gptq_kind(
    name: str, bits: int, group: int, version: int, zeros: int | None = None, bias: bool = False, ordered: bool = True
) -> Kind:
    def pack(rows: int, columns: int, seed: int) -> tuple[Tensors, Array]:
        size = columns if group == -1 else group
        parts = gptq(*random_matrix(rows, columns, size, bits, seed, zeros), bits, version)
        if not ordered:
            parts["g_idx"] = np.random.default_rng(seed).permutation(parts["g_idx"])
        return parts, dequantised_gptq(parts, bits, version)

    checkpoint_format = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": not ordered, **checkpoint_format}
    return Kind(name, config, pack, bias, exact=ordered)


def awq_kind(name: str, group: int, plain: str = "", **more: Any) -> Kind:
    def pack(rows: int, columns: int, seed: int) -> tuple[Tensors, Array]:
        parts = awq(*random_matrix(rows, columns, group, 4, seed))
        return parts, dequantised_awq(parts, group)

    return Kind(name, {"quant_method": "awq", "bits": 4, "group_size": group, **more}, pack, plain=plain)


def scheme(form: str, **weights: Any) -> dict[str, Any]:
    """What compressed-tensors writes of all layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def compressed_kind(
    name: str, bits: int, group: int, zeros: int | None = None, ordered: bool = True, words: bool = True
) -> Kind:
    def pack(rows: int, columns: int, seed: int) -> tuple[Tensors, Array]:
        size = columns if group == -1 else group
        order = None if ordered else np.random.default_rng(seed).permutation(np.arange(columns) // size)
        return compressed(*random_matrix(rows, columns, size, bits, seed, zeros), bits, order, words)

    config = scheme(
        "pack-quantized" if words else "int-quantized",
        num_bits=bits,
        type="int",
        symmetric=zeros is not None,
        strategy="channel" if group == -1 else "group",
        group_size=None if group == -1 else group,
        actorder="weight" if ordered else "group",
    )
    return Kind(name, config, pack, exact=ordered)


KINDS = [
    gptq_kind("gptq asymmetric", 4, 32, 1, bias=True),
    gptq_kind("gptq symmetric", 4, 64, 1, zeros=8),
    gptq_kind("gptq whole rows", 4, -1, 2),
    gptq_kind("gptq int8", 8, 32, 1),
    awq_kind("awq", 64, version="gemm", zero_point=True),
    awq_kind(
        "awq but one",
        32,
        plain="model.layers.1.self_attn.k_proj.weight",
        modules_to_not_convert=["layers.1.self_attn.k_proj"],
    ),
    gptq_kind("gptq act-order", 4, 32, 1, ordered=False),
    compressed_kind("compressed int4", 4, 32, zeros=8),
    compressed_kind("compressed int4 asymmetric", 4, 64),
    compressed_kind("compressed int4 act-order", 4, 64, ordered=False),
    compressed_kind("compressed int8 channels", 8, -1, zeros=128),
    compressed_kind("compressed int8 bytes", 8, 32, words=False),
    Kind("nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, partial(nvfp4, modelopt=True)),
    Kind(
        "compressed nvfp4",
        scheme("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        partial(nvfp4, modelopt=False),
    ),
    Kind("nf4", {"quant_method": "bitsandbytes", "load_in_4bit": True}, partial(nf4, nested=False), exact=False),
    Kind(
        "nf4 nested",
        {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        partial(nf4, nested=True),
        exact=False,
    ),
    Kind(
        "compressed fp8 channels",
        scheme("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda rows, columns, seed: fp8(rows, columns, seed, (rows, 1)),
        exact=False,
    ),
    Kind(
        "fp8 tensors",
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        lambda rows, columns, seed: fp8(rows, columns, seed, (), "_scale_inv"),
        exact=False,
    ),
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)


def make(kind: Kind, folder: Path) -> tuple[Path, Path]:
    """A packed model and its twin in float32."""
    settings: dict[str, Any] = {
        "model_type": "qwen2" if kind.bias else "llama",
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 32,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    plain = save(folder / "plain", {}, settings)
    model = read_model(plain)
    packed: Tensors = {}
    twin: Tensors = {}
    random = np.random.default_rng(0)
    matrices = {name for _, names in fused_matrices(model) for name in names if name != HEAD}
    for seed, (name, shape) in enumerate(expected_shapes(model).items()):
        if name not in matrices or name == kind.plain:
            values = random.normal(1 if len(shape) == 1 else 0, 0.2, shape).astype(np.float16)
            packed[name], twin[name] = values, values.astype(np.float32)
            continue
        parts, values = kind.pack(shape[0], shape[1], seed)
        packed |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        twin[name] = values.astype(np.float32)
    for name in filter(None, ("lm_head.weight", kind.plain, *(() if kind.exact else matrices))):
        twin[name] = dequantised(Codes(*quantise(twin[name], 32, Encoding.INT8)), Format(Encoding.INT8, 32))
    return (
        save(folder / "packed", packed, settings | {"quantization_config": kind.config}),
        save(folder / "twin", twin, settings),
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = {kind.name: make(kind, tmp_path_factory.mktemp("kind")) for kind in KINDS}
    return lambda kind: made[kind.name]


def logits(model: Path, folder: Path, factory: EngineFactory, ranks: int, quantisation: str, **extra: str) -> F32:
    with open_model(model) as opened:
        shares = uneven_shares(units(opened.model, quantisation, 32, opened.stored), ranks)
    options = EngineOptions(extra=extra)
    with LocalSession(model, factory, shares, folder, quantisation, options=options) as session:
        first = session.step(TOKENS[:7], 0).copy()
        return np.concatenate([first, *(session.step([token], 7 + index) for index, token in enumerate(TOKENS[7:]))])


@every_kind
def test_served_as_stored_at_any_split(kind: Kind, models: Any, tmp_path: Path) -> None:
    packed, twin = models(kind)
    expected = logits(twin, tmp_path / "twin", ReferenceEngine, 1, "fp32", dtype="float64")
    exact = logits(packed, tmp_path / "64", ReferenceEngine, 1, "stored", dtype="float64")
    scale = np.abs(expected).max()
    assert np.abs(exact - expected).max() < EXACT_TOLERANCE * scale
    for ranks in (1, 2, 3):
        got = logits(packed, tmp_path / f"reference {ranks}", ReferenceEngine, ranks, "stored")
        assert np.abs(got - expected).max() < FP32_TOLERANCE * scale
        got = logits(packed, tmp_path / f"runtime {ranks}", OnnxRuntimeEngine, ranks, "stored")
        assert np.linalg.norm(got - expected) < QUANTISED_TOLERANCE * np.linalg.norm(expected)


@every_kind
def test_dequantised_on_request(kind: Kind, models: Any, tmp_path: Path) -> None:
    packed, twin = models(kind)
    expected = logits(twin, tmp_path / "twin", OnnxRuntimeEngine, 1, "fp32")
    got = logits(packed, tmp_path / "packed", OnnxRuntimeEngine, 2, "fp32")
    limit = 0.02 if kind.exact else 0.06  # the floats of the twin are rounded to int8
    assert np.abs(got - expected).max() < limit * np.abs(expected).max()


@every_kind
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_every_share_has_the_codes_of_the_checkpoint(kind: Kind, ranks: int, models: Any, tmp_path: Path) -> None:
    """Bit for bit, at any split: what a share's codes, scales and zero points stand for is the twin's float32."""
    packed, twin = models(kind)
    with open_model(packed) as opened, SafetensorsCheckpoint(twin) as floats:
        shares = uneven_shares(units(opened.model, "stored", 32, opened.stored), ranks)
        for rank in range(ranks):
            declared = build_rank_graph(opened.model, shares, rank, "stored", 32, 64, opened.stored)
            path = tmp_path / f"share {rank}"
            write_share(opened.source, declared.weights, declared.share_bytes, path)
            share = path.read_bytes()
            for place in declared.weights:
                weight = place.weight
                expected = np.concatenate([floats.read(piece) for piece in weight.pieces])
                if weight.encoding is Encoding.FP32:
                    assert len(weight.shape) == 1
                    got = np.frombuffer(share, np.float32, len(expected), place.data_offset)
                else:
                    rows = weight.shape[0]
                    codes = np.frombuffer(share, np.uint8, weight.data_bytes, place.data_offset).reshape(rows, -1)
                    assert weight.scale_shape is not None
                    count = weight.scale_bytes // 4
                    scales = np.frombuffer(share, np.float32, count, place.scale_offset).reshape(weight.scale_shape)
                    zeros = np.frombuffer(share, np.uint8, weight.zero_bytes, place.zero_offset).reshape(rows, -1)
                    if weight.encoding is Encoding.INT4:
                        zeros = unpack(zeros)
                    form = Format(weight.encoding, weight.block, weight.zeros)
                    got = dequantised(Codes(codes, scales, zeros if weight.zeros else None), form)
                np.testing.assert_array_equal(got, expected)


def added(packed: Path, to: Path, more: Tensors) -> Path:
    """A packed model with more tensors, which are in a file of their own."""
    shutil.copytree(packed, to)
    (to / "model.safetensors").rename(to / "packed.safetensors")
    save_file(more, to / "more.safetensors")
    with safe_open(to / "packed.safetensors", "numpy") as own:
        files = dict.fromkeys(own.keys(), "packed.safetensors") | dict.fromkeys(more, "more.safetensors")
    (to / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return to


@every_kind
def test_a_tensor_too_many_is_named(kind: Kind, models: Any, tmp_path: Path) -> None:
    one, layer = np.ones(1, np.float32), "model.layers.0."
    harmless = {f"{layer}self_attn.k_proj.k_scale": one, f"{layer}mlp.up_proj.output_scale": one}
    with open_model(added(models(kind)[0], tmp_path / "harmless", harmless)) as opened:
        assert len(opened.model.layers) == 2
    others = {
        f"{layer}self_attn.q_norm.weight": "in a layer of the model",
        f"{layer}mlp.up_proj.pre_quant_scale": "in a layer of the model",
        f"{layer}mlp.gate.qweight": "in a layer of the model",
        "model.layers.2.mlp.up_proj.weight": "in a layer beyond the 2 of the model",
    }
    for number, (name, where) in enumerate(others.items()):
        folder = added(models(kind)[0], tmp_path / f"other {number}", {name: one})
        with pytest.raises(CheckpointError, match=f"tensor {name!r} is {where}"), open_model(folder):
            pass


def test_biases_of_zeros_beside_gptq_matrices_change_nothing(models: Any, tmp_path: Path) -> None:
    """AutoGPTQ wrote them. Others are of another model, and so are those beside what is not packed."""
    packed, zeros = models(KINDS[1])[0], np.zeros(192, np.float16)
    beside, plain = "model.layers.0.self_attn.o_proj.bias", "model.layers.0.input_layernorm.bias"
    with open_model(added(packed, tmp_path / "zeros", {beside: zeros})) as opened:
        assert beside not in expected_shapes(opened.model)
    for name, values in ((beside, zeros + 1), (plain, zeros)):
        folder = added(packed, tmp_path / name, {name: values})
        with pytest.raises(CheckpointError, match=f"{name}' is in a layer of the model"), open_model(folder):
            pass


def test_what_a_matrix_was_packed_in_beside_the_matrix_is_named(models: Any, tmp_path: Path) -> None:
    both = {"model.layers.0.mlp.up_proj.weight": np.zeros((320, 192), np.float16)}
    folder = added(models(KINDS[1])[0], tmp_path / "both", both)
    with pytest.raises(CheckpointError, match=r"up_proj\.g_idx' is in a layer of the model"), open_model(folder):
        pass


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
def test_graphs_with_zero_points_are_valid(kind: Kind, models: Any, tmp_path: Path) -> None:
    with open_model(models(kind)[0]) as opened:
        shares = uneven_shares(units(opened.model, "stored", 32, opened.stored), 2)
        declared = build_rank_graph(opened.model, shares, 0, "stored", 32, 64, opened.stored)
        write_share(opened.source, declared.weights, declared.share_bytes, tmp_path / SHARE_FILE)
    own = [tensor for tensor in declared.proto.graph.initializer if tensor.name.endswith(".zero")]
    assert len(own) == 8
    (tmp_path / "model.onnx").write_bytes(declared.proto.SerializeToString())
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)


def test_what_is_told(models: Any) -> None:
    def line(kind: Kind, quantisation: str) -> str:
        with open_model(models(kind)[0]) as opened:
            return profile(opened.model, quantisation, 32, opened.stored).matrices

    assert line(KINDS[0], "stored") == "14 GPTQ int4 as stored, 1 F16 converted to int8 (error about 0.5 %)"
    assert line(KINDS[0], "int8") == "14 GPTQ int4 as stored, 1 F16 converted to int8 (error about 0.5 %)"
    assert (
        line(KINDS[0], "int4")
        == "14 GPTQ int4 converted to int4 (error about 9 %), 1 F16 converted to int4 (error about 9 %)"
    )
    assert line(KINDS[1], "int4") == "14 GPTQ int4 as stored, 1 F16 converted to int4 (error about 9 %)"
    assert line(KINDS[5], "stored") == "13 AWQ int4 as stored, 2 F16 converted to int8 (error about 0.5 %)"
    assert line(KINDS[4], "fp32") == "14 AWQ int4 in fp32, 1 F16 in fp32"


def test_floats_asked_for_as_stored_are_int8() -> None:
    assert units(shaped(), "stored", 32) == units(shaped(), "int8", 32)
    assert profile(shaped(), "stored", 32).matrices == "155 floats converted to int8 (error about 0.5 %)"


formats = st.builds(
    Format,
    st.sampled_from([Encoding.INT8, Encoding.INT4]),
    st.sampled_from([16, 32, 64, 128, 5632]),
    st.booleans(),
)


@given(st.lists(formats, min_size=1, max_size=3))
def test_fused_matrices_are_held_exactly(parts: list[Format]) -> None:
    wanted = wanted_format(parts, "stored", 32)
    held = narrowed(wanted, 5632, "width")
    assert all(held.expresses(part) for part in parts)
    if len(set(parts)) == 1:
        assert (held.encoding, held.zeros) == (parts[0].encoding, parts[0].zeros)


@given(st.lists(formats, max_size=2))
def test_a_float_among_fused_matrices_makes_them_int8(parts: list[Format]) -> None:
    assert wanted_format([*parts, FLOATS], "stored", 32) == Format(Encoding.INT8, 32)


@given(formats, formats, st.sampled_from([Heads(4, 2, 64), Heads(8, 2, 64), Heads(32, 2, 128), Heads(2, 2, 32)]))
def test_no_cut_parts_a_block(one: Format, other: Format, heads: Heads) -> None:
    """Layers may be stored differently; a row of zero points is whole bytes in every share."""
    model = shaped(
        num_hidden_layers=2,
        num_attention_heads=heads.queries,
        num_key_value_heads=heads.keys,
        head_dim=heads.size,
    )
    stored = {name: one if ".0." in name else other for _, names in fused_matrices(model) for name in names}
    stored[HEAD] = FLOATS
    cut = units(model, "stored", 32, stored)
    block = cut.mlp_blocks[5632]
    assert cut.mlp * block == 5632
    for layer in range(2):
        at = f"model.layers.{layer}"
        widths = {f"{at}.mlp.down_proj.weight": [block], f"{at}.mlp.up_proj.weight": [model.hidden]}
        widths[f"{at}.self_attn.o_proj.weight"] = [heads.group // split * heads.size for split in cut.attention_splits]
        for name, columns in widths.items():
            held = cut.held[name]
            assert held.expresses(stored[name])
            together = 2 if held.zeros and held.encoding is Encoding.INT4 else 1
            assert all(width % (held.block * together) == 0 for width in columns)


def test_a_config_that_packs_what_is_not_packed(models: Any, tmp_path: Path) -> None:
    packed, twin = models(KINDS[0])
    shutil.copy(twin / "model.safetensors", tmp_path)
    shutil.copy(packed / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="says GPTQ int4, but no tensor is packed"), open_model(tmp_path):
        pass


def test_packed_tensors_that_the_config_does_not_know(models: Any, tmp_path: Path) -> None:
    packed, twin = models(KINDS[0])
    shutil.copy(packed / "model.safetensors", tmp_path)
    shutil.copy(twin / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"qweight' is packed, but config\.json has no"), open_model(tmp_path):
        pass


@pytest.mark.parametrize(
    ("name", "lost", "complaint"),
    [
        ("gptq asymmetric", "qweight", r"q_proj\.weight' is absent; beside it .*q_proj\.qzeros, .*q_proj\.scales"),
        ("awq", "scales", r"q_proj\.scales' is absent; beside it .*q_proj\.qweight"),
        ("compressed int8 bytes", "weight_scale", r"q_proj\.weight' has dtype I8.*; beside it .*weight_zero_point"),
        ("compressed nvfp4", "weight_global_scale", r"is absent; beside it .*q_proj\.weight_packed, .*weight_scale"),
        ("compressed fp8 channels", "weight_scale", r"is absent; beside it there are .*q_proj\.weight"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", r"dtype U8; .*; beside it .*q_proj\.weight\.absmax"),
    ],
)
def test_of_a_matrix_that_is_half_there_all_is_named(name: str, lost: str, complaint: str, tmp_path: Path) -> None:
    """Of the first layer's queries; the others are whole."""
    (kind,) = [each for each in KINDS if each.name == name]
    seeds = []

    def pack(rows: int, columns: int, seed: int) -> tuple[Tensors, Array]:
        parts, values = kind.pack(rows, columns, seed)
        seeds.append(seed)
        return {part: own for part, own in parts.items() if part != lost or len(seeds) > 1}, values

    packed, _ = make(replace(kind, pack=pack), tmp_path)
    with pytest.raises(CheckpointError, match=complaint), open_model(packed):
        pass


def test_a_scale_that_is_no_number(models: Any, tmp_path: Path) -> None:
    packed, _ = models(KINDS[0])
    shutil.copy(packed / "config.json", tmp_path)
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.scales"][3, 5] = np.inf
    save_file(tensors, tmp_path / "model.safetensors")
    with open_model(tmp_path) as opened:
        shares = uneven_shares(units(opened.model, "stored", 32, opened.stored), 1)
        declared = build_rank_graph(opened.model, shares, 0, "stored", 32, 64, opened.stored)
        with pytest.raises(CheckpointError, match=r"1\.mlp\.down_proj\.weight' holds a NaN or an infinity"):
            write_share(opened.source, declared.weights, declared.share_bytes, tmp_path / "share")


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


@pytest.mark.parametrize(
    ("given_", "packing"),
    [
        (None, None),
        (GPTQ, Packing("gptq", 4, 128, zero_offset=1)),
        (GPTQ | {"bits": 8, "group_size": -1, "desc_act": True}, Packing("gptq", 8, 0, zero_offset=1, reordered=True)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False, "damp_percent": 0.1}, Packing("gptq", 4, 128)),
        (AWQ | {"zero_point": True, "modules_to_not_convert": None}, Packing("awq", 4, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}, Packing("awq", 4, 64)),
    ],
)
def test_how_a_checkpoint_is_packed(tmp_path: Path, given_: Any, packing: Packing | None) -> None:
    assert read_packing(save(tmp_path, {}, {"model_type": "llama", "quantization_config": given_})) == packing


@pytest.mark.parametrize(
    ("given_", "complaint"),
    [
        ("yes", "quantization_config = "),
        ({}, r"quantization_config\.quant_method is absent"),
        ({"quant_method": "quanto"}, r'quant_method = "quanto" is not supported.*take the model unquantised'),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, r"load_in_8bit = true .* \(load_in_4bit\)"),
        ({"quant_method": "modelopt"}, r"quant_algo is absent; expected FP8, NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, r"group_size = 32"),
        ({"quant_method": "compressed-tensors"}, r"config_groups is absent; expected groups"),
        (scheme("marlin-24"), r'format = "marlin-24" is not supported; supported: pack-quantized'),
        (scheme("pack-quantized", num_bits=3, type="int", strategy="channel"), r"weights\.num_bits = 3 .* 4 or 8"),
        (scheme("pack-quantized", num_bits=4, type="int"), r"weights\.strategy is absent; expected channel, group"),
        (scheme("pack-quantized", num_bits=4, type="float", strategy="channel"), r"weights\.type = .float."),
        (
            scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="x"),
            r'weights\.actorder = "x"',
        ),
        (scheme("float-quantized", num_bits=8, type="float", strategy="block"), r"weights\.block_structure is absent"),
        (scheme("float-quantized") | {"sparsity_config": {"format": "sparse-24"}}, r"sparsity_config = "),
        (scheme("float-quantized") | {"transform_config": {"config_groups": {"u": {}}}}, r"not rotated"),
        (GPTQ | {"bits": 3}, r"bits = 3 is not supported; supported: 4 or 8 with GPTQ"),
        (GPTQ | {"bits": None}, r"bits"),
        (GPTQ | {"group_size": 100}, r"group_size = 100 .*32, 64, 128, 256, or -1"),
        (GPTQ | {"group_size": "128"}, r"group_size"),
        (GPTQ | {"group_size": True}, r"group_size"),
        (GPTQ | {"checkpoint_format": "marlin"}, r'checkpoint_format = "marlin"'),
        (GPTQ | {"format": "bitblas"}, r'format = "bitblas"'),
        (GPTQ | {"is_marlin_format": True}, r"is_marlin_format = true"),
        (GPTQ | {"pack_dtype": "int16"}, r"pack_dtype"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, r"dynamic"),
        (AWQ | {"bits": 8}, r"bits = 8"),
        (AWQ | {"version": "gemv"}, r'version = "gemv" is not supported; supported: only "gemm"'),
        (AWQ | {"zero_point": False}, r"zero_point = false"),
    ],
)
def test_other_ways_to_quantise_are_refused(tmp_path: Path, given_: Any, complaint: str) -> None:
    model = save(tmp_path, {}, {"model_type": "llama", "quantization_config": given_})
    with pytest.raises(ConfigError, match=complaint):
        read_packing(model)
