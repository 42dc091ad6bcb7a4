"""Recurrent layers of the engine for NVIDIA's GPUs, by kernels that are compiled for the host.

That they compute the golden models is tested in test_engine.py.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from motley.plugins.cuda.kernels import THREADS, WARP
from motley.plugins.engine import EngineOptions
from tests.plugins.cuda.launching import launch_kernel
from tests.plugins.cuda.recurring import NAMES, Recurring
from tests.plugins.cuda.test_engine import on_host, pointer

ON_HOST = EngineOptions(extra={"host_step": "function"})


@pytest.mark.parametrize("name", NAMES)
def test_guesses_right_and_wrong_change_no_bit(name: str, tmp_path: Path) -> None:
    with Recurring(name, on_host, ON_HOST, tmp_path, ranks=2) as ranks:
        ranks.check_guesses()


@pytest.mark.parametrize("name", NAMES)
def test_sequences_are_apart_and_begin_anew(name: str, tmp_path: Path) -> None:
    with Recurring(name, on_host, ON_HOST, tmp_path) as ranks:
        ranks.check_company()


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_goes_on_as_what_it_was_of(name: str, tmp_path: Path) -> None:
    with Recurring(name, on_host, ON_HOST, tmp_path) as ranks:
        ranks.check_snapshots()


def test_a_state_is_used_at_its_own_position_alone(tmp_path: Path) -> None:
    with Recurring("lfm2", on_host, ON_HOST, tmp_path) as ranks:
        ranks.check_places()


@pytest.mark.parametrize("squashed", [False, True])
def test_heads_that_are_wider_than_a_warp(squashed: bool) -> None:
    """Of real models: those of the golden ones are narrow."""
    rng, rows, heads, width = np.random.default_rng(0), 3, 4, 70
    x = rng.standard_normal((rows, heads * width)).astype(np.float32)
    z, gain = (
        rng.standard_normal((rows, heads * width)).astype(np.float32),
        rng.standard_normal(width).astype(np.float32),
    )
    y, units_ = np.full_like(x, np.nan), x.copy()
    blocks, sizes = -(-rows * heads * WARP // THREADS), [*map(ctypes.c_int, (rows, heads, width))]
    stride = ctypes.c_int(heads * width)
    launch_kernel("unit_heads", blocks, [pointer(units_), stride, *sizes])
    given = [
        pointer(x),
        pointer(gain),
        pointer(z),
        stride,
        pointer(y),
        *sizes,
        ctypes.c_float(1e-6),
        ctypes.c_int(squashed),
    ]
    launch_kernel("norm_and_gate", blocks, given)
    apart, gates = (each.astype(float).reshape(rows, heads, width) for each in (x, z))
    lengths = np.sqrt(np.square(apart).sum(axis=-1, keepdims=True) + 1e-6)
    shorter = np.array([width**-0.5] * 2 + [1] * 2)[:, None]
    assert np.abs(units_.reshape(apart.shape) - apart / lengths * shorter).max() < 1e-6
    normed = apart / np.sqrt(np.square(apart).mean(axis=-1, keepdims=True) + 1e-6) * gain
    opened = (1 if squashed else gates) / (1 + np.exp(-gates))
    assert np.abs(y.reshape(apart.shape) - normed * opened).max() < 1e-5
