"""Cutting a graph at its collectives: what crosses a cut, what need not run, and what stands where."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import NodeProto, helper

from motley.plugins.engine import DOMAIN
from motley.plugins.nodes import COLLECTIVE, EXPERTS
from motley.plugins.segments import (
    PRODUCT,
    ROWS,
    Kernel,
    Mixture,
    Reduction,
    buffer_numbers,
    cut_into_segments,
)


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
    assert (first.then.operands, first.then.totals) == (["x", "weights", "chosen"], ("mixture",))
    assert (second.nodes, second.outputs, second.then) == ((), (), Reduction("mixture", "sum"))
    assert third.inputs == ("hidden", "sum")


def test_experts_on_what_was_gathered_have_a_buffer_of_their_own() -> None:
    """A gathered term stands in a place that has no number."""
    expert = helper.make_graph([], "expert", [], [])
    gather = {"collective_operation": "all_gather", "counts": [1, 1]}
    nodes = [
        node("Relu", "hidden", "x weights chosen own"),
        helper.make_node(COLLECTIVE, ["own"], ["g0", "g1"], domain=DOMAIN, **gather),
        helper.make_node(EXPERTS, ["x", "weights", "chosen", "g0"], ["total"], domain=DOMAIN, experts=[expert]),
        node("Add", "total g1", "out"),
    ]
    numbers = buffer_numbers(cut_into_segments(nodes, (), ["out"]), kind=lambda name: None)
    assert "g0" not in numbers
    assert numbers["total"] not in {numbers[name] for name in ("x", "weights", "chosen")}


def test_a_product_is_between_two_segments_and_its_operands_cross() -> None:
    def product(operands: str, y: str) -> NodeProto:
        return helper.make_node(PRODUCT, operands.split(), [y], domain=DOMAIN)

    nodes = [
        node("Relu", "hidden", "x"),
        product("x codes scales", "y"),
        product("x codes scales", "z"),
        node("Add", "y z", "partial"),
        reduce("partial", "sum"),
        node("Gather", f"sum {ROWS}", "row"),
        product("row codes scales", "logits"),
    ]
    segments = cut_into_segments(nodes, {"codes", "scales"}, ["logits"])
    assert [segment.outputs for segment in segments] == [("x",), (), ("partial",), (), ("row",), ()]
    assert [segment.head for segment in segments] == [False] * 4 + [True] * 2
    products = [segment.then for segment in segments if isinstance(segment.then, Kernel)]
    expected = [(("x",), ("y",)), (("x",), ("z",)), (("row",), ("logits",))]
    assert [(product.operands, product.results) for product in products] == expected
    numbers = buffer_numbers(segments, lambda _: None)
    assert len({numbers[name] for name in "xyz"}) == 3, "all are alive at once"
    assert "logits" not in numbers


@st.composite
def graphs(draw: st.DrawFn) -> list[NodeProto]:
    """Some layers, in no sensible order, of values that may live for long; the last has the logits."""
    nodes: list[NodeProto] = []
    alive = ["hidden"]
    names = (f"v{index}" for index in count())

    def some() -> str:
        return " ".join(draw(st.lists(st.sampled_from(alive), min_size=1, max_size=3, unique=True)))

    def make(inputs: str, outputs: int = 1) -> list[str]:
        made = [next(names) for _ in range(outputs)]
        nodes.append(node("Op", inputs, " ".join(made)))
        return made

    for kind in draw(
        st.lists(st.sampled_from(["op", "sum", "gathering", "product", "experts", "experts on a base"]), max_size=12)
    ):
        if kind == "op":
            alive += make(some(), draw(st.integers(1, 2)))
        elif kind == "sum":
            (partial,) = make(some())
            nodes.append(reduce(partial, total := next(names)))
            alive.append(total)
        elif kind == "product":
            x = draw(st.sampled_from(alive))
            nodes.append(helper.make_node(PRODUCT, [x, "codes", "scales"], [y := next(names)], domain=DOMAIN))
            alive.append(y)
        elif kind == "gathering":
            own = make(some(), draw(st.integers(1, 2)))
            gathered = [next(names) for _ in range(2 * len(own))]
            operation = {"collective_operation": "all_gather", "counts": [len(own)] * 2}
            nodes.append(helper.make_node(COLLECTIVE, own, gathered, domain=DOMAIN, **operation))
            alive += make(f"{gathered[0]} {gathered[-1]}")
        else:
            x, weights, chosen = make(some(), 3)
            sums = draw(st.integers(1, 2))
            bases = make(some(), sums) if kind == "experts on a base" else []
            totals = [next(names) for _ in range(sums)]
            expert = helper.make_graph([], "expert", [], [])
            operands = [x, weights, chosen, *bases]
            nodes.append(helper.make_node(EXPERTS, operands, totals, domain=DOMAIN, experts=[expert]))
            alive += [x, weights, *totals]
    nodes.append(node("Op", f"{some()} {ROWS}", "logits"))
    return nodes


@given(graphs(), st.integers(1, 3))
def test_a_buffer_holds_a_value_for_as_long_as_it_is_read(nodes: list[NodeProto], widths: int) -> None:
    """Every value is written where it stands, and found there by all who read it."""

    def kind(name: str) -> int:
        # What takes over a buffer is as wide as what stood there.
        return 0 if name in takes_over or name == "hidden" else int(name[1:]) % widths

    special = [each for each in nodes if each.domain == DOMAIN and each.op_type != PRODUCT]
    takes_over = {name for each in special for name in (each.input[0], *each.input[3:], *each.output)}
    own = {name for each in special if each.op_type == COLLECTIVE and len(each.output) > 1 for name in each.input}
    segments = cut_into_segments(nodes, ("codes", "scales"), ["logits"])
    numbers = buffer_numbers(segments, kind)
    holds = {numbers["hidden"]: "hidden"}

    def write(name: str) -> None:
        if name in numbers:
            holds[numbers[name]] = name

    def check_read(names: Iterable[str]) -> None:
        assert all(holds[numbers[name]] == name for name in names if name in numbers)

    for segment in segments:
        for name in segment.outputs:
            write(name)
        check_read([*segment.inputs, *segment.outputs])  # while it runs, both are there
        match segment.then:
            case Reduction(partial, reduced):
                check_read([partial])
                write(reduced)
            case Mixture() as mixture:
                check_read(mixture.operands)
                for name in mixture.totals:
                    write(name)
                check_read([mixture.x, mixture.weights, mixture.chosen])
            case Kernel(_, operands, results):
                check_read(operands)
                for name in results:
                    write(name)
                check_read([*operands, *results])
    assert {name for segment in segments for name in segment.outputs} - own - {"logits"} <= numbers.keys()
    for number in set(numbers.values()):
        assert len({kind(name) for name, its in numbers.items() if its == number}) == 1


@pytest.mark.parametrize("layers", [1, 20])
def test_layers_share_four_buffers(layers: int) -> None:
    nodes = []
    residual = "hidden"
    for layer in range(layers):
        nodes += [node("MatMul", f"{residual} w", f"p{layer}"), reduce(f"p{layer}", f"s{layer}")]
        nodes.append(node("Add", f"{residual} s{layer}", f"r{layer}"))
        residual = f"r{layer}"
    nodes.append(node("MatMul", f"{residual} {ROWS}", "logits"))
    numbers = buffer_numbers(cut_into_segments(nodes, {"w"}, ["logits"]), kind=lambda name: None)
    assert len(set(numbers.values())) <= 4  # a residual and a sum are read, the next ones are written
