"""GGUF weights: every format against the ``gguf`` package, any piece of them, and files that are not what they were."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.weights.checkpoints import tensor_files
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.blocks import EXACT, READABLE, block_size
from motley.daemon.weights.checkpoints.gguf.checkpoint import GgufCheckpoint, gguf_parts
from motley.daemon.weights.checkpoints.gguf.names import hugging_face_name
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import Source, dequantised
from tests.models.to_gguf import interleaved, write

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

ROWS, COLUMNS = 24, 512
HEADS, KEY_HEADS = 3, 2
UP = "model.layers.0.mlp.up_proj.weight"
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def random_rows(type_: str, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> U8:
    """Rows of any bits at all, but that floating-point numbers are finite and of a usual size."""
    elements, size = block_size(type_)
    random = np.random.default_rng(seed)
    values = random.standard_normal((rows, columns)).astype(np.float32)
    if type_ in ("F32", "F16", "BF16"):
        rows_of_bytes: U8 = gguf.quants.quantize(values, Type[type_]).view(np.uint8)
        return rows_of_bytes
    blocks = random.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    if type_ == "MXFP4":
        blocks[:, 0] = random.integers(100, 150, len(blocks), dtype=np.uint8)
        return blocks.reshape(rows, -1)
    if type_ == "NVFP4":
        blocks[:, :4] = random.integers(0, 127, (len(blocks), 4), dtype=np.uint8)
        return blocks.reshape(rows, -1)
    if type_ == "IQ1_M":  # whose f16 is a nibble in each of four numbers: neither infinite nor no number
        blocks[:, -1] = blocks[:, -1] & 15 | 0x30
        return blocks.reshape(rows, -1)
    halves = {"Q6_K": [208], "Q2_K": [80, 82], "Q3_K": [108]}.get(type_) or [0, 2][: 1 + (type_[-2:] in ("_1", "_K"))]
    for at in halves:
        blocks[:, at : at + 2] = random.uniform(-2, 2, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def save(file: Path, tensors: dict[str, tuple[str, U8]], architecture: str = "qwen2", parts: int = 0) -> Path:
    """Write tensors given as their type and rows of bytes."""
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=parts)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    for name, (type_, rows) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=Type[type_])
    write(writer)
    return file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix of every type, as the up projection of a layer of its own."""
    tensors = {f"blk.{layer}.ffn_up.weight": (type_, random_rows(type_)) for layer, type_ in enumerate(READABLE)}
    return save(tmp_path_factory.mktemp("gguf") / "every.gguf", tensors)


def name_of(type_: str) -> str:
    return UP.replace("0", str(READABLE.index(type_)))


def reference(type_: str) -> F32:
    values: F32 = gguf.quants.dequantize(random_rows(type_), Type[type_])
    return values


def bits(values: F32) -> Any:
    return np.ascontiguousarray(values).view(np.uint32).tolist()


@pytest.mark.parametrize("type_", READABLE)
def test_every_type_is_read_as_the_package_reads_it(type_: str, file: Path) -> None:
    name, expected = name_of(type_), reference(type_)
    assert np.isfinite(expected).all()
    with GgufCheckpoint(file) as checkpoint:
        checkpoint.expect({name: (ROWS, COLUMNS)})
        assert bits(checkpoint.read(Piece(name, range(ROWS), range(COLUMNS)))) == bits(expected)
        assert bits(checkpoint.rows(name, [3, 0, 3, ROWS - 1])) == bits(expected[[3, 0, 3, ROWS - 1]])
        assert checkpoint.format(name).called == type_
        assert (checkpoint.format(name).encoding is not Encoding.FP32) == (type_ in EXACT)


@given(data=st.data())
def test_any_piece_is_that_part_of_the_whole(data: st.DataObject, file: Path) -> None:
    type_ = data.draw(st.sampled_from(READABLE))
    rows = range(*sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)))))
    columns = range(*sorted(data.draw(st.tuples(st.integers(0, COLUMNS), st.integers(0, COLUMNS)))))
    piece = Piece(name_of(type_), rows, columns)
    with GgufCheckpoint(file) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_SCRATCH", data.draw(st.sampled_from([1, 500, 1 << 20])))
        patch.setattr(tensor_files, "_GAP", data.draw(st.sampled_from([0, 100, 1 << 14])))
        values = checkpoint.read(piece)
    expected = reference(type_)[rows.start : rows.stop, columns.start : columns.stop]
    assert values.shape == expected.shape
    assert values.flags.c_contiguous
    assert bits(values) == bits(expected)


@given(data=st.data())
def test_codes_stand_for_the_same_values(data: st.DataObject, file: Path) -> None:
    type_ = data.draw(st.sampled_from(sorted(EXACT)))
    block = EXACT[type_].block
    cuts = st.integers(0, COLUMNS // block)
    rows = range(*sorted(data.draw(st.tuples(st.integers(0, ROWS), st.integers(0, ROWS)))))
    left, right = sorted(data.draw(st.tuples(cuts, cuts)))
    with GgufCheckpoint(file) as checkpoint:
        source: Source = checkpoint
        piece = Piece(name_of(type_), rows, range(left * block, right * block))
        codes, stored = source.codes(piece), source.format(piece.tensor)
        assert (stored.block, stored.zeros, codes.zeros) == (block, False, None)
        assert codes.codes.shape == (len(rows), (right - left) * block // (2 if type_ == "Q4_0" else 1))
        assert codes.scales.shape == (len(rows), right - left)
        assert codes.codes.flags.c_contiguous
        if rows and left < right:
            assert bits(dequantised(codes, stored)) == bits(source.read(piece))


@pytest.mark.parametrize("type_", ["F32", "F16", "Q8_0", "Q6_K"])
def test_llamas_interleaved_rows_are_put_in_order(type_: str, tmp_path: Path) -> None:
    """Blocks lie along a row, so rows may be moved before or after quantising."""
    plain = {"attn_q": random_rows(type_, seed=1), "attn_k": random_rows(type_, seed=2)}
    tensors = {
        f"blk.0.{name}.weight": (type_, interleaved(rows, heads))  # type: ignore[arg-type] # bytes for floats
        for (name, rows), heads in zip(plain.items(), (HEADS, KEY_HEADS), strict=True)
    }
    bias = np.arange(ROWS, dtype=np.float32)
    tensors["blk.0.attn_k.bias"] = ("F32", interleaved(bias, KEY_HEADS).view(np.uint8))
    with GgufCheckpoint(save(tmp_path / "m.gguf", tensors, "llama")) as checkpoint:
        for name, rows in ((QUERY, plain["attn_q"]), (KEY, plain["attn_k"])):
            expected = gguf.quants.dequantize(rows, Type[type_])
            assert bits(checkpoint.read(Piece(name, range(ROWS), range(COLUMNS)))) == bits(expected)
            assert bits(checkpoint.read(Piece(name, range(5, 18), range(256, 512)))) == bits(expected[5:18, 256:])
            if type_ in EXACT:
                piece = Piece(name, range(5, 18), range(256, 512))
                assert bits(dequantised(checkpoint.codes(piece), checkpoint.format(name))) == bits(expected[5:18, 256:])
        assert checkpoint.read(Piece(KEY.replace("weight", "bias"), range(3, 11))).tolist() == bias[3:11].tolist()
    with GgufCheckpoint(save(tmp_path / "q.gguf", tensors, "qwen2")) as checkpoint:
        assert checkpoint.read(Piece(KEY.replace("weight", "bias"), range(ROWS))).tolist() != bias.tolist()


def test_names() -> None:
    assert hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hugging_face_name("output.weight") == "lm_head.weight"
    assert hugging_face_name("blk.12.attn_output.bias") == "model.layers.12.self_attn.o_proj.bias"
    assert hugging_face_name("blk.3.attn_q_norm.weight") == "model.layers.3.self_attn.q_norm.weight"
    assert hugging_face_name("blk.1.ffn_gate_inp.weight") == "model.layers.1.mlp.gate.weight"
    assert hugging_face_name("blk.1.ffn_down_shexp.weight") == "model.layers.1.mlp.shared_expert.down_proj.weight"
    assert hugging_face_name("blk.1.ffn_down.12.weight") == "model.layers.1.mlp.experts.12.down_proj.weight"
    for other in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.0.token_embd.weight", "attn_q.weight"):
        assert hugging_face_name(other) == other
    for other in ("blk.0.attn_q.3.weight", "ffn_up.3.weight", "output.3.weight", "blk.0.ffn_up.x.weight"):
        assert hugging_face_name(other) == other


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("gemma3", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("gemma3", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        ("gemma3", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
        ("gemma3", "attn_k_norm.weight", "self_attn.k_norm.weight"),
        ("exaone4", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("exaone4", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
        ("olmo2", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("olmo2", "post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
        ("gpt-oss", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("gpt-oss", "attn_sinks.weight", "self_attn.sinks"),
        ("gpt-oss", "ffn_gate_inp.weight", "mlp.router.weight"),
        ("gpt-oss", "ffn_gate_inp.bias", "mlp.router.bias"),
        ("glm4moe", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("glm4moe", "exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ("glm4moe", "ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
        ("glm4moe", "ffn_up.weight", "mlp.up_proj.weight"),
        ("qwen2moe", "ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
        ("seed_oss", "post_attention_norm.weight", "post_attention_layernorm.weight"),
        ("phi3", "attn_qkv.weight", "self_attn.qkv_proj.weight"),
        ("phi3", "ffn_up.weight", "mlp.gate_up_proj.weight"),
        ("phi3", "ffn_norm.weight", "post_attention_layernorm.weight"),
        ("llama", "ffn_norm.weight", "post_attention_layernorm.weight"),
        ("glm4", "post_ffw_norm.weight", "post_mlp_layernorm.weight"),
        ("gemma2", "ffn_norm.weight", "pre_feedforward_layernorm.weight"),
        ("gemma3n", "altup_correct_scale.weight", "altup.correct_output_scale"),
        ("gemma3n", "laurel_r.weight", "laurel.linear_right.weight"),
        ("gemma3n", "proj.weight", "per_layer_projection.weight"),
        ("gemma4", "ffn_gate_inp.scale", "router.scale"),
        ("gemma4", "layer_output_scale.weight", "layer_scalar"),
        ("gemma4", "ffn_down.3.weight", "experts.3.down_proj.weight"),
        ("gemma4", "ffn_up.scale", None),
        ("gemma3", "ffn_gate_inp.scale", None),
        ("glm-dsa", "indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
        ("glm-dsa", "attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
        ("deepseek2", "indexer.proj.weight", None),
        ("laguna", "attn_gate.weight", "self_attn.g_proj.weight"),
        ("laguna", "ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
        ("llama4", "ffn_gate_inp.weight", "feed_forward.router.weight"),
        ("llama4", "ffn_up.3.weight", "feed_forward.experts.3.up_proj.weight"),
        ("hunyuan-moe", "ffn_gate_inp.weight", "mlp.gate.wg.weight"),
        ("lfm2", "shortconv.in_proj.weight", "conv.in_proj.weight"),
        ("lfm2moe", "ffn_gate.3.weight", "feed_forward.experts.3.w1.weight"),
        ("lfm2moe", "exp_probs_b.bias", "feed_forward.expert_bias"),
        ("granitehybrid", "ssm_d", "mamba.D"),
        ("granitehybrid", "ffn_down_shexp.weight", "shared_mlp.output_linear.weight"),
        ("granitehybrid", "ffn_up.3.weight", "block_sparse_moe.experts.3.up_proj.weight"),
        ("falcon-h1", "ffn_norm", "pre_ff_layernorm.weight"),
        ("bailingmoe3", "ssm_g_a.weight", "self_attn.g_proj.weight"),
        ("bailingmoe3", "attn_gate.weight", "self_attn.g_proj.weight"),
        ("kimi-linear", "ssm_conv1d_q.weight", "self_attn.q_conv1d.weight"),
        ("nemotron_h", "ssm_dt.bias", "mixer.dt_bias"),
        ("nemotron_h_moe", "ffn_latent_up.weight", "mixer.fc2_latent_proj.weight"),
        ("llama", "ssm_d", None),
        ("llama", "shortconv.in_proj.weight", None),
        ("llama", "post_attention_norm.weight", None),
        ("llama", "attn_sinks.weight", None),
        ("glm4moe", "nextn.eh_proj.weight", None),
        ("glm4moe", "exp_probs_b.weight", None),
    ],
)
def test_names_that_architectures_have_of_their_own(architecture: str, name: str, expected: str | None) -> None:
    wanted = f"blk.3.{name}" if expected is None else f"model.layers.3.{expected}"
    assert hugging_face_name(f"blk.3.{name}", architecture) == wanted


def test_names_are_those_of_the_files_architecture(tmp_path: Path) -> None:
    """Of a split model, too, whose later parts may not tell it."""
    tensors = {f"blk.{layer}.ffn_norm.weight": ("F32", bytes_of(4)) for layer in range(3)}
    save(tmp_path / "m.gguf", tensors, "gemma3", parts=1)
    with GgufCheckpoint(min(tmp_path.glob("*.gguf"))) as checkpoint:
        assert checkpoint.names() == [f"model.layers.{layer}.pre_feedforward_layernorm.weight" for layer in range(3)]


# ---------------------------------------------------------------- experts

EXPERTS = 5


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of every type in a layer of its own: down projections by themselves, gates and ups in one."""
    tensors = {}
    for layer, type_ in enumerate(READABLE):
        rows = random_rows(type_, EXPERTS * ROWS).reshape(EXPERTS, ROWS, -1)
        tensors[f"blk.{layer}.ffn_down_exps.weight"] = (type_, rows)
        tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = (type_, rows)
    return save(tmp_path_factory.mktemp("gguf") / "experts.gguf", tensors)


@given(data=st.data())
def test_any_piece_of_an_expert_is_that_part_of_its_bytes(data: st.DataObject, experts: Path) -> None:
    """And nothing outside the expert's own bytes is read for it."""
    type_ = data.draw(st.sampled_from(READABLE))
    number = data.draw(st.integers(0, EXPERTS - 1))
    part = data.draw(st.sampled_from(["down", "gate", "up"]))
    height = ROWS if part == "down" else ROWS // 2
    first = number * ROWS + height * (part == "up")
    rows = range(*sorted(data.draw(st.tuples(st.integers(0, height), st.integers(0, height)))))
    block = EXACT[type_].block if type_ in EXACT else 1
    cuts = st.integers(0, COLUMNS // block)
    left, right = sorted(data.draw(st.tuples(cuts, cuts)))
    name = f"model.layers.{READABLE.index(type_)}.mlp.experts.{number}.{part}_proj.weight"
    piece = Piece(name, rows, range(left * block, right * block))
    whole = gguf.quants.dequantize(random_rows(type_, EXPERTS * ROWS), Type[type_])
    expected = whole[first : first + height][rows.start : rows.stop, left * block : right * block]
    with Watched(experts) as checkpoint:
        info = checkpoint.tensor(name)
        assert (info.shape, info.size) == ((height, COLUMNS), height * len(random_rows(type_, 1).view(np.uint8)[0]))
        assert bits(checkpoint.read(piece)) == bits(expected)
        if type_ in EXACT and rows and left < right:
            assert bits(dequantised(checkpoint.codes(piece), checkpoint.format(name))) == bits(expected)
        assert all(
            info.offset <= start and start + size <= info.offset + info.size for start, size in checkpoint.touched
        )


class Watched(GgufCheckpoint):
    """Which bytes of the file are read, once it is open."""

    def __init__(self, file: Path) -> None:
        self.touched: list[tuple[int, int]] = []
        super().__init__(file)

    def _read_at(self, path: Path, offset: int, view: memoryview) -> None:
        self.touched.append((offset, view.nbytes))
        super()._read_at(path, offset, view)


def test_biases_of_experts_are_apart(tmp_path: Path) -> None:
    values = np.arange(EXPERTS * 8, dtype=np.float32).reshape(EXPERTS, 8)
    tensors = {
        "blk.2.ffn_gate_exps.bias": ("F32", values.view(np.uint8)),
        "blk.2.ffn_gate_up_exps.bias": ("F32", values.view(np.uint8)),
    }
    for own_name, parts in (("ffn_gate_exps", ["gate"]), ("ffn_gate_up_exps", ["gate", "up"])):
        own = {f"blk.2.{own_name}.bias": tensors[f"blk.2.{own_name}.bias"]}
        with GgufCheckpoint(save(tmp_path / "m.gguf", own, "gpt-oss")) as checkpoint:
            assert len(checkpoint.names()) == EXPERTS * len(parts)
            for number in range(EXPERTS):
                for part, expected in zip(parts, np.split(values[number], len(parts)), strict=True):
                    name = f"model.layers.2.mlp.experts.{number}.{part}_proj.bias"
                    assert checkpoint.shape(name) == expected.shape
                    assert checkpoint.read(Piece(name, range(1, 3))).tolist() == expected[1:3].tolist()


def test_experts_that_are_there_twice(tmp_path: Path) -> None:
    stacked = random_rows("F32", 2 * ROWS).reshape(2, ROWS, -1)
    tensors = {
        "blk.0.ffn_up_exps.weight": ("F32", stacked),
        "blk.0.ffn_up.1.weight": ("F32", stacked[1]),
    }
    with pytest.raises(CheckpointError, match=r"tensor 'blk\.0\.ffn_up\.1\.weight' is in m\.gguf too"):
        GgufCheckpoint(save(tmp_path / "m.gguf", tensors))


def test_what_is_no_stack_of_experts_keeps_its_name(tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_up_exps.weight": ("F32", random_rows("F32")),
        "blk.0.ffn_gate_up_exps.weight": ("F32", random_rows("F32", 3).reshape(1, 3, -1)),
        "blk.0.ffn_gate_inp_shexp.weight": ("F32", random_rows("F32", 1)[0]),
    }
    with GgufCheckpoint(save(tmp_path / "m.gguf", tensors)) as checkpoint:
        assert checkpoint.names()[:2] == ["blk.0.ffn_up_exps.weight", "blk.0.ffn_gate_up_exps.weight"]
        assert checkpoint.tensor("model.layers.0.mlp.shared_expert_gate.weight").shape == (1, COLUMNS)


def test_what_is_not_there_or_not_as_expected(file: Path, tmp_path: Path) -> None:
    tensors = {
        "blk.0.ffn_up.weight": ("TQ1_0", np.zeros((2, 54), np.uint8)),
        "output_norm.weight": ("F32", bytes_of(4)),
    }
    with GgufCheckpoint(save(tmp_path / "m.gguf", tensors)) as checkpoint:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.expect({UP: (2, 256), "model.norm.weight": (5,), "lm_head.weight": (2, 4)})
        assert [line.partition(": ")[2] for line in str(caught.value).splitlines()] == [
            f"tensor '{UP}' has dtype TQ1_0; expected one of {', '.join(READABLE)}",
            "tensor 'model.norm.weight' has shape [4]; the config makes it [5]",
            "tensor 'lm_head.weight' is absent (by its Hugging Face name)",
        ]
        with pytest.raises(CheckpointError, match=r"expected to hold \[0:5\]"):
            checkpoint.check(Piece("model.norm.weight", range(5)))
        with pytest.raises(CheckpointError, match="expected a matrix"):
            checkpoint.rows("model.norm.weight", [0])
    with GgufCheckpoint(file) as checkpoint, pytest.raises(IndexError, match=f"{ROWS} is not a row"):
        checkpoint.rows(name_of("Q4_0"), [0, ROWS])


def bytes_of(count: int) -> U8:
    return np.ones(count, np.float32).view(np.uint8)


def test_a_file_that_shrinks_is_an_error(file: Path, tmp_path: Path) -> None:
    copy = shutil.copy(file, tmp_path / "m.gguf")
    with GgufCheckpoint(copy) as checkpoint:
        with copy.open("r+b") as opened:
            opened.truncate(copy.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"m\.gguf: it has become shorter"):
            checkpoint.read(Piece(name_of(READABLE[-1]), range(ROWS), range(COLUMNS)))


def test_fingerprints(file: Path, tmp_path: Path) -> None:
    def fingerprint(path: Path) -> str:
        with GgufCheckpoint(path) as checkpoint:
            return checkpoint.fingerprint()

    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(file, tmp_path / "elsewhere" / "other-name.gguf")
    assert fingerprint(copy) == fingerprint(file)
    with GgufCheckpoint(copy) as checkpoint:
        info = checkpoint.tensor(name_of("Q4_K"))
    with copy.open("r+b") as opened:
        opened.seek(info.offset + info.size // 2)
        opened.write(b"another model")
    assert fingerprint(copy) != fingerprint(file)


def test_split_models(tmp_path: Path) -> None:
    tensors = {f"blk.{layer}.ffn_up.weight": ("Q8_0", random_rows("Q8_0", seed=layer)) for layer in range(5)}
    save(tmp_path / "m.gguf", tensors, parts=2)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    assert gguf_parts(first) == [first, second, third]
    with GgufCheckpoint(first) as checkpoint:
        assert len(checkpoint.names()) == 5
        for layer in range(5):
            expected = gguf.quants.dequantize(tensors[f"blk.{layer}.ffn_up.weight"][1], Type.Q8_0)
            piece = Piece(UP.replace("0", str(layer)), range(ROWS), range(COLUMNS))
            assert bits(checkpoint.read(piece)) == bits(expected)
    with pytest.raises(CheckpointError, match=r"a later part of a split model; give the first, m-00001-of-00003\.gguf"):
        GgufCheckpoint(second)
    renamed = shutil.copy(first, tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 3 parts of a split model by its metadata, one of 1 by its name"):
        GgufCheckpoint(renamed)
    third.unlink()
    with pytest.raises(CheckpointError, match=r"missing parts of a split model: m-00003-of-00003\.gguf"):
        GgufCheckpoint(first)


def test_heads_that_are_no_numbers(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count([3, 3])
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((6, 4), np.float32))
    write(writer)
    with GgufCheckpoint(tmp_path / "m.gguf") as checkpoint, pytest.raises(CheckpointError, match="should count heads"):
        checkpoint.read(Piece(QUERY, range(6), range(4)))
