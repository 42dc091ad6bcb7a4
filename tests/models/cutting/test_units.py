"""Units and blocks of arbitrary models, and shares that do not tile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.cutting.share import Share, ShareError, kv_heads
from motley.daemon.models.cutting.units import LEAVES, Units, fused_matrices, units, validate_shares
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import Model
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import Format
from motley.protocol import BLOCKS
from tests.models.cases import shaped
from tests.models.cuts import apportion, cut
from tests.models.hand_made import SHAPE, of_blocks

TINYLLAMA = shaped()


def small(**changes: Any) -> Model:
    """A model of the bundled one's shape, but for some keys of its config."""
    keys = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 1024,
    }
    return shaped(**(keys | {"head_dim": 32} | changes))


SHAKESPEARE = small()

QUERY, OUTPUT = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qo")
DOWN = "model.layers.0.mlp.down_proj.weight"


@dataclass(frozen=True)
class Sizes:
    """Of a model with one kind of layer."""

    heads: Heads
    hidden: int
    columns: int
    vocabulary: int

    @property
    def model(self) -> Model:
        return shaped(
            num_hidden_layers=2,
            hidden_size=self.hidden,
            intermediate_size=self.columns,
            num_attention_heads=self.heads.queries,
            num_key_value_heads=self.heads.keys,
            head_dim=self.heads.size,
            vocab_size=self.vocabulary,
        )

    @property
    def widths(self) -> tuple[int, int, int]:
        """What blocks must divide: inner dimensions, and what a KV group has of the output projection's."""
        return self.hidden, self.columns, self.heads.group * self.heads.size


sizes = st.builds(
    Sizes,
    heads=st.builds(
        lambda keys, group, half: Heads(keys * group, keys, 2 * half),
        st.integers(1, 12),
        st.integers(1, 12),
        st.integers(1, 128),
    ),
    hidden=st.integers(1, 8192),
    columns=st.integers(1, 16384),
    vocabulary=st.integers(1, 200000),
)


@given(sizes, st.sampled_from(["fp32", "fp16", "int8", "int4"]), st.sampled_from(BLOCKS))
def test_units_tile_the_model_and_blocks_fit_every_cut(of: Sizes, quantisation: str, block: int) -> None:
    if quantisation not in ("fp32", "fp16") and any(width % BLOCKS[0] for width in of.widths):
        with pytest.raises(ConfigError, match=f"{quantisation} needs"):
            units(of.model, quantisation, block)
        return
    cut, heads = units(of.model, quantisation, block), of.heads
    if quantisation == "fp16":  # whatever a rank holds it in
        assert replace(cut, held={}) == replace(units(of.model, "fp32", block), held={})
    columns = cut.mlp_blocks[of.columns]
    assert cut.mlp * columns == of.columns
    assert (cut.vocabulary - 1) * cut.vocabulary_rows < of.vocabulary <= cut.vocabulary * cut.vocabulary_rows
    assert (cut.kv_groups, cut.attention_splits[0]) == (heads.keys, 1)
    assert list(cut.attention_splits) == sorted(set(cut.attention_splits))
    assert all(heads.group % split == 0 for split in cut.attention_splits)
    if quantisation not in ("fp32", "fp16"):
        assert {form.block for form in cut.held.values()} <= {size for size in BLOCKS if size <= block}
        assert of.hidden % cut.held[QUERY].block == of.hidden % cut.held["lm_head.weight"].block == 0
        assert columns % cut.held[DOWN].block == 0
        for split in cut.attention_splits:
            assert heads.group // split * heads.size % cut.held[OUTPUT].block == 0


mixes = st.lists(st.sampled_from(["fp32", "fp16", "int8", "int4", "stored"]), min_size=1, max_size=4)


@given(sizes, mixes, st.sampled_from(BLOCKS))
def test_ranks_of_any_quantisations_have_the_same_units_and_none_cuts_a_block(
    of: Sizes, quantisations: list[str], block: int
) -> None:
    try:
        cuts = [units(of.model, own, block, beside=quantisations) for own in quantisations]
        alone = [units(of.model, own, block) for own in quantisations]
    except ConfigError:
        assert any(width % BLOCKS[0] for width in of.widths)
        return
    assert all(replace(cut, held={}) == replace(cuts[0], held={}) for cut in cuts)
    coarsest = min(alone, key=lambda own: (own.mlp, len(own.attention_splits)))
    if set(quantisations) - {"fp32", "fp16"}:
        coarsest = next(own for own, name in zip(alone, quantisations, strict=True) if name not in ("fp32", "fp16"))
    assert replace(cuts[0], held={}) == replace(coarsest, held={})
    for own in cuts:
        columns, down, output = own.mlp_blocks[of.columns], own.held[DOWN].block, own.held[OUTPUT].block
        assert not down or columns % down == 0
        for split in own.attention_splits:
            assert not output or of.heads.group // split * of.heads.size % output == 0


def test_exact_units_are_of_one_quantisation() -> None:
    assert units(TINYLLAMA, "int4", 32, exact=True, beside=["int4"]) == units(TINYLLAMA, "int4", 32, exact=True)
    with pytest.raises(ConfigError, match="exact=true needs one quantisation on all ranks, not int4 and int8"):
        units(TINYLLAMA, "int4", 32, exact=True, beside=["int8"])


def test_blocks_that_may_not_be_parted_in_one_quantisation_are_whole_in_all() -> None:
    """Of GPTQ's int4 with zero points of their own two blocks stay together, where other ranks hold floats or int8."""
    narrow = small(head_dim=16)
    names = [name for _, own in fused_matrices(narrow) for name in own if name != "lm_head.weight"]
    stored = dict.fromkeys(names, Format(Encoding.INT4, 32, zeros=True, called="GPTQ int4"))
    own = units(narrow, "stored", 32, stored)
    assert own.attention_splits == (1,)
    for quantisation in ("fp32", "int8"):
        assert units(narrow, quantisation, 32, stored).attention_splits == (1, 2)
        assert replace(units(narrow, quantisation, 32, stored, beside=["stored"]), held={}) == replace(own, held={})


def test_units_are_fine_enough_for_uneven_shares() -> None:
    assert units(TINYLLAMA, "int4", 32).mlp == 44
    assert units(TINYLLAMA, "int4", 128).mlp_blocks == {5632: 128}
    assert units(TINYLLAMA, "int4", 128).held[OUTPUT].block == 64
    assert units(TINYLLAMA, "int4", 256).held[DOWN].block == 128
    small = units(SHAKESPEARE, "int4", 128)
    assert (small.mlp, small.held[DOWN].block) == (16, 32)
    assert (units(SHAKESPEARE, "fp32", 32).mlp, units(SHAKESPEARE, "fp32", 32).mlp_blocks) == (32, {512: 16})
    assert (units(SHAKESPEARE, "int4", 32).mlp, units(SHAKESPEARE, "int4", 32).mlp_blocks) == (16, {512: 32})
    assert units(SHAKESPEARE, "int4", 32).vocabulary == 32


@given(sizes, st.sampled_from(["fp32", "int4"]))
def test_exact_units_are_few_and_tile_heads_and_columns(of: Sizes, quantisation: str) -> None:
    try:
        plain = units(of.model, quantisation, 32)
    except ConfigError:
        return
    cut = units(of.model, quantisation, 32, exact=True)
    finest = cut.attention_splits[-1]
    assert cut.kv_groups * finest <= LEAVES or (finest == 1 and cut.kv_groups == of.heads.keys)
    assert all(finest % split == 0 and split in plain.attention_splits for split in cut.attention_splits)
    assert 1 <= cut.mlp <= LEAVES
    assert cut.vocabulary_rows % 16 == 0
    for units_ in (plain, cut):
        for split in units_.attention_splits:
            heads = [
                units_.query_heads(range(unit, unit + 1), split, of.heads) for unit in range(units_.kv_groups * split)
            ]
            assert [head for own in heads for head in own] == list(range(of.heads.queries))
            assert all(heads)
        groups = [units_.query_heads(range(group, group + 1), 1, of.heads) for group in range(units_.kv_groups)]
        assert [key for own in groups for key, _ in kv_heads(own, of.heads)] == list(range(of.heads.keys))
        columns = [units_.columns(range(unit, unit + 1), of.columns) for unit in range(units_.mlp)]
        assert [column for own in columns for column in own] == list(range(of.columns))
        assert all(len(own) and own.start % units_.mlp_blocks[of.columns] == 0 for own in columns)


def of_heads(*heads: Heads) -> Model:
    """A layer of each kind of heads."""
    return of_blocks(
        lambda writer, number, x: attention(writer, SHAPE, number, x, heads=heads[number], rope=None),
        shape=replace(SHAPE, layers=len(heads)),
    )


keys_alike = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
halves_of_heads = st.sampled_from([4, 8, 16, 24])


@given(keys_alike, halves_of_heads, halves_of_heads, st.booleans(), st.sampled_from(["fp32", "int8"]))
def test_layers_of_unlike_heads_are_cut_alike(
    counts: tuple[int, int, int, int], one: int, other: int, exact: bool, quantisation: str
) -> None:
    """Every unit has some query heads of each layer, and no cut parts a block of what they multiply with."""
    fewer, times, group, more = counts
    most = fewer * times
    layers = Heads(most * group, most, 2 * one), Heads(most * more, fewer, 2 * other)
    model = of_heads(*layers)
    try:
        cut = units(model, quantisation, 16, exact=exact)
    except ConfigError:
        assert quantisation == "int8"
        assert any(heads.queries // most * heads.size % 16 for heads in layers)
        return
    for number, heads in enumerate(layers):
        block = max(1, cut.held[f"model.layers.{number}.self_attn.o_proj.weight"].block)
        for split in cut.attention_splits:
            own = [cut.query_heads(range(unit, unit + 1), split, heads) for unit in range(cut.kv_groups * split)]
            assert [head for each in own for head in each] == list(range(heads.queries))
            assert all(own)
            assert all(each.start * heads.size % block == 0 for each in own)


def test_layers_that_cannot_be_cut_alike_are_named() -> None:
    with pytest.raises(ConfigError, match=r"layers of 3 and of 2 KV heads \(with 6 query heads\) cannot be cut alike"):
        units(of_heads(Heads(6, 3, 16), Heads(6, 2, 16)), "fp32", 32)


@given(st.integers(1, 120), st.integers(1, 400), st.integers(1, 400), st.sampled_from(["fp32", "int8", "int4"]))
def test_mlps_of_all_widths_have_the_same_units(expert: int, shared: int, mlp: int, quantisation: str) -> None:
    """Every unit has some columns of each, in whole blocks."""
    model = shaped(
        model_type="qwen2_moe",
        num_hidden_layers=2,
        mlp_only_layers=[1],
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=16 * expert,
        shared_expert_intermediate_size=16 * shared,
        intermediate_size=16 * mlp,
    )
    cut = units(model, quantisation, 128)
    downs = {
        16 * expert: "model.layers.0.mlp.experts.2.down_proj.weight",
        16 * shared: "model.layers.0.mlp.shared_expert.down_proj.weight",
        16 * mlp: "model.layers.1.mlp.down_proj.weight",
    }
    assert set(cut.mlp_blocks) == set(downs)
    assert not {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.shared_expert_gate.weight"} & set(cut.held)
    for width, down in downs.items():
        columns = [cut.columns(range(unit, unit + 1), width) for unit in range(cut.mlp)]
        assert [column for own in columns for column in own] == list(range(width))
        assert all(columns)
        if quantisation != "fp32":
            assert all(own.start % cut.held[down].block == 0 for own in columns)


def test_leaves_of_a_known_model() -> None:
    cut = units(TINYLLAMA, "int4", 32, exact=True)
    assert (cut.kv_groups, cut.attention_splits, cut.mlp) == (4, (1, 2), 8)
    assert cut.columns(range(4), 5632) == range(2816)  # two even ranks
    many = shaped(num_attention_heads=40, num_key_value_heads=40, head_dim=64)
    cut = units(many, "int4", 32, exact=True)
    assert (cut.kv_groups, cut.attention_splits) == (8, (1,))
    assert cut.query_heads(range(1, 2), 1, Heads(40, 40, 64)) == range(5, 10)


def test_blocks_are_the_same_in_exact_mode() -> None:
    """A leaf may be a run of KV heads; cuts still fall between any two of them."""
    many = shaped(num_attention_heads=12 * 8, num_key_value_heads=12, head_dim=10)
    assert units(many, "int4", 32, exact=True).kv_groups == 8
    assert units(many, "int4", 32, exact=True).held == units(many, "int4", 32).held


@pytest.mark.parametrize(("width", "leaves"), [(48, 2), (384, 3), (768, 6), (14336, 8)])
def test_leaves_of_experts_are_not_narrow(width: int, leaves: int) -> None:
    mixture = shaped(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, intermediate_size=width)
    assert units(mixture, "int4", 128, exact=True).mlp == leaves


def test_splits_that_would_cut_a_block_are_left_out() -> None:
    narrow = small(num_attention_heads=12, num_key_value_heads=2, head_dim=8)
    assert units(narrow, "fp32", 32).attention_splits == (1, 2, 3, 6)
    assert units(narrow, "int4", 32).attention_splits == (1, 3)
    assert units(narrow, "int4", 32).held[OUTPUT].block == 16


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"hidden_size": 200}, "hidden_size"),
        ({"intermediate_size": 44}, "intermediate_size"),
        ({"head_dim": 20}, "head_dim"),
    ],
)
def test_widths_that_no_block_divides_are_named(change: dict[str, int], name: str) -> None:
    odd = small(**change)
    units(odd, "fp32", 32)
    with pytest.raises(ConfigError, match=f"int4 needs .*{name}.* multiple of 16"):
        units(odd, "int4", 32)


@pytest.mark.parametrize(("quantisation", "block"), [("int3", 32), ("int4", 0), ("int4", 48), ("int8", 512)])
def test_impossible_encodings_are_refused(quantisation: str, block: int) -> None:
    with pytest.raises(ConfigError, match="supported"):
        units(SHAKESPEARE, quantisation, block)


weights = st.lists(st.floats(0, 1e3), min_size=3, max_size=3).filter(lambda values: sum(values) > 0)


@given(sizes, weights, weights, weights)
def test_whatever_is_cut_from_units_is_valid(
    of: Sizes, attention: list[float], mlp: list[float], words: list[float]
) -> None:
    whole = units(of.model, "fp32", 32)
    for split in whole.attention_splits:
        ranges = zip(
            cut(apportion(whole.kv_groups * split, attention)),
            cut(apportion(whole.mlp, mlp)),
            cut(apportion(whole.vocabulary, words)),
            strict=True,
        )
        validate_shares(whole, [Share(split, *own) for own in ranges])


WHOLE = units(SHAKESPEARE, "fp32", 32)


def halves(units: Units) -> list[Share]:
    return [
        Share(1, range(2), range(20), range(16)),
        Share(1, range(2, units.kv_groups), range(20, units.mlp), range(16, units.vocabulary)),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_split": 2}, "rank 1 splits KV groups by 2, rank 0 by 1"),
        ({"attention": range(1, 3)}, "attention units of rank 0 stop at 2, those of rank 1 start at 1"),
        ({"attention": range(2, 4)}, "attention units of the last rank stop at 4; the model has 3"),
        ({"mlp": range(21, 32)}, "mlp units of rank 0 stop at 20, those of rank 1 start at 21"),
        ({"mlp": range(20, 18)}, "mlp units of rank 1 are no range"),
        ({"mlp": range(20, 32, 2)}, "mlp units of rank 1 are no range"),
        ({"vocabulary": range(16, 31)}, "vocabulary units of the last rank stop at 31; the model has 32"),
    ],
)
def test_shares_that_do_not_tile_are_refused(change: dict[str, object], message: str) -> None:
    first, second = halves(WHOLE)
    validate_shares(WHOLE, [first, second])
    with pytest.raises(ShareError, match=message):
        validate_shares(WHOLE, [first, replace(second, **change)])  # type: ignore[arg-type]


def test_the_first_rank_starts_at_the_beginning() -> None:
    with pytest.raises(ShareError, match="attention units of rank 0 start at 2"):
        validate_shares(WHOLE, halves(WHOLE)[1:])


def test_no_rank_and_impossible_splits_are_refused() -> None:
    with pytest.raises(ShareError, match="at least one rank"):
        validate_shares(WHOLE, [])
    with pytest.raises(ShareError, match="attention split 3 is not possible for this model; possible: 1, 2"):
        validate_shares(WHOLE, [replace(halves(WHOLE)[0], attention_split=3)])
