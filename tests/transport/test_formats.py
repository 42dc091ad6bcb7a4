from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from motley.transport.formats import BLOCK, Brain, Codec, Codecs, Exact, Half, Int8Blocks, WireFormat

Floats = np.ndarray[Any, Any]
LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 128 * BLOCK - 1, 128 * BLOCK, 128 * BLOCK + 1, 20_000)
FINITE = npst.arrays(
    np.float32, st.integers(0, 300), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


def values(elements: int) -> Floats:
    random = np.random.default_rng(elements)
    return (random.standard_normal(elements) * 10.0 ** random.integers(-4, 4, elements)).astype(np.float32)


def through(codec: Codec, numbers: Floats) -> Floats:
    payload = np.empty(codec.size(len(numbers)), np.uint8)
    codec.encode(numbers, payload)
    out = np.empty_like(numbers)
    codec.decode(payload, out)
    return out


def block_maxima(numbers: Floats) -> Floats:
    """Per element: the largest magnitude of its block."""
    padded = np.zeros(-(-len(numbers) // BLOCK) * BLOCK, np.float64)
    padded[: len(numbers)] = np.abs(numbers)
    return padded.reshape(-1, BLOCK).max(axis=1, initial=0).repeat(BLOCK)[: len(numbers)]


@pytest.mark.parametrize("length", LENGTHS)
def test_exact_is_exact_and_narrow_types_round_to_nearest_even(length: int) -> None:
    numbers = values(length)
    assert through(Exact(numbers.dtype), numbers).tobytes() == numbers.tobytes()
    assert through(Half(), numbers).tobytes() == numbers.astype(np.float16).astype(np.float32).tobytes()
    assert through(Brain(), numbers).tobytes() == numbers.astype(ml_dtypes.bfloat16).astype(np.float32).tobytes()


@pytest.mark.parametrize("length", LENGTHS)
def test_int8_is_within_half_a_step_of_its_block(length: int) -> None:
    numbers = values(length)
    errors = np.abs(through(Int8Blocks(), numbers).astype(np.float64) - numbers)
    assert (errors <= block_maxima(numbers) / 127 * 0.50001).all()


@given(FINITE)
def test_int8_is_within_half_a_step_whatever_the_magnitude(numbers: Floats) -> None:
    errors = np.abs(through(Int8Blocks(), numbers).astype(np.float64) - numbers)
    assert (errors <= np.maximum(block_maxima(numbers) / 127 * 0.50001, 127 * np.finfo(np.float32).tiny)).all()


@given(npst.arrays(np.uint32, st.integers(0, 300)))
def test_bfloat16_of_any_bits(bits: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
    numbers = bits.view(np.float32)
    with np.errstate(all="ignore"):
        wanted = np.where(np.isnan(numbers), 0, numbers).astype(ml_dtypes.bfloat16).astype(np.float32)
    got = through(Brain(), numbers)
    assert (np.isnan(got) == np.isnan(numbers)).all()
    assert (got == wanted)[~np.isnan(numbers)].all()


def test_what_is_not_finite_is_seen_by_all() -> None:
    for poison in (np.nan, np.inf, -np.inf):
        numbers = values(3 * BLOCK + 5)
        numbers[BLOCK + 3] = numbers[-1] = poison
        got = through(Int8Blocks(), numbers)
        assert np.isnan(got[BLOCK : 2 * BLOCK]).all()
        assert np.isnan(got[-5:]).all()
        assert np.isfinite(got[:BLOCK]).all()
        assert np.isfinite(got[2 * BLOCK : -5]).all()
    assert through(Half(), np.array([1e30], np.float32))[0] == np.inf


@pytest.mark.parametrize(
    ("wire_format", "dtype", "bytes_of_128"),
    [
        (WireFormat.FP32, "float32", 512),
        (WireFormat.FP32, "float16", 256),
        (WireFormat.FP32, "bfloat16", 256),
        (WireFormat.BF16, "float32", 256),
        (WireFormat.BF16, "float16", 256),
        (WireFormat.INT8, "float32", 136),
        (WireFormat.INT8, "bfloat16", 136),
        (WireFormat.INT8, "float64", 1024),
    ],
)
def test_what_travels(wire_format: WireFormat, dtype: str, bytes_of_128: int) -> None:
    native, wire, partial = Codecs(wire_format).of(dtype)
    assert wire.size(128) == bytes_of_128
    # A partial sum is never narrower than the format asks for.
    assert partial.size(128) == (512 if wire is native and dtype != "float64" else bytes_of_128)


def test_only_floats_can_be_summed() -> None:
    codecs = Codecs(WireFormat.FP32)
    assert "bfloat16" in codecs
    assert "int32" not in codecs
    with pytest.raises(KeyError):
        codecs.of("int32")


def test_the_smaller_the_format_the_larger_its_error() -> None:
    """As `motley bench precision` prints it: relative to the root mean square of normal values."""
    numbers = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
    errors = [
        float(np.sqrt(np.mean((through(codec, numbers) - numbers) ** 2))) for codec in (Half(), Brain(), Int8Blocks())
    ]
    assert errors[0] < 3e-4
    assert errors[1] < 3e-3
    assert errors[2] < 8e-3
