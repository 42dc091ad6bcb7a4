"""Cutting a graph at its collectives: what crosses a cut, and what need not run."""

from __future__ import annotations

from onnx import NodeProto, helper

from motley.plugins.engine import DOMAIN
from motley.plugins.segments import COLLECTIVE, EXPERTS, ROWS, Mixture, Reduction, cut_into_segments


def node(op: str, inputs: str, outputs: str) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split())


def reduce(partial: str, reduced: str) -> NodeProto:
    return helper.make_node(COLLECTIVE, [partial], [reduced], domain=DOMAIN, collective_operation="all_reduce")


LAYER = [
    node("MatMul", "hidden w", "partial"),
    reduce("partial", "sum"),
    node("Add", "hidden sum", "next"),
    node("Gather", f"next {ROWS}", "row"),
    node("MatMul", "row head", "logits"),
]


def test_segments_carry_what_later_ones_read() -> None:
    first, middle, head = cut_into_segments(LAYER, {"w", "head"}, ["logits"])
    assert (first.inputs, first.outputs, first.then) == (("hidden",), ("partial",), Reduction("partial", "sum"))
    assert (middle.inputs, middle.outputs, middle.then) == (("hidden", "sum"), ("next",), None)
    assert (head.inputs, head.outputs, head.head) == (("next", ROWS), ("logits",), True)
    assert not first.head
    assert not middle.head


def test_a_rank_without_a_head_need_not_add_its_last_sum() -> None:
    first, last = cut_into_segments(LAYER[:3], {"w"}, [])
    assert first.outputs == ("partial",)
    assert last.outputs == ()
    assert not last.head


def test_without_collectives_only_the_head_is_apart() -> None:
    body, head = cut_into_segments([LAYER[0], node("Gather", f"partial {ROWS}", "logits")], {"w"}, ["logits"])
    assert body.outputs == ("partial",)
    assert head.inputs == ("partial", ROWS)


def test_a_value_is_carried_over_segments_that_do_not_read_it() -> None:
    nodes = [
        node("MatMul", "hidden w", "p0"),
        node("Relu", "hidden", "kept"),
        reduce("p0", "s0"),
        node("MatMul", "s0 w", "p1"),
        reduce("p1", "s1"),
        node("Add", "s1 kept", "out"),
    ]
    first, second, third = cut_into_segments(nodes, {"w"}, ["out"])
    assert set(first.outputs) == {"p0", "kept"}
    assert (second.inputs, second.outputs) == (("s0",), ("p1",))
    assert set(third.inputs) == {"s1", "kept"}


def test_experts_are_between_two_segments() -> None:
    expert = helper.make_graph([], "expert", [], [])
    nodes = [
        node("Relu", "hidden", "x"),
        node("TopK", "x k", "weights chosen"),
        helper.make_node(EXPERTS, ["x", "weights", "chosen"], ["mixture"], domain=DOMAIN, experts=[expert]),
        reduce("mixture", "sum"),
        node("Add", "hidden sum", "out"),
    ]
    first, second, third = cut_into_segments(nodes, {"k"}, ["out"])
    assert first.outputs == ("x", "weights", "chosen")
    assert isinstance(first.then, Mixture)
    assert (first.then.operands, first.then.total) == (["x", "weights", "chosen"], "mixture")
    assert (second.nodes, second.outputs, second.then) == ((), (), Reduction("mixture", "sum"))
    assert third.inputs == ("hidden", "sum")
