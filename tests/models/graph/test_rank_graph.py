"""The graphs themselves: valid ONNX, runnable by someone else's interpreter, with every weight in its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnx.inliner
import pytest
from onnx.reference import ReferenceEvaluator

from motley.daemon.models.cutting.profile import EXPERT_BYTES, profile
from motley.daemon.models.cutting.share import Share, ShareError
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import EMBEDDING, Model, expected_shapes
from motley.daemon.models.description.operations import Operation, weights_of
from motley.daemon.models.description.operations.experts import Experts, Route
from motley.daemon.models.description.operations.rows import Add, Gated, HeadLinear, Linear, Norm, Sum, Times
from motley.daemon.models.description.operations.streams import StreamGates
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.reading import read_model
from motley.daemon.weights.places import numbered
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.engine import CacheBlocks
from tests.models.cases import (
    GOLDEN,
    KINDS,
    TELLING,
    Case,
    elements_in_files,
    expert_cases,
    golden_case,
    golden_cases,
    others_soak,
    uneven_shares,
    whole_share,
)
from tests.models.cuts import cut as deal

QUANTISED = [case for case in golden_cases() if case.model.hidden % 16 == 0]
SHARED_HEADS = (
    *("k_proj", "v_proj", "k_norm", "k_halves_norm", "k_halves_proj", "k_turned_proj", "k_latent_proj"),
    "indexer.q_proj",
)
"""What several ranks have of a KV head that they share."""
ENCODED = [
    pytest.param(case, quantisation, id=f"{case}-{quantisation}")
    for quantisation in ("fp32", "fp16", "int8", "int4")
    for case in (golden_cases() if quantisation in ("fp32", "fp16") else QUANTISED)
]


def replicated(model: Model) -> set[str]:
    """The tensors that every rank has all of."""
    return set(_replicated(model.head)).union(*(_replicated(layer.operations) for layer in model.layers))


def _replicated(operations: Iterable[Operation], expert: int | None = None) -> Iterator[str]:
    for each in operations:
        for w in weights_of(each):
            if not w.out.cut and not (w.in_ is not None and w.in_.cut):
                yield numbered(w.name, expert)
            if not w.out.cut and w.bias:
                yield numbered(w.bias, expert)
        for number in range(each.count) if isinstance(each, Experts) else ():
            yield from _replicated(each.body, number)


def after_sums(model: Model) -> set[str]:
    """The gains of norms of what was summed over the ranks, which every rank adds to its residual, what that is
    multiplied by, and what its streams are read, written to and mixed by."""
    summed, norms = set[Value](), []
    gates = [each for each in model.operations if isinstance(each, StreamGates)]
    linear = [each for each in model.operations if isinstance(each, Linear)]
    matrices = {y: w.name for each in linear for y, w in zip(each.ys, each.ws, strict=True)}
    streams = {name for each in gates for name in (each.scale.name, each.base.name, matrices[each.logits])}
    for each in model.operations:
        if isinstance(each, Sum) or (isinstance(each, Add) and {each.residual, each.x} <= summed):
            summed.add(each.y)
        elif isinstance(each, Norm) and each.x in summed:
            norms.append(each)
            summed.add(each.y)
    times = {each.w.name for each in model.operations if isinstance(each, Times)}
    return {each.gain.name for each in norms if each.gain} | times | streams


def declare(case: Case, ranks: int, rank: int, quantisation: str = "fp32") -> Declared:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    return build_rank_graph(case.model, shares, rank, quantisation, 32, 64)


def save(declared: Declared, case: Case, folder: Path, proto: onnx.ModelProto | None = None) -> Path:
    """The graph next to its share file, which may be there, as a model that any ONNX tool can open."""
    if not (folder / SHARE_FILE).exists():
        write_share(case.opened.source, declared.weights, declared.share_bytes, folder / SHARE_FILE)
    (folder / "model.onnx").write_bytes((proto or declared.proto).SerializeToString())
    return folder / "model.onnx"


@pytest.mark.parametrize("quantisation", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_graphs_are_valid(quantisation: str, ranks: int, tmp_path: Path) -> None:
    cases = golden_cases() if quantisation == "fp32" else QUANTISED
    every = (quantisation, ranks) == ("fp32", 1)
    for case in cases if every else (case for case in cases if str(case) in KINDS):
        for rank in range(0, ranks, 3):
            declared = declare(case, ranks, rank, quantisation)
            folder = tmp_path / f"{case} {rank}"
            folder.mkdir()
            for proto in (declared.proto, onnx.inliner.inline_local_functions(declared.proto)):
                onnx.checker.check_model(save(declared, case, folder, proto), full_check=True)
                shapes = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
                known = {value.name for value in [*shapes.value_info, *shapes.output]}
                assert {output for node in shapes.node for output in node.output} <= known


def test_a_rank_without_any_unit_has_a_valid_graph(tmp_path: Path) -> None:
    for case in golden_cases():
        whole = whole_share(units(case.model, "fp32", 32))
        nothing = Share(
            1,
            range(whole.attention.stop, whole.attention.stop),
            range(whole.mlp.stop, whole.mlp.stop),
            range(whole.vocabulary.stop, whole.vocabulary.stop),
        )
        declared = build_rank_graph(case.model, [whole, nothing], 1, "fp32", 32, 64)
        wanted = {piece.tensor for place in declared.weights for piece in place.weight.pieces}
        itself = any(isinstance(each, Route) and each.kept is not None for each in case.model.operations)
        multiplies = itself or case.model.beside is not None or case.model.expert_width != case.model.hidden
        multiplies |= case.model.family == "qwen4_exp"  # normed streams, by what says how they are written to
        assert wanted > after_sums(case.model) if multiplies else wanted == after_sums(case.model)
        assert (len(declared.caches), len(declared.words)) == (0, 0)
        folder = tmp_path / str(case)
        folder.mkdir()
        onnx.checker.check_model(save(declared, case, folder), full_check=True)


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_collectives_per_layer(ranks: int) -> None:
    """Also of a rank that is alone, so that its layers can be examined apart."""
    case = golden_case("llama-biases-odd-sizes")
    for rank in range(ranks):
        nodes = declare(case, ranks, rank).proto.graph.node
        collectives = [node for node in nodes if node.op_type == "DistCollective"]
        assert len(collectives) == 2 * len(case.model.layers)
        assert {node.domain for node in collectives} == {"motley"}
        assert _read(collectives[0]) == {
            "collective_operation": b"all_reduce",
            "reduce_op": b"sum",
            "root": -1,
            "group_size": 0,
            "nb_rank": ranks,
        }


def _read(node: onnx.NodeProto) -> dict[str, object]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


@pytest.mark.parametrize("name", sorted(KINDS))
def test_what_is_planned_for_rotary_tables_is_what_they_take(name: str) -> None:
    model = golden_case(name).model
    declared = build_rank_graph(model, [whole_share(units(model, "fp32", 32))], 0, "fp32", 32, 64)
    tables = sum(table.nbytes for table in declared.constants(0).values())
    assert profile(model, "fp32", 32).position_bytes * 64 == tables


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
def test_initializers_are_where_the_weights_will_be(quantisation: str) -> None:
    declared = declare(golden_case("llama-mha"), 2, 0, quantisation)
    stored = {}
    for tensor in declared.proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            where = {entry.key: entry.value for entry in tensor.external_data}
            assert where["location"] == SHARE_FILE
            stored[tensor.name] = (int(where["offset"]), int(where["length"]))
    expected = {}
    for place in declared.weights:
        expected[place.weight.name] = (place.data_offset, place.weight.data_bytes)
        if place.weight.scale_shape:
            expected[f"{place.weight.name}.scale"] = (place.scale_offset, place.weight.scale_bytes)
    assert stored == expected
    for (offset, length), (following, _) in pairwise(sorted(stored.values())):
        assert offset + length <= following


@pytest.mark.parametrize(("case", "quantisation"), ENCODED)
def test_shares_partition_the_checkpoint(case: Case, quantisation: str) -> None:
    """Every element of every cut tensor is on one rank, or on several if it is of a KV head that they share."""
    shapes = expected_shapes(case.model)
    owners: dict[str, npt.NDArray[np.int64]] = {}
    for rank in range(5):
        for place in declare(case, 5, rank, quantisation).weights:
            for piece in place.weight.pieces:
                columns = [piece.columns] if piece.columns is not None else []
                region = np.ix_(*(list(part) for part in (piece.rows, *columns)))
                owners.setdefault(piece.tensor, np.zeros(shapes[piece.tensor], np.int64))[region] += 1
    # Tables are looked up, not multiplied with, unless one is the head.
    names = shapes.keys() - {table.name for table in case.model.tables} | ({EMBEDDING} if case.model.tied else set())
    assert set(owners) == names
    everywhere = replicated(case.model)
    for name, count in owners.items():
        assert count.min() >= 1
        assert count.max() == 1 or name in everywhere or any(part in name for part in SHARED_HEADS)


@pytest.mark.parametrize("case", others_soak(case for case in golden_cases() if not case.recurrent), ids=str)
def test_another_interpreter_computes_the_same(case: Case, tmp_path: Path) -> None:
    """ONNX's own evaluator runs the inlined graph: only standard operators are left, used as their spec has them."""
    declared = build_rank_graph(case.model, [whole_share(units(case.model, "fp32", 32))], 0, "fp32", 32, 64)
    proto = onnx.inliner.inline_local_functions(declared.proto)
    nodes = [other for node in proto.graph.node for other in _in_standard_operators(node)]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    model = onnx.load(save(declared, case, tmp_path, proto))
    evaluator = ReferenceEvaluator(model)
    names = [output.name for output in model.graph.output]
    caches = {
        name: np.zeros((1, spec.heads, 32, spec.head_dim), np.float32)
        for spec in declared.caches
        for name in spec.names
    }
    hidden = case.opened.rows(case.tokens)
    for start, stop in ((0, 12), (12, 13), (13, 20)):
        feeds = {
            "hidden": hidden[start:stop],
            "position": np.array([start]),
            "rows": np.array([stop - start - 1, 0]),
            **declared.constants(case.prompt),
            **caches,
        }
        results = dict(zip(names, evaluator.run(None, feeds), strict=True))
        caches = {name: results[f"{name}.out"] for name in caches}
        expected = case.logits[[stop - 1, start]]
        np.testing.assert_allclose(results["logits"], expected, atol=1e-4 * np.abs(expected).max(), rtol=0)


def _in_standard_operators(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Experts: every one for all rows, weighted by 0 where it was not chosen."""
    make = onnx.helper.make_node
    if node.op_type == "DistCollective":  # a rank's own sum, as it is alone
        yield make("Identity", node.input, node.output)
        return
    if node.op_type != "Experts":
        yield node
        return
    (y,) = node.output
    x, weights, chosen, *base = node.input
    yield make("Sub", [x, x], [f"{y}.0"])
    for number, graph in enumerate(node.attribute[0].graphs):
        at = f"{y}.of.{number}"
        yield make("Identity", [x], [graph.input[0].name])
        yield from graph.node
        yield make("Constant", [], [f"{at}.number"], value_int=number)
        yield make("Equal", [chosen, f"{at}.number"], [f"{at}.picked"])
        yield make("Cast", [f"{at}.picked"], [f"{at}.as_float"], to=onnx.TensorProto.FLOAT)
        yield make("Mul", [weights, f"{at}.as_float"], [f"{at}.weights"])
        yield make("Constant", [], [f"{at}.axis"], value_ints=[1])
        yield make("ReduceSum", [f"{at}.weights", f"{at}.axis"], [f"{at}.weight"], keepdims=1)
        yield make("Mul", [graph.output[0].name, f"{at}.weight"], [f"{at}.weighted"])
        yield make("Add", [f"{y}.{number}", f"{at}.weighted"], [f"{y}.{number + 1}"])
    total = f"{y}.{len(node.attribute[0].graphs)}"
    yield make("Add", [total, *base], [y]) if base else make("Identity", [total], [y])


@pytest.mark.parametrize(("case", "quantisation"), ENCODED)
def test_profile_counts_what_a_share_holds(case: Case, quantisation: str) -> None:
    model = case.changed(vocab_size=64, output_vocab_size=None)  # so that no vocabulary unit is shorter than the others
    told = profile(model, quantisation, 32)
    cut = units(model, quantisation, 32)
    declared = build_rank_graph(model, [whole_share(cut)], 0, quantisation, 32, 64)
    everywhere = replicated(model)
    stored = 0
    norms = 0
    for place in declared.weights:
        size, pieces = place.weight.all_bytes, place.weight.pieces
        whole = [piece for piece in pieces if piece.tensor in everywhere]
        if len(whole) < len(pieces):  # filters of a convolution may be of heads and of what they share, as floats
            size -= (shared := sum(4 * len(piece.rows) * len(piece.columns or "1") for piece in whole))
            stored, norms = stored + size, norms + shared
        else:
            norms += size
    units_cost = (
        told.kv_groups * (told.attention_query_bytes + told.attention_kv_bytes)
        + told.mlp_units * told.mlp_unit_bytes
        + told.vocabulary_units * told.vocabulary_unit_bytes
    )
    shared_heads = told.kv_groups // told.groups_per_shared_head if told.groups_per_shared_head else 0
    units_cost += shared_heads * told.shared_kv_bytes
    uneven = any(width // block % cut.mlp for width, block in cut.mlp_blocks.items())
    assert stored < units_cost if uneven else stored == units_cost
    assert told.fixed_bytes > norms
    a_token = CacheBlocks(1, 1).bytes_of(declared.caches)
    shared = shared_heads * told.shared_cache_bytes_per_token
    assert a_token == told.kv_groups * told.cache_bytes_per_token + shared
    assert (tuple(told.attention_splits), told.mlp_units) == (cut.attention_splits, cut.mlp)
    assert (told.family, told.layers, told.context_length) == (model.family, len(model.layers), model.context)


@pytest.mark.parametrize(("case", "quantisation"), ENCODED)
def test_profile_tells_experts_from_the_rest(case: Case, quantisation: str) -> None:
    model, told = case.model, profile(case.model, quantisation, 32)
    cut, experts = units(model, quantisation, 32), model.experts
    in_units = told.mlp_units * (told.mlp_unit_bytes - told.trunk_mlp_unit_bytes)
    if experts is None:
        assert (in_units, len(told.expert_layers), told.expert_count, told.expert_bytes) == (0, 0, 0, 0)
        assert told.trunk_fixed_bytes == told.fixed_bytes
        return
    assert list(told.expert_layers) == model.expert_layers
    chosen = experts.chosen.axis.size
    assert (told.expert_count, told.experts_per_token, told.hidden) == (experts.count, chosen, model.hidden)
    number = len(told.expert_layers) * experts.count
    whole = number * (told.expert_bytes - EXPERT_BYTES)
    (columns,) = {each.y.axis.size for each in experts.body if isinstance(each, Gated)}
    uneven = columns // cut.mlp_blocks[columns] % cut.mlp
    added = number * sum(4 * w.out.size for each in experts.body for w in weights_of(each) if w.bias and not w.out.cut)
    assert whole < in_units + added if uneven else whole == in_units + added
    assert told.fixed_bytes - told.trunk_fixed_bytes == number * EXPERT_BYTES + added


@pytest.mark.parametrize(
    ("case", "quantisation"), others_soak((each.values for each in ENCODED), TELLING | KINDS), ids=str
)
def test_exact_units_cost_at_most_what_the_profile_says(case: Case, quantisation: str) -> None:
    everywhere = replicated(case.model)
    recurrent = {"linear_num_key_heads": 12, "linear_num_value_heads": 24} if case.recurrent else {}
    if case.folder.name.startswith(("falcon-h1", "granitemoehybrid", "lfm2", "lfm3", "nemotron")):
        recurrent = {"hidden_size": 192, "mamba_d_head": 16, "mamba_n_heads": 24, "mamba_num_heads": 24, "n_groups": 12}
        recurrent["mamba_d_ssm"] = 24 * 16
        recurrent["mamba_n_groups"] = 12 if "dense" in case.folder.name else 1
    one_for_all = any(
        isinstance(each, HeadLinear) for each in case.model.operations
    )  # keys are made for all query heads together
    keys, size = (case.heads.group, None) if one_for_all else (12, case.heads.size)
    queries = case.heads.group * (1 if one_for_all else 12)
    heads = {"num_attention_heads": queries, "num_key_value_heads": keys, "head_dim": size}
    if case.model.family == "minimax_m3":
        heads["index_n_heads"] = keys
    if case.model.family == "step3p5":
        heads["num_sliding_attention_heads"] = 3 * keys
    if case.model.family == "bailing_hybrid":
        heads["head_dim"] = 16  # of its recurrent heads
    if case.model.family == "laguna":
        heads["num_attention_heads_per_layer"] = [each.heads.group * keys for each in case.attentions]
    model = case.changed(vocab_size=64, output_vocab_size=None, **heads, **recurrent)
    told = profile(model, quantisation, 32, exact=True)
    cut = units(model, quantisation, 32, exact=True)
    counts = (cut.kv_groups, cut.mlp, cut.vocabulary)
    group = told.attention_query_bytes + told.attention_kv_bytes + told.shared_kv_bytes
    costs = (group, told.mlp_unit_bytes, told.vocabulary_unit_bytes)
    for kind, cost in enumerate(costs):
        sizes = []
        for unit in range(counts[kind]):  # of rank 1, which has nothing else
            dealt = [
                (unit, 1, count - unit - 1) if kind == other else (count, 0, 0) for other, count in enumerate(counts)
            ]
            shares = [Share(1, *own) for own in zip(*map(deal, dealt), strict=True)]
            declared = build_rank_graph(model, shares, 1, quantisation, 32, 64, exact=True)
            matrices = [place.weight for place in declared.weights if len(place.weight.shape) == 2]
            weights = [weight for weight in matrices if weight.pieces[0].tensor not in everywhere]
            sizes.append(sum(weight.all_bytes for weight in weights))
            held = CacheBlocks(1, 1).bytes_of(declared.caches)
            assert held <= told.cache_bytes_per_token + told.shared_cache_bytes_per_token
        vectors = 4 * len(model.layers) * (model.hidden + max(cut.mlp_blocks)) * 4
        assert cost - vectors <= max(sizes) <= cost


@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_profile_counts_parameters(case: Case) -> None:
    assert profile(case.model, "fp32", 32).parameters == elements_in_files(case)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("case", others_soak(expert_cases(), TELLING | KINDS), ids=str)
def test_exact_experts_have_valid_graphs(case: Case, elsewhere: bool, tmp_path: Path) -> None:
    """And every rank meets the same gatherings: per layer of attention, its squares if they are needed, and an MLP."""
    cut = units(case.model, "fp32", 32, exact=True)
    for ranks in (1, 3, 8):
        met = []
        for rank in range(ranks):
            shares = uneven_shares(cut, ranks)
            declared = build_rank_graph(
                case.model, shares, rank, "fp32", 32, 64, exact=True, experts_elsewhere=elsewhere
            )
            proto = onnx.inliner.inline_local_functions(declared.proto)
            folder = tmp_path / f"{rank} of {ranks}"
            folder.mkdir()
            onnx.checker.check_model(save(declared, case, folder, proto), full_check=True)
            shapes = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
            known = [value.name for value in [*shapes.value_info, *shapes.output]]
            assert {output for node in shapes.node for output in node.output} <= set(known)
            gatherings = [node for node in proto.graph.node if node.op_type == "DistCollective"]
            met.append([(node.name, list(node.output), _read(node)) for node in gatherings])
        assert all(each == met[0] for each in met)
        assert len(met[0]) == case.collectives(exact=True, elsewhere=elsewhere)


def test_impossible_requests_are_refused() -> None:
    model = read_model(GOLDEN / "llama-mha")
    whole = whole_share(units(model, "fp32", 32))
    with pytest.raises(ConfigError, match="context of 129 tokens"):
        build_rank_graph(model, [whole], 0, "fp32", 32, 129)
    with pytest.raises(ConfigError, match="context of 0 tokens"):
        build_rank_graph(model, [whole], 0, "fp32", 32, 0)
    with pytest.raises(ShareError, match="the model has 4"):
        build_rank_graph(model, [Share(1, range(3), whole.mlp, whole.vocabulary)], 0, "fp32", 32, 64)
