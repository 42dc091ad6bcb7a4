"""Block quantisation: its error, its packing, and that cutting and quantising commute."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from motley.daemon.weights.quantise import pack, quantise, unpack
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import Codes, Format, dequantised
from motley.plugins.native.library import LEVELS, library, supported_levels

QUANTISED = [Encoding.INT8, Encoding.INT4]
FINITE = st.floats(-(2.0**120), 2.0**120, width=32)


def scalar_rule(block: npt.NDArray[np.float32], zero: int) -> list[int]:
    """The rule, one value at a time, in double precision."""
    peak = max(block.tolist(), key=abs)
    return [min(2 * zero - 1, int(value / peak * -zero + zero + 0.5)) for value in block.tolist()]


@pytest.mark.parametrize("block", [16, 32, 128])
def test_codes_of_int8_follow_the_rule(block: int) -> None:
    values = np.random.default_rng(0).standard_normal((24, 256), dtype=np.float32)
    codes, scales = quantise(values, block, Encoding.INT8)
    expected = [scalar_rule(part, 128) for part in values.reshape(-1, block)]
    differ = codes.reshape(-1, block) != expected
    assert differ.mean() < 1e-3, "only values on the edge between two codes may round differently in float32"
    peaks = values.reshape(-1, block)[np.arange(scales.size), np.abs(values.reshape(-1, block)).argmax(axis=1)]
    np.testing.assert_allclose(scales.reshape(-1), peaks / -128, rtol=1e-6)


@pytest.mark.parametrize("block", [2, 16, 32, 48, 128])
def test_int4_is_the_best_of_its_trials(block: int) -> None:
    """Against all of them in double precision, each with the scale that fits its codes best."""
    values = np.random.default_rng(0).standard_t(5, (24, 8 * block)).astype(np.float32)
    restored = dequantised(Codes(*quantise(values, block, Encoding.INT4)), Format(Encoding.INT4, block))
    blocks, got = values.reshape(-1, block).astype(np.float64), restored.reshape(-1, block)
    peaks = blocks[np.arange(len(blocks)), np.abs(blocks).argmax(axis=1)][:, None]
    errors = []
    for levels in (8, 7.6, 7.2, 6.8, 6.4, 8.4, 8.8):
        q = np.clip(np.floor(blocks * (-levels / peaks) + 8.5), 0, 15) - 8
        scales = (blocks * q).sum(axis=1) / (q * q).sum(axis=1)
        errors.append(((blocks - q * scales[:, None]) ** 2).sum(axis=1))
    least, own = np.min(errors, axis=0), ((blocks - got) ** 2).sum(axis=1)
    scale = (blocks**2).sum(axis=1)
    assert (own <= least + 1e-5 * scale).all()


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_the_same_bits(level: str) -> None:
    values = np.random.default_rng(0).standard_normal((24, 256), dtype=np.float32)
    lib = library()
    best = supported_levels(lib)[-1]
    if level not in supported_levels(lib):
        pytest.skip(f"this processor is no {level}")
    expected = [quantise(values, 32, encoding) for encoding in QUANTISED]
    try:
        lib.motley_set_level(LEVELS.index(level))
        got = [quantise(values, 32, encoding) for encoding in QUANTISED]
    finally:
        lib.motley_set_level(LEVELS.index(best))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@given(values=arrays(np.float32, (3, 64), elements=FINITE))
def test_error_of_int8_is_bounded(values: npt.NDArray[np.float32]) -> None:
    """Half a step; a whole one where a value as large as the peak has the other sign."""
    codes, scales = quantise(values, 32, Encoding.INT8)
    assert np.isfinite(scales).all()
    assert (scales != 0).all()
    restored = dequantised(Codes(codes, scales), Format(Encoding.INT8, 32))
    steps = np.abs(scales).repeat(32, axis=1).astype(np.float64)
    error = np.abs(restored.astype(np.float64) - values)
    assert (error <= 1.001 * steps).all()
    same_sign = np.sign(values) == -np.sign(scales).repeat(32, axis=1)
    assert (error[same_sign] <= 0.501 * steps[same_sign]).all()


@given(values=arrays(np.float32, (3, 64), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
def test_error_of_int4_is_bounded(values: npt.NDArray[np.float32]) -> None:
    """By that of nothing but zeros, in every block."""
    codes, scales = quantise(values, 32, Encoding.INT4)
    assert np.isfinite(scales).all()
    restored = dequantised(Codes(codes, scales), Format(Encoding.INT4, 32)).astype(np.float64)
    blocks = values.reshape(-1, 32).astype(np.float64)
    left = np.linalg.norm(restored.reshape(-1, 32) - blocks, axis=1)
    assert (left <= 1.001 * np.linalg.norm(blocks, axis=1) + 1e-30).all()


@pytest.mark.parametrize(
    ("encoding", "block", "percent"),
    [(Encoding.INT4, 32, 8.15), (Encoding.INT4, 128, 9.8), (Encoding.INT8, 32, 0.55), (Encoding.INT8, 128, 0.66)],
)
def test_rms_error_on_gaussian_weights(encoding: Encoding, block: int, percent: float) -> None:
    values = np.random.default_rng(0).standard_normal((256, 1024), dtype=np.float32)
    restored = dequantised(Codes(*quantise(values, block, encoding)), Format(encoding, block))
    assert 100 * np.sqrt(np.mean((restored - values) ** 2) / np.mean(values**2)) < percent


@given(data=st.data(), encoding=st.sampled_from(QUANTISED), block=st.sampled_from([2, 16, 32]))
def test_quantising_a_share_is_cutting_the_quantised_whole(data: st.DataObject, encoding: Encoding, block: int) -> None:
    rows, blocks = data.draw(st.integers(0, 7)), data.draw(st.integers(1, 5))
    seed = data.draw(st.integers(0, 1 << 32))
    whole = np.random.default_rng(seed).standard_normal((rows, blocks * block), dtype=np.float32)
    top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, blocks))
    bottom, right = data.draw(st.integers(top, rows)), data.draw(st.integers(left, blocks))
    codes, scales = quantise(whole, block, encoding)
    share = np.ascontiguousarray(whole[top:bottom, left * block : right * block])
    share_codes, share_scales = quantise(share, block, encoding)
    per_block = block // 2 if encoding is Encoding.INT4 else block
    np.testing.assert_array_equal(share_codes, codes[top:bottom, left * per_block : right * per_block])
    np.testing.assert_array_equal(share_scales, scales[top:bottom, left:right])


@given(
    arrays(
        np.uint8,
        st.tuples(st.integers(0, 4), st.integers(1, 9).map(lambda half: 2 * half)),
        elements=st.integers(0, 15),
    )
)
def test_packing_is_undone_by_unpacking(codes: npt.NDArray[np.uint8]) -> None:
    np.testing.assert_array_equal(unpack(pack(codes)), codes)


def test_the_first_of_a_pair_is_in_the_low_nibble() -> None:
    assert pack(np.array([[1, 2, 15, 0]], np.uint8)).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize("encoding", QUANTISED)
def test_zeros_and_subnormals_stay_finite(encoding: Encoding) -> None:
    values = np.zeros((2, 32), np.float32)
    values[1, 3] = 1e-42
    restored = dequantised(Codes(*quantise(values, 32, encoding)), Format(encoding, 32))
    np.testing.assert_array_equal(restored, 0)
