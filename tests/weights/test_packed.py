"""GPTQ and AWQ matrices: exactly what their formats define, whatever piece is read; and damage, named."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.weights.checkpoints import tensor_files as reading
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.packed import PackedCheckpoint, Packing
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Encoding, Piece, Weight, lay_out
from motley.daemon.weights.stored import Format, converted, dequantised, whole_blocks
from tests.weights.packing import (
    Array,
    Tensors,
    awq,
    dequantised_awq,
    dequantised_gptq,
    gptq,
    random_matrix,
    save,
)

X = "layer.x.weight"


def named(parts: Tensors) -> Tensors:
    return {f"layer.x.{part}": values for part, values in parts.items()}


def exactly(source: PackedCheckpoint, rows: range, columns: range) -> Array:
    """A piece by its codes rather than by `read`."""
    stored = source.format(X)
    whole = whole_blocks(columns, stored.block)
    codes = source.codes(Piece(X, rows, whole))
    assert (codes.zeros is not None) is stored.zeros
    values = dequantised(codes, stored)
    return values[:, columns.start - whole.start : columns.stop - whole.start]


@given(data=st.data())
def test_any_piece_is_what_the_format_defines(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    method, bits, version = data.draw(st.sampled_from([("gptq", 4, 1), ("gptq", 4, 2), ("gptq", 8, 1), ("awq", 4, 0)]))
    group = data.draw(st.sampled_from([16, 32, 64]))
    rows, columns = 8 * data.draw(st.integers(1, 3)), group * data.draw(st.integers(1, 2))
    zeros = data.draw(st.sampled_from([None, 1 << bits - 1]))
    matrix = random_matrix(rows, columns, group, bits, seed=0, zeros=zeros)
    parts = awq(*matrix) if method == "awq" else gptq(*matrix, bits, version)
    expected = dequantised_awq(parts, group) if method == "awq" else dequantised_gptq(parts, bits, version)
    packing = Packing(
        "awq" if method == "awq" else "gptq",
        bits,
        data.draw(st.sampled_from([group, 0])) if columns == group else group,
        zero_offset=int(version == 1),
    )
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    high = range(top, data.draw(st.integers(top, rows)))
    wide = range(left, data.draw(st.integers(left, columns)))
    folder = save(tmp_path_factory.mktemp("packed"), named(parts))
    with PackedCheckpoint(folder, packing) as source, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_GAP", data.draw(st.sampled_from([0, 64, 1 << 14])))
        patch.setattr(reading, "_SCRATCH", data.draw(st.sampled_from([1, 200, 1 << 20])))
        source.expect({X: (rows, columns)})
        assert source.format(X) == Format(Encoding.INT4 if bits == 4 else Encoding.INT8, group, zeros=zeros is None)
        piece = expected[high.start : high.stop, wide.start : wide.stop]
        np.testing.assert_array_equal(source.read(Piece(X, high, wide)), piece.astype(np.float32))
        if len(wide):
            np.testing.assert_array_equal(exactly(source, high, wide), piece.astype(np.float32))


def test_a_zero_point_of_sixteen_is_kept_exactly(tmp_path: Path) -> None:
    """It is no uint4: the matrix becomes int8, of the same values."""
    codes, zeros, scales = random_matrix(16, 64, 32, 4, seed=1)
    zeros[3, 1] = 16
    parts = gptq(codes, zeros, scales, 4)
    with PackedCheckpoint(save(tmp_path, named(parts)), Packing("gptq", 4, 32, zero_offset=1)) as source:
        assert source.format(X) == Format(Encoding.INT8, 32)
        expected = dequantised_gptq(parts, 4)
        np.testing.assert_array_equal(exactly(source, range(16), range(64)), expected)
        np.testing.assert_array_equal(source.read(Piece(X, range(16), range(64))), expected)


def test_a_zero_point_of_256_is_refused(tmp_path: Path) -> None:
    codes, zeros, scales = random_matrix(8, 32, 32, 8, seed=1)
    zeros[3, 0] = 256
    folder = save(tmp_path, named(gptq(codes, zeros, scales, 8)))
    with (
        PackedCheckpoint(folder, Packing("gptq", 8, 32, zero_offset=1)) as source,
        pytest.raises(CheckpointError, match=r"layer\.x\.qzeros' has a zero point of 256"),
    ):
        source.format(X)


def test_plain_tensors_beside_packed_ones(tmp_path: Path) -> None:
    head = np.arange(32, dtype=np.float16).reshape(4, 8)
    folder = save(tmp_path, {**named(awq(*random_matrix(8, 32, 32, 4, seed=0))), "head.weight": head})
    with PackedCheckpoint(folder, Packing("awq", 4, 32)) as source:
        source.expect({X: (8, 32), "head.weight": (4, 8)})
        assert source.format("head.weight") == Format(Encoding.FP32)
        assert (source.format("head.weight").called, source.format(X).called) == ("F16", "AWQ int4")
        np.testing.assert_array_equal(source.read(Piece("head.weight", range(1, 3), range(8))), head[1:3])
        np.testing.assert_array_equal(source.rows("head.weight", [3, 0]), head[[3, 0]])
        whole = source.read(Piece(X, range(8), range(32)))
        np.testing.assert_array_equal(source.rows(X, [7, 0, 7]), whole[[7, 0, 7]])
        for name in ("head.weight", X):
            with pytest.raises(IndexError, match="8 is not a row"):
                source.rows(name, [8])


def without(parts: Tensors, part: str) -> Tensors:
    return {name: values for name, values in parts.items() if name != part}


GPTQ = gptq(*random_matrix(16, 64, 32, 4, seed=0), 4)
SHUFFLED = np.ascontiguousarray(GPTQ["g_idx"][::-1])


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        (without(GPTQ, "scales"), r"'layer\.x\.scales' is absent"),
        (without(GPTQ, "qzeros"), r"'layer\.x\.qzeros' is absent"),
        (without(GPTQ, "qweight"), r"'layer\.x\.weight' is absent"),
        (without(GPTQ, "g_idx"), r"'layer\.x\.g_idx' is absent"),
        (GPTQ | {"g_idx": SHUFFLED + 1}, r"'layer\.x\.g_idx' puts columns in groups 1 to 2; there are 2"),
        (GPTQ | {"g_idx": SHUFFLED[1:]}, r"'layer\.x\.g_idx' has shape \[63\]; config\.json makes it \[64\]"),
        (GPTQ | {"qweight": GPTQ["qweight"].reshape(-1)}, r"'layer\.x\.qweight' has shape \[128\]; config.* \[8, 16\]"),
        (GPTQ | {"qweight": GPTQ["qweight"][1:]}, r"'layer\.x\.qweight' has shape \[7, 16\]; config.* \[8, 16\]"),
        (GPTQ | {"scales": GPTQ["scales"].astype(np.int32)}, "has dtype I32; expected one of F32, F16, BF16"),
        (GPTQ | {"qzeros": GPTQ["qzeros"].astype(np.int64)}, "has dtype I64; expected one of I32"),
        (awq(*random_matrix(16, 64, 32, 4, seed=0)) | {"g_idx": GPTQ["g_idx"]}, r"'layer\.x\.qweight' has shape"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, parts: Tensors, complaint: str) -> None:
    folder = save(tmp_path, named(parts))
    packing = Packing("gptq", 4, 32, zero_offset=1, reordered=True)
    with PackedCheckpoint(folder, packing) as source, pytest.raises(CheckpointError, match=complaint):
        source.expect({X: (16, 64)})


def test_a_group_that_does_not_divide_a_row(tmp_path: Path) -> None:
    folder = save(tmp_path, named(GPTQ))
    with (
        PackedCheckpoint(folder, Packing("gptq", 4, 48)) as source,
        pytest.raises(CheckpointError, match="cannot be packed in groups of 48 columns"),
    ):
        source.expect({X: (16, 64)})


def test_pieces_beyond_a_packed_matrix(tmp_path: Path) -> None:
    with PackedCheckpoint(save(tmp_path, named(GPTQ)), Packing("gptq", 4, 32, zero_offset=1)) as source:
        for piece in (Piece(X, range(17), range(64)), Piece(X, range(16), range(1, 65)), Piece(X, range(16))):
            with pytest.raises(CheckpointError, match=r"tensor 'layer\.x\.weight' has shape \[16, 64\]"):
                source.check(piece)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    file = save(tmp_path, named(GPTQ)) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        PackedCheckpoint(tmp_path, Packing("gptq", 4, 32, zero_offset=1))
    file.write_bytes(whole)
    with PackedCheckpoint(tmp_path, Packing("gptq", 4, 32, zero_offset=1)) as source:
        source.expect({X: (16, 64)})
        file.write_bytes(whole[: -len(whole) // 2])
        with pytest.raises(CheckpointError, match="has become shorter"):
            source.read(Piece(X, range(16), range(64)))


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_memory_does_not_grow_with_the_weight(tmp_path: Path, method: Literal["gptq", "awq"]) -> None:
    rows, columns, group = 16384, 1024, 128  # 67 MB in float32
    words = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
    parts: Tensors = {
        "qweight": np.full(words, 0x12345678, np.int32),
        "qzeros": np.full((columns // group, rows // 8), 0x12345678, np.int32),
        "scales": np.ones((columns // group, rows), np.float16),
    }
    with PackedCheckpoint(save(tmp_path, named(parts)), Packing(method, 4, group)) as source:
        whole = (Piece(X, range(rows), range(columns)),)
        for weight in (Weight("x", whole, Encoding.INT4, group, zeros=True), Weight("x", whole, Encoding.INT8, 32)):
            placed, total = lay_out([weight])
            tracemalloc.start()
            write_share(source, placed, total, tmp_path / "share")
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 48 << 20


@given(data=st.data())
def test_what_one_format_expresses_has_equal_values(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def a_format() -> Format:
        encoding = data.draw(st.sampled_from([Encoding.INT8, Encoding.INT4]))
        return Format(encoding, data.draw(st.sampled_from([16, 32, 48, 96])), data.draw(st.booleans()))

    of, to = a_format(), a_format()
    expressible = of.block % to.block == 0 and (
        (to.encoding is of.encoding and to.zeros >= of.zeros) or (to.encoding, of.encoding) == ("int8", "int4")
    )
    assert to.expresses(of) is expressible
    assert not Format(Encoding.FP32).expresses(of)
    assert not to.expresses(Format(Encoding.FP32))
    if not expressible:
        return
    bits = 4 if of.encoding is Encoding.INT4 else 8
    matrix = random_matrix(16, 2 * of.block, of.block, bits, seed=2, zeros=None if of.zeros else 1 << bits - 1)
    parts = gptq(*matrix, bits, version=2)
    columns = range(*sorted(data.draw(st.integers(0, 2 * of.block // to.block)) * to.block for _ in "ab"))
    folder = save(tmp_path_factory.mktemp("packed"), named(parts))
    with PackedCheckpoint(folder, Packing("gptq", bits, of.block)) as source:
        codes = source.codes(Piece(X, range(16), range(2 * of.block)))
        assert source.format(X) == of
    changed = converted(codes, of, columns, to)
    assert (changed.zeros is None) is not to.zeros
    if len(columns):
        expected = dequantised_gptq(parts, bits, version=2)[:, columns.start : columns.stop]
        np.testing.assert_array_equal(dequantised(changed, to), expected)
