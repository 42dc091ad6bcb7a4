"""Tensors that lie within larger ones: every piece is that part of the larger tensor, and what is nowhere is named."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.daemon.weights.checkpoints import tensor_files
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.checkpoint import GgufCheckpoint
from motley.daemon.weights.checkpoints.packed import PackedCheckpoint, Packing
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import TensorFiles
from motley.daemon.weights.located import Located
from motley.daemon.weights.places import Part, Tensor
from motley.daemon.weights.quantise import quantise
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Encoding, Piece, Weight, lay_out
from motley.daemon.weights.stored import dequantised
from tests.models.to_gguf import write
from tests.weights.packing import Array, awq, dequantised_awq, dequantised_gptq, gptq, random_matrix, save
from tests.weights.test_gguf_checkpoint import random_rows
from tests.weights.test_safetensors_checkpoint import DTYPES
from tests.weights.test_safetensors_checkpoint import save as save_any


def some(data: st.DataObject, size: int, multiple: int = 1) -> range:
    cuts = st.integers(0, size // multiple)
    return range(*sorted(multiple * data.draw(cuts) for _ in "ab"))


def a_part(data: st.DataObject, tensor: str, lines: int, width: int, transposed: bool = False) -> Part:
    """Rows (columns, if it is transposed) of a larger matrix that has `lines` of them."""
    step = data.draw(st.integers(1, 3))
    start = data.draw(st.integers(0, min(lines - 1, 4)))
    return Part(tensor, (width, lines) if transposed else (lines, width), start, step, transposed)


def of_part(whole: Array, part: Part, rows: int) -> Array:
    """The matrix that a part is, by NumPy."""
    lines = whole.T if part.transposed else whole
    return lines[part.start :: part.step][:rows]


def bits(values: npt.NDArray[np.float32]) -> Any:
    return np.ascontiguousarray(values).view(np.uint32).tolist()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)))
def test_any_piece_of_any_part_of_a_tensor_of_three_dimensions(
    data: st.DataObject, dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("part")
    whole = np.random.default_rng(1).standard_normal((3, 13, 18)).astype(DTYPES[dtype])
    biases = whole[:, 0]
    save_any(folder / "model.safetensors", {"before": whole[0], "X": whole, "X_bias": biases})
    number, transposed = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    lines, width = (18, 13) if transposed else (13, 18)
    part = a_part(data, f"X[{number}]", lines, width, transposed)
    count = data.draw(st.integers(0, len(range(part.start, lines, part.step))))
    bias = Part(f"X_bias[{number}]", (18,), data.draw(st.integers(0, 1)), 2)
    tensors = [Tensor("m", (count, width), (Part("absent", (1, 1)), part)), Tensor("b", (9,), (bias,))]
    rows, columns, elements = some(data, count), some(data, width), some(data, 9)
    with pytest.MonkeyPatch.context() as patch, Located(SafetensorsCheckpoint(folder), tensors) as source:
        patch.setattr(tensor_files, "_SCRATCH", data.draw(st.sampled_from([1, 24, 1 << 20])))
        patch.setattr(tensor_files, "_GAP", data.draw(st.sampled_from([0, 40, 1 << 14])))
        source.expect({tensor.name: tensor.shape for tensor in tensors})
        assert source.transposed("m") is transposed
        assert source.format("m").called == dtype
        values = source.read(Piece("m", rows, columns))
        vector = source.read(Piece("b", elements))
        looked_up = source.rows("m", list(rows)[::-1])
    expected = of_part(whole[number], part, count).astype(np.float32)
    assert values.flags.c_contiguous
    assert bits(values) == bits(expected[rows.start : rows.stop, columns.start : columns.stop])
    assert bits(looked_up) == bits(expected[rows.start : rows.stop][::-1])
    assert bits(vector) == bits(biases[number, bias.start :: 2].astype(np.float32)[elements.start : elements.stop])
    shutil.rmtree(folder)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), transposed=st.booleans(), packed=st.booleans())
def test_any_piece_of_rows_of_every_head(
    data: st.DataObject, transposed: bool, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As floats, and in codes, which cannot lie transposed."""
    heads, each, columns = data.draw(st.integers(1, 4)), 24, 64
    if packed and not transposed:
        parts = gptq(*random_matrix(heads * each, columns, 32, 4, seed=1), 4)
        whole = dequantised_gptq(parts, 4)
        folder = save(tmp_path_factory.mktemp("heads"), {f"X.{part}": values for part, values in parts.items()})
        files: TensorFiles = PackedCheckpoint(folder, Packing("gptq", 4, 32, zero_offset=1))
    else:
        whole = np.random.default_rng(2).standard_normal((heads * each, columns)).astype(np.float32)
        folder = tmp_path_factory.mktemp("heads")
        save_any(folder / "model.safetensors", {"X.weight": whole})
        files = SafetensorsCheckpoint(folder)
    if transposed:
        inner = data.draw(st.integers(1, 10))
        first = data.draw(st.integers(0, each - inner))
        of_head = (range(first, first + inner),)
        matrix = np.concatenate([part[first : first + inner].T for part in np.split(whole, heads)])
    else:
        of_head = (range(4, 9), range(10, 20, 2), range(11, 20, 2))
        order = [row for stretch in of_head for row in stretch]
        matrix = np.concatenate([part[order] for part in np.split(whole, heads)])
    part = Part("X.weight", whole.shape, transposed=transposed, heads=each, of_head=of_head)
    start = data.draw(st.integers(0, len(matrix) - 1))
    rows, columns_read = range(start, data.draw(st.integers(start + 1, len(matrix)))), some(data, matrix.shape[1])
    piece = Piece("m", rows, columns_read)
    with Located(files, [Tensor("m", matrix.shape, (part,))]) as source:
        source.expect({"m": matrix.shape})
        values = source.read(piece)
        if packed and not transposed:
            check_codes(source, "m", rows, some(data, columns, 32), matrix)
        assert bits(source.rows("m", [start])[0]) == bits(matrix[start].astype(np.float32))
    assert values.flags.c_contiguous
    assert bits(values) == bits(
        matrix[rows.start : rows.stop, columns_read.start : columns_read.stop].astype(np.float32)
    )
    shutil.rmtree(folder)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_fused_packed_matrices_keep_their_codes(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    method = data.draw(st.sampled_from(["gptq", "awq"]))
    group, lines, columns = 32, 40, 96
    matrix = random_matrix(lines, columns, group, 4, seed=0)
    parts = awq(*matrix) if method == "awq" else gptq(*matrix, 4)
    whole = dequantised_awq(parts, group) if method == "awq" else dequantised_gptq(parts, 4)
    fused = {f"a.qkv_proj.{part}": values for part, values in parts.items()}
    packing = Packing("awq", 4, group) if method == "awq" else Packing("gptq", 4, group, zero_offset=1)
    part = a_part(data, "a.qkv_proj.weight", lines, columns)
    count = len(range(part.start, lines, part.step))
    folder = save(tmp_path_factory.mktemp("packed"), fused)
    tensor = Tensor("a.q_proj.weight", (count, columns), (part,))
    rows = some(data, count)
    with Located(PackedCheckpoint(folder, packing), [tensor]) as source:
        source.expect({tensor.name: tensor.shape})
        check_codes(source, tensor.name, rows, some(data, columns, group), of_part(whole, part, count))
        free = some(data, columns)
        expected = of_part(whole, part, count)[rows.start : rows.stop, free.start : free.stop].astype(np.float32)
        assert bits(source.read(Piece(tensor.name, rows, free))) == bits(expected)
        assert source.format(tensor.name).called == packing.called
        assert source.transposed(tensor.name)
    shutil.rmtree(folder)


def check_codes(source: Located, name: str, rows: range, columns: range, expected: Array) -> None:
    if not rows or not columns:
        return
    codes = source.codes(Piece(name, rows, columns))
    values = dequantised(codes, source.format(name))
    assert codes.codes.flags.c_contiguous
    assert bits(values) == bits(expected[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), type_=st.sampled_from(["F16", "Q4_0", "Q8_0", "Q6_K", "Q4_K", "MXFP4"]))
def test_fused_blocks_of_ggml_keep_their_codes(
    data: st.DataObject, type_: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines, columns = 24, 512
    raw = random_rows(type_, lines, columns)
    whole = gguf.quants.dequantize(raw, Type[type_])
    file = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(file, "phi3")
    writer.add_tensor("blk.0.attn_qkv.weight", raw, raw_dtype=Type[type_])
    write(writer)
    part = a_part(data, "model.layers.0.self_attn.qkv_proj.weight", lines, columns)
    count = len(range(part.start, lines, part.step))
    tensor = Tensor("q", (count, columns), (part,))
    rows, free = some(data, count), some(data, columns)
    with Located(GgufCheckpoint(file), [tensor]) as source:
        source.expect({"q": tensor.shape})
        expected = of_part(whole, part, count)
        assert bits(source.read(Piece("q", rows, free))) == bits(
            expected[rows.start : rows.stop, free.start : free.stop]
        )
        assert bits(source.rows("q", [count - 1, 0])) == bits(expected[[count - 1, 0]])
        if block := source.format("q").block:
            check_codes(source, "q", rows, some(data, columns, block), expected)
    shutil.rmtree(file.parent)


# ---------------------------------------------------------------- where a tensor is looked for


def opened(folder: Path, files: dict[str, Array], *tensors: Tensor) -> Located:
    save(folder, files)
    return Located(SafetensorsCheckpoint(folder), tensors)


def matrix(rows: int = 4, columns: int = 6, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_a_name_comes_first_then_the_first_part_that_is_there_and_fits(tmp_path: Path) -> None:
    files = {"own": matrix(seed=1), "first": matrix(8, seed=2), "second": matrix(12, seed=3)}
    first, second = Part("first", (8, 6), 4), Part("second", (12, 6), 8)
    tensors = [
        Tensor("own", (4, 6), (first,)),
        Tensor("x", (4, 6), (Part("none", (4, 6)), second, first)),
        Tensor("y", (4, 6), (Part("first", (9, 6)), Part("first", (8, 6), 2))),
    ]
    with opened(tmp_path, files, *tensors) as source:
        source.expect(dict.fromkeys(("own", "x", "y"), (4, 6)) | {"first": (8, 6)})
        for name, expected in (
            ("own", files["own"]),
            ("x", files["second"][8:]),
            ("y", files["first"][2:6]),
            ("first", files["first"]),  # not the model's, and there
        ):
            np.testing.assert_array_equal(source.read(Piece(name, range(len(expected)), range(6))), expected)
            assert source.shape(name) == expected.shape


def test_all_that_is_nowhere_or_does_not_fit_is_named(tmp_path: Path) -> None:
    tensors = [
        Tensor("a", (4, 6)),
        Tensor("b", (4, 6), (Part("none", (8, 6)), Part("stack[2]", (8, 6)))),
        Tensor("c", (4, 6), (Part("fused", (9, 6)),)),
    ]
    files = {"fused": matrix(8), "stack": np.zeros((2, 8, 6), np.float32)}
    with opened(tmp_path, files, *tensors) as source:
        with pytest.raises(CheckpointError) as caught:
            source.expect({tensor.name: tensor.shape for tensor in tensors})
        assert [line.partition(": ")[2] for line in str(caught.value).splitlines()] == [
            "tensor 'a' is absent",
            "tensor 'b' is absent, and so is what it could lie in: 'none', 'stack[2]'",
            "tensor 'fused' has shape [8, 6]; the config makes it [9, 6]",
        ]
        with pytest.raises(CheckpointError, match="tensor 'b' is absent"):
            source.read(Piece("b", range(1), range(1)))


def test_a_piece_beyond_a_part_is_not_its_neighbours(tmp_path: Path) -> None:
    fused = {"fused": matrix(8)}
    with opened(tmp_path, fused, Tensor("x", (4, 6), (Part("fused", (8, 6)),))) as source:
        with pytest.raises(CheckpointError, match=r"in 'fused', has shape \[4, 6\]; the config makes it"):
            source.expect({"x": (5, 6)})
        for piece in (Piece("x", range(3, 5), range(6)), Piece("x", range(4), range(7)), Piece("x", range(4))):
            with pytest.raises(CheckpointError, match=r"'x', which lies in 'fused', has shape \[4, 6\]; expected to"):
                source.read(piece)
        with pytest.raises(IndexError, match="4 is not a row of 'x', which has 4"):
            source.rows("x", [4])


def test_blocks_that_transposing_would_part_are_refused(tmp_path: Path) -> None:
    parts = gptq(*random_matrix(16, 64, 32, 4, seed=1), 4)
    folder = save(tmp_path, {f"x.fused.{part}": values for part, values in parts.items()})
    tensor = Tensor("x.weight", (64, 16), (Part("x.fused.weight", (16, 64), transposed=True),))
    packed = PackedCheckpoint(folder, Packing("gptq", 4, 32, zero_offset=1))
    with (
        Located(packed, [tensor]) as source,
        pytest.raises(CheckpointError, match=r"fused.weight' is stored as GPTQ int4, in blocks along the rows of 'x"),
    ):
        source.expect({tensor.name: tensor.shape})


# ---------------------------------------------------------------- shares


class Counting(SafetensorsCheckpoint):
    """How many bytes are read, and in how many goes."""

    def __init__(self, folder: Path) -> None:
        self.bytes = self.goes = 0
        super().__init__(folder)

    def _read_at(self, path: Path, offset: int, view: memoryview) -> None:
        self.bytes += view.nbytes
        self.goes += 1
        super()._read_at(path, offset, view)


INTERLEAVED = (Part("gate_up[1]", (1024, 16384), 0, 2, True), Part("gate_up[1]", (1024, 16384), 1, 2, True))


@pytest.fixture(scope="module")
def interleaved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Array]:
    """Two experts whose gate and up alternate by columns: bf16[2, 1024, 16384], 67 MB."""
    folder = tmp_path_factory.mktemp("interleaved")
    pattern = np.random.default_rng(0).standard_normal((2, 1024, 1024)).astype(ml_dtypes.bfloat16)
    whole = np.tile(pattern, (1, 1, 16)) * np.repeat(np.arange(1, 17), 1024).astype(ml_dtypes.bfloat16)
    save_any(folder / "model.safetensors", {"gate_up": whole})
    return folder, whole[1]


@pytest.mark.parametrize("encoding", [Encoding.FP32, Encoding.INT4])
def test_a_share_of_what_lies_transposed_is_read_in_large_runs(
    interleaved: tuple[Path, Array], encoding: Encoding, tmp_path: Path
) -> None:
    """Memory does not grow with the weight, and no chunk of rows reads the tensor more than once."""
    folder, whole = interleaved
    files = Counting(folder)
    tensors = [Tensor(name, (8192, 1024), (part,)) for name, part in zip("gu", INTERLEAVED, strict=True)]
    half = tuple(Piece(name, range(4096), range(1024)) for name in "gu")
    with Located(files, tensors) as source:
        placed, total = lay_out([Weight("gu", half, encoding, 0 if encoding is Encoding.FP32 else 32)])
        files.bytes = files.goes = 0
        tracemalloc.start()
        write_share(source, placed, total, tmp_path / "share")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    chunks = 2 * 4096 * 1024 / (1 << 21)
    assert peak < 48 << 20
    assert files.bytes <= chunks * whole.nbytes
    assert files.goes < 1000 * chunks + 100
    expected = np.concatenate([whole.T[0::2][:4096], whole.T[1::2][:4096]]).astype(np.float32)
    content = (tmp_path / "share").read_bytes()
    if encoding is Encoding.FP32:
        assert content[: placed[0].weight.data_bytes] == expected.tobytes()
    else:
        codes, scales = quantise(expected, 32, encoding)
        assert content[: codes.nbytes] == codes.tobytes()
        assert content[placed[0].scale_offset :][: scales.nbytes] == scales.tobytes()


def test_the_checkpoint_tells_whether_files_changed(tmp_path: Path) -> None:
    files: TensorFiles
    with opened(tmp_path, {"x": matrix()}) as source, SafetensorsCheckpoint(tmp_path) as files:
        assert source.fingerprint() == files.fingerprint()
        assert source.stamp() == files.stamp()
        assert source.path == files.path == tmp_path
