"""MXFP4: what its definition says, value by value; and held without loss as int8."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.daemon.models.files import open_weights
from motley.daemon.weights.checkpoints import mxfp4
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.mxfp4_checkpoint import Mxfp4Checkpoint
from motley.daemon.weights.located import Located
from motley.daemon.weights.places import Part, Tensor
from motley.daemon.weights.quantise import quantise
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Encoding, Piece, Weight, lay_out
from motley.daemon.weights.stored import Codes, Format, dequantised
from tests.weights.packing import Array, save
from tests.weights.test_located import bits, some

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
EXPERTS, ROWS, COLUMNS = 3, 10, 96


def random_blocks(seed: int = 0, low: int = 100, high: int = 150, rows: int = ROWS) -> tuple[Array, Array]:
    """``X_blocks`` and ``X_scales`` of any nibbles at all, with exponents from `low` to `high`."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (EXPERTS, rows, COLUMNS // 32, 16), np.uint8)
    return blocks, random.integers(low, high + 1, blocks.shape[:-1]).astype(np.uint8)


def defined(blocks: Array, scales: Array) -> npt.NDArray[np.float64]:
    """f64[E, N, K] by the definition: the low nibble of a byte first."""
    values = np.empty((*blocks.shape[:-1], 32))
    for at in np.ndindex(blocks.shape):
        byte, two = int(blocks[at]), 2.0 ** (int(scales[at[:-1]]) - 127)
        values[(*at[:-1], 2 * at[-1])] = FP4[byte & 15] * two
        values[(*at[:-1], 2 * at[-1] + 1)] = FP4[byte >> 4] * two
    return values.reshape(*blocks.shape[:2], -1)


def opened(folder: Path, blocks: Array, scales: Array) -> Mxfp4Checkpoint:
    return Mxfp4Checkpoint(save(folder, {"X_blocks": blocks, "X_scales": scales}))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_piece_of_any_expert_is_what_the_format_defines(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mxfp4")
    blocks, scales = random_blocks(low=0, high=252)
    number, start = data.draw(st.integers(0, EXPERTS - 1)), data.draw(st.integers(0, 1))
    expected = defined(blocks, scales)[number, start::2].astype(np.float32)
    tensor = Tensor("gate", (ROWS // 2, COLUMNS), (Part(f"X_mxfp4[{number}]", (ROWS, COLUMNS), start, 2),))
    rows, columns, whole = some(data, ROWS // 2), some(data, COLUMNS), some(data, COLUMNS, 32)
    with opened(folder, blocks, scales) as files, Located(files, [tensor]) as source:
        assert "X_mxfp4" in files
        source.expect({"gate": tensor.shape, "X_mxfp4": (EXPERTS, ROWS, COLUMNS)})
        assert source.format("gate") == Format(Encoding.INT8, 32)
        assert source.format("gate").called == "MXFP4"
        values = source.read(Piece("gate", rows, columns))
        assert np.array_equal(values, expected[rows.start : rows.stop, columns.start : columns.stop])
        assert np.array_equal(source.rows("gate", [4, 0]), expected[[4, 0]])
        codes = source.codes(Piece("gate", rows, whole))
        if rows and whole:
            values = dequantised(codes, source.format("gate"))
            assert np.array_equal(values, expected[rows.start : rows.stop, whole.start : whole.stop])
    shutil.rmtree(folder)


def test_every_nibble_with_every_exponent() -> None:
    """All but 255, and those that float32 ends before; the smallest are subnormal and exact."""
    nibbles = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    codes, scales = mxfp4.decoded(nibbles, np.arange(256, dtype=np.uint8)[:, None])
    assert np.isnan(scales[255])
    assert np.isinf(scales[253:255]).all()
    values = dequantised(Codes(codes[:253], scales[:253]), mxfp4.FORMAT)
    assert np.array_equal(values.astype(np.float64), np.tile(FP4, 2) * 2.0 ** (np.arange(253)[:, None] - 127))
    assert values[0, 1] == 2.0**-128

    small = np.full((1, 32), 3, np.uint8)  # 1.5
    codes, scales = mxfp4.decoded(small, np.array([[254]], np.uint8))
    assert (dequantised(Codes(codes, scales), mxfp4.FORMAT) == np.float32(1.5 * 2.0**127)).all()
    codes, scales = mxfp4.decoded(np.zeros((1, 32), np.uint8), np.array([[254]], np.uint8))
    assert not dequantised(Codes(codes, scales), mxfp4.FORMAT).any()


@pytest.mark.parametrize("exponent", [254, 255])
@pytest.mark.parametrize("encoding", [Encoding.INT8, Encoding.FP32])
def test_blocks_that_are_no_numbers_are_refused(exponent: int, encoding: Encoding, tmp_path: Path) -> None:
    blocks, scales = random_blocks()
    scales[1, 3, 2] = exponent
    weight = Weight("w", (Piece("X_mxfp4[1]", range(ROWS), range(COLUMNS)),), encoding, 32 * (encoding == "int8"))
    with opened(tmp_path, blocks, scales) as source:
        placed, total = lay_out([weight])
        with pytest.raises(CheckpointError, match=r"tensor 'X_mxfp4\[1\]' holds a NaN or an infinity"):
            write_share(source, placed, total, tmp_path / "share")


def test_blocks_and_exponents_that_do_not_belong_together(tmp_path: Path) -> None:
    blocks, scales = random_blocks()
    with (
        opened(tmp_path, blocks[:, :9], scales) as source,
        pytest.raises(CheckpointError, match=r"blocks' has shape \[3, 9, 3, 16\]; its exponents \[3, 10, 3\] make it"),
    ):
        source.expect({"X_mxfp4": (EXPERTS, ROWS, COLUMNS)})
    save(tmp_path, {"X_blocks": blocks, "Y_scales": scales})
    with Mxfp4Checkpoint(tmp_path) as source, pytest.raises(CheckpointError, match=r"'X_scales\[0\]' is absent"):
        source.check(Piece("X_mxfp4[0]", range(1), range(32)))


def test_a_folder_is_opened_by_what_its_config_says(tmp_path: Path) -> None:
    blocks, scales = random_blocks()
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]}}
    files = {"X_blocks": blocks, "X_scales": scales}
    with open_weights(save(tmp_path, files, config)) as source:
        assert source.shape("X_mxfp4[2]") == (ROWS, COLUMNS)
    with pytest.raises(CheckpointError, match=r"'X_blocks' is packed, but config\.json has no quantization_config"):
        open_weights(save(tmp_path, files))
    with pytest.raises(CheckpointError, match=r"says MXFP4, but no tensor is packed \(X_blocks\)"):
        open_weights(save(tmp_path, {"X": np.zeros((1, 1), np.float32)}, config))


def test_a_share_keeps_the_codes(tmp_path: Path) -> None:
    blocks, scales = random_blocks()
    weight = Weight("w", (Piece("X_mxfp4[1]", range(ROWS), range(32, COLUMNS)),), Encoding.INT8, 16)
    with opened(tmp_path, blocks, scales) as source:
        placed, total = lay_out([weight])
        write_share(source, placed, total, tmp_path / "share")
    content = (tmp_path / "share").read_bytes()
    codes = np.frombuffer(content, np.uint8, ROWS * 64).reshape(ROWS, 64)
    held = np.frombuffer(content, np.float32, ROWS * 4, placed[0].scale_offset).reshape(ROWS, 4)
    values = dequantised(Codes(codes, held), Format(Encoding.INT8, 16))
    assert np.array_equal(values, defined(blocks, scales)[1][:, 32:].astype(np.float32))


def test_the_order_in_a_gguf_file() -> None:
    """Elements 0 to 15 in the low nibbles there; the ``gguf`` package agrees on every value."""
    from motley.daemon.weights.checkpoints.gguf.blocks import dequantise

    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (6, 3 * 17), np.uint8)
    raw[:, ::17] = random.integers(0, 253, (6, 3))
    assert bits(dequantise(raw, "MXFP4")) == bits(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4))


def test_the_error_of_requantising_to_int4_is_as_stated() -> None:
    nibbles = np.random.default_rng(0).integers(0, 16, (1 << 10, 1 << 10), np.uint8)
    exponents = np.full((1 << 10, 1 << 5), 120, np.uint8)
    values = dequantised(Codes(*mxfp4.decoded(nibbles, exponents)), mxfp4.FORMAT)
    rounded = dequantised(Codes(*quantise(values, 32, Encoding.INT4)), Format(Encoding.INT4, 32))
    error = np.sqrt(np.mean((rounded - values) ** 2) / np.mean(values**2))
    assert error == pytest.approx(0.0704, abs=0.001)


def test_the_parts_of_a_matrix_are_compared_once(tmp_path: Path) -> None:
    """Its shape is asked for with every piece that is read."""
    found: list[str] = []

    class Told(Mxfp4Checkpoint):
        def _coded_shape(self, name: str) -> tuple[int, ...]:
            found.append(name)
            return super()._coded_shape(name)

    blocks, scales = random_blocks()
    with Told(save(tmp_path, {"X_blocks": blocks, "X_scales": scales})) as files:
        assert [files.shape("X_mxfp4[1]") for _ in range(2)] == [(ROWS, COLUMNS)] * 2
    assert found == ["X_mxfp4[1]"]
