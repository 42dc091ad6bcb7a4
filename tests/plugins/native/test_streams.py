"""Our kernels of residual streams, against the reference, at every level and row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.native.library import F32
from motley.plugins.native.rows import MOST_STREAMS, bind_stream_gates, bind_streams
from motley.plugins.reference import operators
from motley.plugins.streams import MOST_STREAMS as MOST_OF_A_MODEL
from tests.plugins.native.native_levels import assert_same, at_all_levels, normal

RULES = {"epsilon": 0.02, "written": 1.5, "least": 0.1}


def gates_of(logits: F32, scale: F32, base: F32, **rules: Any) -> F32:
    y = np.full_like(logits, np.nan)
    bind_stream_gates(logits, scale, base, y, **rules)()
    return y


@given(rows=st.integers(1, 3), streams=st.integers(2, MOST_STREAMS), parts=st.integers(1, 3), rounds=st.integers(1, 20))
def test_gates(rows: int, streams: int, parts: int, rounds: int) -> None:
    random = np.random.default_rng([rows, streams, parts])
    columns = [streams, 2 * streams, (2 + streams) * streams][parts - 1]
    given_ = normal(random, rows, columns) * 3, normal(random, parts), normal(random, columns)
    rules = {"streams": streams, "rounds": rounds if parts == 3 else 0, **RULES}
    y = at_all_levels(lambda: gates_of(*given_, **rules))
    exact = operators.stream_gates(np, *(each.astype(np.float64) for each in given_), **rules)
    np.testing.assert_allclose(y, exact, 2e-5, 1e-7)
    for row in range(rows):
        assert_same(gates_of(given_[0][row : row + 1], *given_[1:], **rules), y[row : row + 1])
    in_place = given_[0].copy()
    bind_stream_gates(in_place, *given_[1:], in_place, **rules)()
    assert_same(in_place, y)


@given(rows=st.integers(1, 3), streams=st.integers(2, MOST_STREAMS), columns=st.integers(1, 70), alike=st.booleans())
def test_reading(rows: int, streams: int, columns: int, alike: bool) -> None:
    random = np.random.default_rng([rows, streams, columns])
    x, gates = normal(random, rows, streams * columns), normal(random, *([streams] if alike else [rows, 2 * streams]))

    def read(x: F32, gates: F32) -> F32:
        y = np.full((len(x), columns), np.nan, np.float32)
        bind_streams(x, gates, y, streams)()
        return y

    y = at_all_levels(lambda: read(x, gates))
    np.testing.assert_allclose(y, operators.read_streams(np, x, gates, streams=streams), 1e-4, 1e-5)
    for row in range(rows):
        assert_same(read(x[row : row + 1], gates if alike else gates[row : row + 1]), y[row : row + 1])


@given(
    rows=st.integers(1, 3),
    streams=st.integers(2, MOST_STREAMS),
    columns=st.integers(1, 70),
    mixes=st.booleans(),
    alike=st.booleans(),
)
def test_writing(rows: int, streams: int, columns: int, mixes: bool, alike: bool) -> None:
    random = np.random.default_rng([rows, streams, columns])
    x, own = normal(random, rows, streams * columns), normal(random, rows, columns)
    gates = normal(random, *[rows][alike:], (2 + streams * mixes) * streams)

    def write(x: F32, gates: F32, own: F32) -> F32:
        y = np.full_like(x, np.nan)
        bind_streams(x, gates, y, streams, own)()
        return y

    y = at_all_levels(lambda: write(x, gates, own))
    np.testing.assert_allclose(y, operators.write_streams(np, x, gates, own, streams=streams), 1e-4, 1e-5)
    for row in range(rows):
        one = slice(row, row + 1)
        assert_same(write(x[one], gates if alike else gates[one], own[one]), y[one])


def test_as_many_streams_as_a_model_may_have() -> None:
    assert MOST_STREAMS == MOST_OF_A_MODEL


@pytest.mark.parametrize(("streams", "columns", "rounds"), [(1, 2, 0), (9, 18, 0), (4, 9, 0), (4, 24, 0), (4, 8, 1)])
def test_gates_of_another_number_of_streams_are_refused(streams: int, columns: int, rounds: int) -> None:
    logits = np.zeros((1, columns), np.float32)
    with pytest.raises(ValueError, match="logits"):
        bind_stream_gates(logits, logits[0, :1], logits[0], logits, streams=streams, rounds=rounds, **RULES)


@pytest.mark.parametrize("gates", [np.zeros((1, 7), np.float32), np.zeros((1, 4), np.float32)])
def test_streams_are_written_to_by_gates_that_say_what_they_get(gates: F32) -> None:
    x, own = np.zeros((1, 40), np.float32), np.zeros((1, 10), np.float32)
    with pytest.raises(ValueError, match="gates"):
        bind_streams(x, gates, np.zeros_like(x), 4, own)
