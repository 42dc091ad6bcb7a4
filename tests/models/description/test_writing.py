"""Types of activations: what is summed over the ranks and where, and what does not fit and is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from motley.daemon.models.blocks.experts import experts
from motley.daemon.models.blocks.layers import begin, model
from motley.daemon.models.blocks.mlp import gated_mlp, mlp_axis, usual_names
from motley.daemon.models.description.axes import Axis, Heads, Kind, Placement, Value, W, key_axis, query_axis
from motley.daemon.models.description.model import Layer
from motley.daemon.models.description.operations.attention import Means
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation, Add, Sum, WholeNorm
from motley.daemon.models.description.writing import ShardingError, Writer
from motley.daemon.models.keys import ConfigError
from tests.models.hand_made import SHAPE

RESIDUAL = Axis(Kind.HIDDEN, 48, "hidden_size")
OTHER = Axis(Kind.PLAIN, 20, "something else")
COLUMNS = mlp_axis(80)
HEADS = Heads(12, 4, 16)
UP = W("up", COLUMNS, RESIDUAL)
DOWN = W("down", RESIDUAL, COLUMNS)
BIAS = W("biased", COLUMNS, RESIDUAL, bias="bias")
ROUTER = W("router", Axis(Kind.PLAIN, 8, "experts"), RESIDUAL, stays_float=True)
X = Value("layers.0.x", RESIDUAL)
SHARDED = Value("layers.0.sharded", COLUMNS, Placement.SHARDED)
PARTIAL = Value("layers.0.mlp.partial", RESIDUAL, Placement.PARTIAL)
Q, K, V = (
    Value(f"layers.0.{letter}", axis, Placement.SHARDED)
    for letter, axis in (("q", query_axis(HEADS)), ("k", key_axis(HEADS)), ("v", key_axis(HEADS)))
)


def sums(writer: Writer) -> list[tuple[str, str]]:
    return [(x.name, each.y.name) for each in writer.operations if isinstance(each, Sum) for x in each.xs]


def test_a_cut_output_makes_a_sharded_value_and_a_cut_input_a_partial_one() -> None:
    writer = Writer(X)
    (up,) = writer.linear("layers.0.mlp.up", X, UP)
    assert (up.axis, up.placement) == (COLUMNS, Placement.SHARDED)
    (down,) = writer.linear("layers.0.mlp.down", up, DOWN)
    assert (down.axis, down.placement) == (RESIDUAL, Placement.PARTIAL)
    (chosen,) = writer.linear("layers.0.mlp.router", X, ROUTER)
    assert chosen.placement is Placement.REPLICATED


def test_a_partial_value_is_summed_once_before_it_is_added() -> None:
    writer = Writer(X)
    y = writer.add(X, PARTIAL)
    assert (y.name, y.placement) == ("layers.0.mlp.residual", Placement.REPLICATED)
    assert sums(writer) == [("layers.0.mlp.partial", "layers.0.mlp.reduced")]
    assert [type(each) for each in writer.operations] == [Sum, Add]


def test_what_blocks_side_by_side_make_is_summed_at_once() -> None:
    writer, other = Writer(X), Value("layers.0.attention.partial", RESIDUAL, Placement.PARTIAL)
    y = writer.add(X, other, PARTIAL)
    assert y.name == "layers.0.mlp.residual"
    assert sums(writer) == [(each.name, "layers.0.mlp.reduced") for each in (other, PARTIAL)]
    assert [type(each) for each in writer.operations] == [Sum, Add]


def test_a_partial_value_that_is_needed_whole_twice_is_summed_once() -> None:
    writer = Writer(X)
    assert writer.replicated(PARTIAL) is writer.replicated(PARTIAL)
    assert len(sums(writer)) == 1


def test_a_value_that_every_rank_has_is_not_summed() -> None:
    writer = Writer(X)
    normed = writer.norm("layers.0.mlp.after", PARTIAL, W("gain", RESIDUAL), 1e-5)
    writer.add(X, normed)
    assert sums(writer) == [("layers.0.mlp.partial", "layers.0.mlp.reduced")]


def test_what_each_rank_can_do_to_its_term_needs_no_sum() -> None:
    writer = Writer(X)
    scaled = writer.scaled(PARTIAL, 0.5)
    share = writer.linear("layers.0.mlp.gate", X, ROUTER)[0]
    weighted = writer.scaled_rows("layers.0.mlp.weighted", scaled, share)
    assert scaled.placement is weighted.placement is Placement.PARTIAL
    assert writer.scaled(weighted, 1.0) is weighted
    assert not sums(writer)


def test_a_sum_may_be_made_before_it_is_scaled() -> None:
    writer = Writer(X)
    residual = writer.add(X, writer.scaled_sum(PARTIAL, 0.5))
    assert residual.placement is Placement.REPLICATED
    assert sums(writer) == [("layers.0.mlp.partial", "layers.0.mlp.reduced")]


@pytest.mark.parametrize(
    "act",
    [
        lambda writer: writer.soft_capped(PARTIAL, 30.0),
        lambda writer: writer.clip(PARTIAL, 8.0),
        lambda writer: writer.linear("layers.0.mlp.router", PARTIAL, ROUTER),
        lambda writer: writer.norm("layers.0.mlp.norm", PARTIAL, None, 1e-5),
    ],
)
def test_what_is_no_linear_function_is_of_the_sum(act: Callable[[Writer], object]) -> None:
    writer = Writer(X)
    act(writer)
    assert len(sums(writer)) == 1


def test_norms_of_whole_rows_sum_their_squares_together() -> None:
    writer = Writer(X)
    gains = (W("q_norm", query_axis(HEADS)), W("k_norm", key_axis(HEADS)))
    ys = writer.whole_norm("layers.0.squares", (Q, K), gains, 1e-5)
    assert [(y.axis, y.placement) for y in ys] == [(x.axis, Placement.SHARDED) for x in (Q, K)]
    assert [type(each) for each in writer.operations] == [WholeNorm]


def attend(writer: Writer, q: Value = Q, k: Value = K, v: Value = V, heads: Heads = HEADS) -> Value:
    return writer.attend("layers.0.attended", 0, q, k, v, heads, rope=None, window=0, scale=1.0)


def test_attention_gives_every_rank_its_heads() -> None:
    y = attend(Writer(X))
    assert (y.axis, y.placement) == (query_axis(HEADS), Placement.SHARDED)


def body(result: Callable[[Writer], Value]) -> tuple[Writer, Value]:
    writer = Writer(Value("layers.0.mlp.experts.{expert}.x", RESIDUAL))
    return writer, result(writer)


def routed(writer: Writer, chosen: int = 2) -> tuple[Value, Value]:
    return writer.route("layers.0.mlp.router", X, ROUTER, Routing(chosen))


INDEX = Axis(Kind.PLAIN, 20, "index_head_dim")
TAPS = Axis(Kind.PLAIN, 3, "taps")


def choose_means(writer: Writer, count: int = 8, means: Means | None = None, queries: int = 2) -> Value:
    q, k = Value("layers.0.index.q", Axis(Kind.PLAIN, 40, "queries")), Value("layers.0.index.k", INDEX)
    of_means = means or Means(W("gain", INDEX), 1e-5, 1.0)
    heads = Heads(queries, 1, 20)
    return writer.choose_means("layers.0.chosen", 0, q, k, heads, HEADS, count, 4, of_means, rope="main")


REFUSED: dict[str, tuple[Callable[[Writer], object], str]] = {
    "a sharded value added to a residual": (
        lambda writer: writer.add(X, SHARDED),
        r"layers\.0\.sharded is sharded, not replicated",
    ),
    "a partial residual": (lambda writer: writer.add(PARTIAL, X), r"a residual: .*partial is partial, not replicated"),
    "something else added to a residual": (
        lambda writer: writer.add(X, Value("layers.0.other", OTHER)),
        r"layers\.0\.other is no residual's: it is along something else",
    ),
    "a layer that ends with a partial value": (lambda writer: writer.layer(PARTIAL), "the end of a layer: .*partial"),
    "a matrix cut along an axis that its operand is not cut along": (
        lambda writer: writer.linear("layers.0.down", X, DOWN),
        r"layers\.0\.down: down is cut along intermediate_size, and layers\.0\.x is not",
    ),
    "a matrix cut along another axis than its operand": (
        lambda writer: writer.linear("layers.0.down", Q, DOWN),
        r"down is cut along intermediate_size, and layers\.0\.q is not",
    ),
    "a matrix cut along an axis of which the operand is whole": (
        lambda writer: writer.linear("layers.0.down", Value("whole", COLUMNS), DOWN),
        "layers.0.down: whole is replicated, not sharded",
    ),
    "a sharded value where a whole one is needed": (
        lambda writer: writer.linear("layers.0.up", SHARDED, UP),
        r"layers\.0\.sharded is sharded, not replicated",
    ),
    "a value of another width": (
        lambda writer: writer.linear("layers.0.up", Value("layers.0.other", OTHER), UP),
        r"layers\.0\.up: layers\.0\.other is 20 wide, up wants 48",
    ),
    "a matrix cut along both axes": (
        lambda writer: writer.linear("layers.0.both", SHARDED, W("both", query_axis(HEADS), COLUMNS)),
        r"layers\.0\.both: both can be cut along one axis only",
    ),
    "a vector as a matrix": (
        lambda writer: writer.linear("layers.0.vector", X, W("vector", RESIDUAL)),
        "need one input axis",
    ),
    "matrices of unlike inputs in one product": (
        lambda writer: writer.linear("layers.0.two", X, UP, W("other", COLUMNS, OTHER), ys=("a", "b")),
        r"layers\.0\.two: matrices that are one product need one input axis",
    ),
    "a bias of one matrix of a product": (
        lambda writer: writer.linear("layers.0.two", X, UP, BIAS, ys=("a", "b")),
        "all a bias or none",
    ),
    "a router in one product with others": (
        lambda writer: writer.linear("layers.0.two", X, UP, ROUTER, ys=("a", "b")),
        "are cut alike, and all of them route or none",
    ),
    "a gain of another width": (
        lambda writer: writer.norm("layers.0.norm", X, W("gain", OTHER), 1e-5),
        r"layers\.0\.norm: a norm of 48 elements cannot have a gain gain of \(20,\)",
    ),
    "a norm of sharded columns": (
        lambda writer: writer.norm("layers.0.norm", SHARDED, None, 1e-5),
        r"layers\.0\.sharded is sharded, not replicated",
    ),
    "a whole norm of what every rank has": (
        lambda writer: writer.whole_norm("layers.0.squares", (X,), (W("gain", RESIDUAL),), 1e-5),
        r"layers\.0\.squares: layers\.0\.x is replicated, not sharded",
    ),
    "a whole norm with the gain of another axis": (
        lambda writer: writer.whole_norm("layers.0.squares", (Q,), (W("gain", key_axis(HEADS)),), 1e-5),
        r"the gain gain is not along the axis of layers\.0\.q",
    ),
    "attention of other heads": (
        lambda writer: attend(writer, heads=Heads(12, 2, 16)),
        r"layers\.0\.attended: layers\.0\.q is not made of this layer's heads",
    ),
    "keys as queries": (lambda writer: attend(writer, q=K), r"layers\.0\.k is not made of this layer's heads"),
    "keys that every rank has": (
        lambda writer: attend(writer, k=Value("whole", key_axis(HEADS))),
        "whole is replicated, not sharded",
    ),
    "an index query for each query head": (
        lambda writer: writer.choose_blocks("layers.0.chosen", 0, Q, X, HEADS, 3, 16, 1, rope="main"),
        r"layers\.0\.chosen: layers\.0\.q and layers\.0\.x are not of an index head for each KV head",
    ),
    "a gate that nothing opens by what opens no gate alone": (
        lambda writer: writer.gated("layers.0.gated", SHARDED, None, Activation.RELU),
        r"layers\.0\.gated: layers\.0\.sharded opens nothing by relu",
    ),
    "means of blocks of which a list is not made": (
        lambda writer: choose_means(writer, count=10),
        r"layers\.0\.chosen: 10 positions in blocks of 4, or gain, do not fit",
    ),
    "a norm of means with the gain of others": (
        lambda writer: choose_means(writer, means=Means(W("gain", TAPS), 1e-5, 1.0)),
        r"layers\.0\.chosen: .* in blocks of 4, or gain, do not fit",
    ),
    "index queries of other heads": (
        lambda writer: choose_means(writer, queries=3),
        r"layers\.0\.chosen: layers\.0\.index\.q and layers\.0\.index\.k are not made of 3 heads of 20",
    ),
    "a filter of another axis": (
        lambda writer: writer.dilated_convolution("layers.0.y", 1, X, W("filter", OTHER, TAPS), 2),
        r"layers\.0\.y: layers\.0\.x and the filter filter are of unlike axes",
    ),
    "a convolution of what ranks have parts of": (
        lambda writer: writer.dilated_convolution("layers.0.y", 1, SHARDED, W("filter", COLUMNS, TAPS), 2),
        r"layers\.0\.sharded is sharded, not replicated",
    ),
    "two values of one name": (
        lambda writer: [writer.linear("layers.0.up", X, UP), writer.linear("layers.0.up", X, UP)],
        r"layers\.0\.up is the name of two values",
    ),
    "two sums in one block": (
        lambda writer: [writer.replicated(Value(f"layers.0.mlp.{n}", RESIDUAL, Placement.PARTIAL)) for n in "ab"],
        r"layers\.0\.mlp\.reduced is the name of two values",
    ),
    "a value of the name of the residual": (
        lambda writer: writer.linear(X.name, X, UP),
        r"layers\.0\.x is the name of two values",
    ),
    "gate and up of unlike axes": (
        lambda writer: writer.gated("layers.0.gated", SHARDED, Q, Activation.SILU),
        r"layers\.0\.gated: layers\.0\.sharded and layers\.0\.q are of unlike axes",
    ),
    "rows scaled by what is partial": (
        lambda writer: writer.scaled_rows("layers.0.scaled", X, PARTIAL),
        r"layers\.0\.scaled: .*partial is partial, not replicated",
    ),
    "more experts than there are": (
        lambda writer: routed(writer, chosen=9),
        r"layers\.0\.mlp\.router: 9 of 8 experts cannot be chosen",
    ),
    "an expert that ends with a sharded value": (
        lambda writer: writer.experts(
            "layers.0.mixture", 0, X, routed(writer), 8, body(lambda own: own.linear("up", own.x, UP)[0])
        ),
        r"layers\.0\.mixture: up is sharded, not partial",
    ),
    "experts added to what every rank has": (
        lambda writer: writer.experts(
            "layers.0.mixture",
            0,
            X,
            routed(writer),
            8,
            body(lambda own: gated_mlp(own, "layers.0.mlp.{expert}", own.x, COLUMNS, usual_names("mlp"))),
            base=X,
        ),
        r"layers\.0\.mixture: layers\.0\.x is replicated, not partial",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(what: str) -> None:
    act, complaint = REFUSED[what]
    with pytest.raises(ShardingError, match=complaint):
        act(Writer(X))


def test_a_description_that_does_not_fit_is_a_model_that_cannot_be_served() -> None:
    assert issubclass(ShardingError, ConfigError)


def test_layers_that_do_not_follow_each_other_are_refused() -> None:
    def layer(number: int) -> Layer:
        writer = begin(SHAPE, number)
        return writer.layer(writer.add(writer.x, Value(f"layers.{number}.other.y", writer.x.axis)))

    with pytest.raises(ShardingError, match=r"begins with layers\.0\.mlp\.residual, .* layers\.0\.other\.residual"):
        model("by hand", SHAPE, layer, {}, 64)


def test_experts_of_a_partial_input_are_given_the_sum() -> None:
    writer = Writer(X)
    experts(writer, SHAPE, 0, PARTIAL, 8, 48, Routing(2))
    assert len(sums(writer)) == 1


STREAMS = Axis(Kind.PLAIN, 4 * 48, "hc_mult * hidden_size")
OF_STREAMS = Value("layers.0.streams", STREAMS)
GATES = Value("layers.0.gates", Axis(Kind.PLAIN, 8, "gates of streams"))
MEAN = (0.25,) * 4


def vector(name: str, size: int) -> W:
    return W(name, Axis(Kind.PLAIN, size, "numbers"))


def gates(writer: Writer, logits: int = 24, scale: int = 3, rounds: int = 2, streams: int = 4) -> Value:
    made = Value("layers.0.logits", Axis(Kind.PLAIN, logits, "gates of streams"))
    rules = {"epsilon": 1e-6, "rounds": rounds}
    return writer.stream_gates("layers.0.y", made, vector("scale", scale), vector("base", logits), streams, **rules)


def test_what_is_above_a_threshold_is_decided_by_all_ranks() -> None:
    writer = Writer(X)
    gate = Value("layers.0.mlp.gate", COLUMNS, Placement.SHARDED)
    above = writer.statistical_top_k("layers.0.mlp.moments", gate, 1.5)
    assert above == Value("layers.0.mlp.gate.above", COLUMNS, Placement.SHARDED)
    with pytest.raises(ShardingError, match=r"layers\.0\.moments: layers\.0\.x is replicated, not sharded"):
        writer.statistical_top_k("layers.0.moments", X, 1.5)


def test_rows_are_made_as_large_as_others_that_are_whole() -> None:
    writer = Writer(X)
    assert writer.as_large("layers.0.sized", X, X, 1e-5) == Value("layers.0.sized", RESIDUAL)
    with pytest.raises(ShardingError, match="unlike axes"):
        writer.as_large("layers.0.y", X, Value("layers.0.other", OTHER), 1e-5)
    with pytest.raises(ShardingError, match="is partial, not replicated"):
        writer.as_large("layers.0.y", PARTIAL, X, 1e-5)


def test_rows_are_multiplied_by_a_number_or_by_one_for_each_element() -> None:
    writer = Writer(X)
    assert writer.times("layers.0.one", X, vector("one", 1)).axis == RESIDUAL
    assert writer.times("layers.0.each", X, W("each", RESIDUAL)).axis == RESIDUAL
    with pytest.raises(ShardingError, match="nor one for each of"):
        writer.times("layers.0.y", X, vector("few", 3))


def test_rows_may_choose_themselves() -> None:
    writer = Writer(X)
    routing = Routing(4, identities=3)
    (weights, numbers), kept = writer.route_and_keep("layers.0.router", X, ROUTER, routing)
    assert (weights.axis.size, numbers.axis.size, kept.axis.size) == (4, 4, 1)
    writer.scaled_rows("layers.0.itself", X, kept, opened=False)
    for wrong, named in (
        (Routing(6, identities=3), "6 of 5 experts"),
        (Routing(4, identities=3, normalised=True), "by a softmax alone"),
        (Routing(4, identities=3, scores="sigmoid"), "by a softmax alone"),
        (Routing(4), "no row can choose itself"),
    ):
        with pytest.raises(ShardingError, match=named):
            Writer(X).route_and_keep("layers.0.router", X, ROUTER, wrong)
    with pytest.raises(ShardingError, match="is not asked for"):
        Writer(X).route("layers.0.router", X, ROUTER, routing)


def test_all_kv_heads_see_what_is_chosen_by_means() -> None:
    chosen = choose_means(Writer(X))
    assert (chosen.axis, chosen.placement) == (key_axis(Heads(12, 4, 8 + 3)), Placement.SHARDED)


def test_gates_may_open_by_themselves() -> None:
    writer = Writer(X)
    for number, activation in enumerate((Activation.GELU_TANH, Activation.SIGMOID, Activation.SILU)):
        opened = writer.gated(f"layers.0.{number}", X, None, activation)
        assert (opened.axis, opened.placement) == (X.axis, X.placement)


def test_streams_are_made_of_a_row_by_what_fits_them() -> None:
    own = Writer(X).match_streams("layers.0.y", OF_STREAMS, Value("layers.0.keys", STREAMS), X)
    assert own == Value("layers.0.y", STREAMS)


def test_streams_are_made_of_a_row_read_and_written_to() -> None:
    writer = Writer(X)
    streams = writer.as_streams("layers.0.streams", STREAMS, X)
    row = writer.read_streams("layers.0.mlp.read", streams, GATES, RESIDUAL)
    after = writer.write_streams(streams, GATES, PARTIAL)
    assert (streams.axis, row.axis, after.axis) == (STREAMS, RESIDUAL, STREAMS)
    assert after.name == "layers.0.mlp.residual"
    assert sums(writer) == [("layers.0.mlp.partial", "layers.0.mlp.reduced")]
    assert [gates(Writer(X), *own).axis.size for own in ((4, 1, 0), (8, 2, 0), (24, 3, 2))] == [4, 8, 24]


def test_streams_have_gates_that_are_the_same_for_all_rows() -> None:
    writer = Writer(X)
    row = Value("layers.0.row", RESIDUAL)
    streams = writer.as_streams("layers.0.streams", STREAMS, X, row, row, X)
    writer.read_streams("layers.0.mlp.read", streams, MEAN, RESIDUAL)
    after = writer.write_streams(streams, (0.0, 1.0, 1.0, 1.0), row, "layers.0.after")
    assert after == Value("layers.0.after", STREAMS)
    assert [each.gates for each in writer.operations[1:]] == [MEAN, (0.0, 1.0, 1.0, 1.0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda writer: writer.as_streams("layers.0.y", Axis(Kind.PLAIN, 100, "streams"), X),
        lambda writer: writer.as_streams("layers.0.y", RESIDUAL, X),
        lambda writer: writer.as_streams("layers.0.y", STREAMS, SHARDED),
        lambda writer: writer.as_streams("layers.0.y", STREAMS, X, X),
        lambda writer: writer.as_streams("layers.0.y", STREAMS, X, X, X, Value("layers.0.other", OTHER)),
        lambda writer: writer.read_streams("layers.0.y", OF_STREAMS, MEAN, OTHER),
        lambda writer: writer.read_streams("layers.0.y", X, MEAN, RESIDUAL),
        lambda writer: writer.read_streams("layers.0.y", OF_STREAMS, MEAN[1:], RESIDUAL),
        lambda writer: writer.read_streams("layers.0.y", OF_STREAMS, Value("few", Axis(Kind.PLAIN, 3, "3")), RESIDUAL),
        lambda writer: writer.read_streams("layers.0.y", Value("partial", STREAMS, Placement.PARTIAL), MEAN, RESIDUAL),
        lambda writer: writer.write_streams(
            OF_STREAMS, Value("read", Axis(Kind.PLAIN, 4, "4")), Value("layers.0.y", RESIDUAL)
        ),
        lambda writer: writer.write_streams(OF_STREAMS, GATES, Value("layers.0.y", OTHER)),
        lambda writer: writer.write_streams(OF_STREAMS, MEAN[1:], Value("layers.0.y", RESIDUAL)),
        lambda writer: writer.match_streams("layers.0.y", OF_STREAMS, X, X),
        lambda writer: writer.match_streams("layers.0.y", OF_STREAMS, OF_STREAMS, Value("layers.0.other", OTHER)),
        lambda writer: writer.match_streams("layers.0.y", OF_STREAMS, OF_STREAMS, PARTIAL),
        lambda writer: gates(writer, logits=23),
        lambda writer: gates(writer, streams=5),
        lambda writer: gates(writer, scale=2),
        lambda writer: gates(writer, rounds=0),
        lambda writer: gates(writer, logits=8, scale=2),
    ],
)
def test_streams_that_do_not_fit_are_refused_by_name(make: Callable[[Writer], object]) -> None:
    with pytest.raises(ShardingError, match=r"layers\.0\.|a replicated value is needed"):
        make(Writer(X))


def test_gates_are_bounded_where_they_open_by_silu_alone() -> None:
    with pytest.raises(ShardingError, match=r"layers\.0\.mlp\.gated: .* is not bounded by \(1\.0, 1\.0\)"):
        gated_mlp(Writer(X), "layers.0.mlp", X, COLUMNS, usual_names("mlp"), Activation.GELU_TANH, (1.0, 1.0))


OWN = W("own", query_axis(Heads(12, 4, 20)), Axis(Kind.PLAIN, 10, "latent"))
UNLIKE = Value("layers.0.unlike", query_axis(Heads(12, 12, 16)), Placement.SHARDED)


def test_heads_are_multiplied_and_joined_by_themselves() -> None:
    writer = Writer(X)
    made = writer.head_linear("layers.0.attention.made", Q, OWN, first=6)
    assert (made.axis.heads, made.placement) == (Heads(12, 4, 20), Placement.SHARDED)
    joined = writer.join("layers.0.attention.joined", Q, made, first=5)
    assert joined.axis == query_axis(Heads(12, 4, 31))


@pytest.mark.parametrize(
    "make",
    [
        lambda writer: writer.head_linear("layers.0.y", Q, OWN, first=7),
        lambda writer: writer.head_linear("layers.0.y", UNLIKE, OWN),
        lambda writer: writer.head_linear("layers.0.y", K, OWN),
        lambda writer: writer.head_linear("layers.0.y", X, OWN),
        lambda writer: writer.join("layers.0.y", Q, K),
        lambda writer: writer.join("layers.0.y", Q, UNLIKE),
        lambda writer: writer.join("layers.0.y", X, X),
    ],
)
def test_heads_that_do_not_belong_together(make: Callable[[Writer], Value]) -> None:
    with pytest.raises(ShardingError, match=r"layers\.0\.y: "):
        make(Writer(X))
