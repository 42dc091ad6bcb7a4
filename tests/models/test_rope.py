"""Rotary tables against the formulas, one number at a time."""

from __future__ import annotations

from math import cos, pi, sin

import numpy as np
import pytest

from motley.daemon.models.config import Llama3Scaling, Rope
from motley.daemon.models.rope import rotary_tables


def test_default_tables() -> None:
    cosines, sines = rotary_tables(Rope(10000.0), head_dim=8, positions=5)
    assert cosines.shape == sines.shape == (5, 4)
    assert cosines.dtype == sines.dtype == np.float32
    for position in range(5):
        for pair in range(4):
            angle = position / 10000.0 ** (2 * pair / 8)
            assert cosines[position, pair] == pytest.approx(cos(angle), abs=1e-7)
            assert sines[position, pair] == pytest.approx(sin(angle), abs=1e-7)


def test_far_positions_keep_their_precision() -> None:
    _, sines = rotary_tables(Rope(10000.0), head_dim=2, positions=131072)
    assert sines[131071, 0] == pytest.approx(sin(131071.0), abs=1e-7)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    _, plain = rotary_tables(Rope(500000.0), head_dim=128, positions=2)
    _, scaled = rotary_tables(Rope(500000.0, scaling), head_dim=128, positions=2)
    blended = 0
    for pair in range(64):
        frequency = 500000.0 ** (-2 * pair / 128)
        wavelength = 2 * pi / frequency
        if wavelength < 8192 / 4.0:
            assert scaled[1, pair] == plain[1, pair]
        elif wavelength > 8192 / 1.0:
            assert scaled[1, pair] == pytest.approx(sin(frequency / 8.0), rel=1e-6)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8.0 + smooth * frequency
            assert scaled[1, pair] == pytest.approx(sin(expected), rel=1e-6)
            blended += 1
    assert blended > 0
