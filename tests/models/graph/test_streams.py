"""The functions of residual streams: their standard operators compute what the reference computes as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from motley.daemon.models.graph.streams import match_streams, read_streams, stream_gates, write_streams
from motley.plugins.engine import DOMAIN
from motley.plugins.reference import operators
from motley.plugins.streams import MATCH_STREAMS, READ_STREAMS, STREAM_GATES, WRITE_STREAMS

ROWS, COLUMNS = 3, 5
RULES = {"epsilon": 0.02, "written": 1.5, "least": 0.1}


def by_operators(function: onnx.FunctionProto, inputs: list[np.ndarray[Any, Any]], **attributes: Any) -> Any:
    """What ONNX Runtime makes of one call of a function, by its body."""
    names = [f"x{number}" for number in range(len(inputs))]
    node = helper.make_node(function.name, names, ["y"], domain=DOMAIN, **attributes)
    given = dict(zip(names, inputs, strict=True))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, each.shape) for name, each in given.items()]
    graph = helper.make_graph([node], "one", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, given)[0]


def drawn(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("streams", [2, 4, 5])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_gates(streams: int, parts: int) -> None:
    columns, rounds = [streams, 2 * streams, (2 + streams) * streams][parts - 1], 3 if parts == 3 else 0
    inputs = [drawn(ROWS, columns), drawn(parts), drawn(columns)]
    rules = {"streams": streams, "rounds": rounds, **RULES}
    y = by_operators(stream_gates(parts, streams, rounds), inputs, **rules)
    np.testing.assert_allclose(y, operators.OPERATORS[STREAM_GATES[parts - 1]](np, *inputs, **rules), 1e-5)


@pytest.mark.parametrize("streams", [2, 4])
def test_streams_are_read_by_gates_of_each_row_or_of_all(streams: int) -> None:
    x = drawn(ROWS, streams * COLUMNS)
    for gates in (drawn(ROWS, 2 * streams), np.full(streams, 1 / streams, np.float32)):
        y = by_operators(read_streams(streams), [x, gates], streams=streams)
        np.testing.assert_allclose(y, operators.OPERATORS[READ_STREAMS](np, x, gates, streams=streams), 1e-5)
    np.testing.assert_allclose(y, x.reshape(ROWS, streams, COLUMNS).mean(axis=1), 1e-4, 1e-6)


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("mixes", [False, True])
def test_streams_are_written_to(streams: int, mixes: bool) -> None:
    inputs = [drawn(ROWS, streams * COLUMNS), drawn(ROWS, streams * (2 + streams * mixes)), drawn(ROWS, COLUMNS)]
    y = by_operators(write_streams(streams, mixes), inputs, streams=streams)
    write = operators.OPERATORS[WRITE_STREAMS]
    np.testing.assert_allclose(y, write(np, *inputs, streams=streams), 1e-4, 1e-6)
    alone, nothing = write(np, *inputs[:2], streams=streams), np.zeros_like(inputs[2])
    np.testing.assert_array_equal(alone, write(np, *inputs[:2], nothing, streams=streams))


@pytest.mark.parametrize("mixes", [False, True])
def test_streams_are_written_to_by_gates_of_all_rows(mixes: bool) -> None:
    x, gates, rows = drawn(ROWS, 3 * COLUMNS), drawn(3 * (2 + 3 * mixes)), drawn(ROWS, COLUMNS)
    write = operators.OPERATORS[WRITE_STREAMS]
    expected = write(np, x, np.tile(gates, (ROWS, 1)), rows, streams=3)
    np.testing.assert_allclose(by_operators(write_streams(3, mixes), [x, gates, rows], streams=3), expected, 1e-4, 1e-6)
    np.testing.assert_array_equal(write(np, x, gates, rows, streams=3), expected)


def test_what_mixes_adds_up_to_one_in_rows_and_columns() -> None:
    inputs = [drawn(ROWS, 24), np.ones(3, np.float32), drawn(24)]
    gates = operators.stream_gates(np, *inputs, streams=4, epsilon=1e-6, written=2.0, least=0.0, rounds=20)
    mix = gates[:, 8:].reshape(ROWS, 4, 4)
    np.testing.assert_allclose(mix.sum(axis=1), 1, 1e-5)
    np.testing.assert_allclose(mix.sum(axis=2), 1, 1e-3)


@pytest.mark.parametrize("streams", [2, 5])
def test_streams_get_as_much_of_a_row_as_their_queries_fit_their_keys(streams: int) -> None:
    """Nothing fits a query of zeros: then half of the row."""
    x, keys, rows = drawn(ROWS, streams * COLUMNS), 3 * drawn(ROWS + 1, streams * COLUMNS)[1:], drawn(ROWS, COLUMNS)
    x[1] = 0
    y = by_operators(match_streams(streams), [x, keys, rows], streams=streams, scale=0.5)
    expected = operators.OPERATORS[MATCH_STREAMS](np, x, keys, rows, streams=streams, scale=0.5)
    np.testing.assert_allclose(y, expected, 1e-5, 1e-6)
    np.testing.assert_allclose(y[1], np.tile(rows[1] / 2, streams), 1e-6)
    fit = (x[0, :COLUMNS] @ keys[0, :COLUMNS]) / 2
    share = 1 / (1 + np.exp(-np.sign(fit) * np.sqrt(np.abs(fit))))
    np.testing.assert_allclose(y[0, :COLUMNS], share * rows[0], 1e-4, 1e-6)
