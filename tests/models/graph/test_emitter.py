"""What a graph in the making declares: constants once, and weights as the nodes read them that make floats of them."""

from __future__ import annotations

from motley.daemon.models.cutting.holding import FLOATS
from motley.daemon.models.graph.emitter import Emitter
from motley.daemon.weights.spec import Encoding, Piece, Weight
from motley.daemon.weights.stored import Format

PIECE = Piece("layer.weight", range(4), range(64))


def test_a_constant_is_there_once_however_often_it_is_asked_for() -> None:
    graph = Emitter({})
    assert graph.integers([1, 2]) == graph.integers(range(1, 3)) != graph.integers([12])
    assert graph.floats(0.5) == graph.floats(0.5) != graph.floats(0.5, 0.5)
    assert graph.ones(3) == graph.ones(3)
    dims = {name: list(constant.dims) for name, constant in graph.constants.items()}
    assert sorted(dims.values()) == [[], [1], [2], [2], [3]]
    assert [tensor.name for tensor in graph.initializers([])] == list(dims)


def test_floats_are_read_as_they_are_and_halves_are_widened() -> None:
    graph = Emitter({PIECE.tensor: Format(Encoding.FP16)})
    assert graph.matrix("whole", [PIECE], floats=True) == "whole"
    assert not graph.nodes
    assert graph.matrix("half", [PIECE]) == "half.fp32"
    assert [(node.op_type, list(node.input)) for node in graph.nodes] == [("Cast", ["half"])]
    assert graph.weights == [Weight("whole", (PIECE,), FLOATS.encoding), Weight("half", (PIECE,), Encoding.FP16)]


def test_codes_are_read_with_scales_and_zero_points_by_blocks() -> None:
    for zeros, made in ((False, ["ConstantOfShape", "DequantizeLinear"]), (True, ["DequantizeLinear"])):
        graph = Emitter({PIECE.tensor: Format(Encoding.INT4, 32, zeros=zeros)})
        assert graph.matrix("codes", [PIECE]) == "codes.dequantised"
        assert [node.op_type for node in graph.nodes] == made
        zero_point = "codes.zero" if zeros else "codes.zero_point"
        assert list(graph.nodes[-1].input) == ["codes", "codes.scale", zero_point]
        assert {each.name: each.i for each in graph.nodes[-1].attribute} == {"axis": 1, "block_size": 32}
        assert graph.weights == [Weight("codes", (PIECE,), Encoding.INT4, 32, zeros)]
    assert not graph.constants
