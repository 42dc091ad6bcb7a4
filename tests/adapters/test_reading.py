"""Reading adapters: each tensor is checked against the model, and what does not fit is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from motley.daemon.adapters.reading import WEIGHTS, read_adapter
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.plugins.adapted_engine import AdapterProduct
from tests.adapters.adapted import matrices, random_adapter, write_adapter
from tests.models.cases import golden_case

LLAMA, PHI = golden_case("llama-mha").model, golden_case("phi3").model
PREFIX = "base_model.model.model.layers.0"
Tensors = dict[str, Any]


def test_an_adapter_of_all_matrices(tmp_path: Path) -> None:
    adapter = random_adapter(tmp_path, LLAMA, seed=0, rank=3)
    assert {*adapter.products} == {w.name for w in matrices(LLAMA)}
    for w in matrices(LLAMA):
        assert w.in_ is not None
        down, up = adapter.products[w.name]
        assert (down.shape, up.shape) == ((3, w.in_.size), (w.out.size, 3))
    assert adapter.ranks == (3,)
    assert adapter.bytes == sum(own.down.nbytes + own.up.nbytes for own in adapter.products.values())


def test_equal_adapters_have_equal_fingerprints(tmp_path: Path) -> None:
    first, same = (random_adapter(tmp_path / name, LLAMA, seed=0).fingerprint for name in "ab")
    others = [
        random_adapter(tmp_path / "c", LLAMA, seed=1).fingerprint,
        random_adapter(tmp_path / "d", LLAMA, seed=0, lora_alpha=3).fingerprint,
    ]
    assert first == same
    assert len({first, *others}) == 3


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("alpha", "exact"), [(8, True), (2, True), (3, False)])
def test_matrices_stay_narrow_if_that_is_exact(kind: type, alpha: int, exact: bool, tmp_path: Path) -> None:
    """A scale that is a power of two rounds nothing."""
    adapter = random_adapter(tmp_path, LLAMA, seed=0, dtype=kind, lora_alpha=alpha)
    (wide,) = {own.up.dtype for own in adapter.products.values()}
    assert wide == (np.dtype(kind) if exact else np.float32)
    unscaled = random_adapter(tmp_path / "unscaled", LLAMA, seed=0, dtype=kind, lora_alpha=4)
    for name, (down, up) in adapter.products.items():
        assert down.dtype == kind
        np.testing.assert_array_equal(
            up.astype(np.float32), unscaled.products[name].up.astype(np.float32) * np.float32(alpha / 4)
        )


def test_a_fused_matrix_is_cut_by_the_matrices_in_it(tmp_path: Path) -> None:
    """One A for queries, keys and values, and a B each."""
    random = np.random.default_rng(0)
    whole = {w.name: w.out.size for w in matrices(PHI)}
    heights = {
        module: [size for name, size in whole.items() if f"layers.1.{inside}" in name and letters(name)]
        for module, inside, letters in (
            ("self_attn.qkv_proj", "self_attn.", lambda name: "o_proj" not in name),
            ("mlp.gate_up_proj", "mlp.", lambda name: "down_proj" not in name),
        )
    }
    ups = {module: random.normal(size=(sum(sizes), 2)).astype(np.float32) for module, sizes in heights.items()}

    def fuse(tensors: Tensors) -> None:
        tensors.clear()
        for module, up in ups.items():
            name = f"base_model.model.model.layers.1.{module}"
            tensors[f"{name}.lora_A.weight"] = np.full((2, PHI.hidden), 3, np.float32)
            tensors[f"{name}.lora_B.weight"] = up

    adapter = random_adapter(tmp_path, PHI, seed=0, rank=2, lora_alpha=2, change=fuse, layers_to_transform=[1])
    products = {name.removeprefix("model.layers.1."): own for name, own in adapter.products.items()}
    assert {*products} == {
        *(f"self_attn.{letter}_proj.weight" for letter in "qkv"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up")),
    }
    for module, inside in (("self_attn.qkv_proj", "self_attn"), ("mlp.gate_up_proj", "mlp")):
        own = [product.up for name, product in products.items() if name.startswith(inside)]
        assert [len(up) for up in own] == heights[module]
        np.testing.assert_array_equal(np.concatenate(own), ups[module])
    assert adapter.bytes == sum(up.nbytes + 2 * PHI.hidden * 4 for up in ups.values())


def without(ending: str) -> Callable[[Tensors], None]:
    """Leaves out a tensor of the first layer."""

    def change(tensors: Tensors) -> None:
        del tensors[f"{PREFIX}.{ending}"]

    return change


def put(name: str, *shape: int, value: float = 1.0, kind: type = np.float32) -> Callable[[Tensors], None]:
    """Adds a tensor, or replaces it."""

    def change(tensors: Tensors) -> None:
        tensors[name] = np.full(shape, value, kind)

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without("self_attn.q_proj.lora_A.weight"), r"layers\.0\.self_attn\.q_proj\.lora_A\.weight' is absent"),
        (without("self_attn.q_proj.lora_B.weight"), r"layers\.0\.self_attn\.q_proj\.lora_B\.weight' is absent"),
        (
            put(f"{PREFIX}.mlp.up_proj.lora_A.weight", 3, LLAMA.hidden),
            "of 'model.layers.0.mlp.up_proj' do not fit each other: A has rank 3, B has rank 4",
        ),
        (put(f"{PREFIX}.mlp.up_proj.lora_A.weight", 4, 63), r"up_proj\.lora_A.* has shape \[4, 63\]"),
        (put(f"{PREFIX}.mlp.up_proj.lora_B.weight", 5, 4), r"up_proj\.lora_B.* has shape \[5, 4\]; the model"),
        (put(f"{PREFIX}.mlp.up_proj.lora_A.weight", 4, LLAMA.hidden, value=np.nan), "lora_A.* no finite numbers"),
        (put(f"{PREFIX}.mlp.up_proj.lora_A.weight", 4, LLAMA.hidden, kind=np.int8), "is I8; supported: F32"),
        (put(f"{PREFIX}.self_attn.q_proj.lora_magnitude_vector", 32), "lora_magnitude_vector' is no matrix of LoRA"),
        (put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 32), "lora_embedding_B' is absent"),
        (put("base_model.model.model.embed_tokens.lora_A.weight", 4, 32), "lora_embedding_A' is absent"),
        (put(f"{PREFIX}.mlp.up_proj.base_layer.weight", 4, 4), r"base_layer\.weight' is whole; of an adapter, only"),
        (put("base_model.model.lm_head.weight", 9, 9), r"lm_head\.weight' is not among what .* \(modules_to_save\)"),
        (put(f"{PREFIX}.input_layernorm.weight", 64), r"input_layernorm\.weight' is whole; of an adapter, only those"),
        (put("base_model.model.lm_head.lora_A.weight", 4, 64), r"lm_head\.lora_B\.weight' is absent"),
        (put("base_model.model.model.layers.99.mlp.up_proj.lora_A.weight", 4, 32), "no such matrix in its layers"),
        (put("base_model.model.model.layers.0.mlp.experts.0.lora_A.weight", 4, 32), "no such matrix in its layers"),
    ],
)
def test_tensors_that_do_not_fit(change: Callable[[Tensors], None], told: str, tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, seed=0, change=change)
    with pytest.raises(CheckpointError, match=told):
        read_adapter(tmp_path, LLAMA)


def test_whole_tables(tmp_path: Path) -> None:
    """They are kept as they are, and count."""
    plain = random_adapter(tmp_path / "plain", LLAMA, seed=0, dtype=np.float16)
    both = random_adapter(tmp_path / "both", LLAMA, 0, dtype=np.float16, whole=("model.embed_tokens", "lm_head"))
    head = random_adapter(tmp_path / "head", LLAMA, 0, dtype=np.float16, whole=("lm_head",))
    assert both.embedding is not None
    assert (head.embedding, [*head.whole], [*both.whole]) == (None, ["lm_head.weight"], ["lm_head.weight"])
    assert both.embedding.shape == head.whole["lm_head.weight"].shape == LLAMA.embedding.shape
    assert [each.bytes - plain.bytes for each in (head, both)] == [both.embedding.nbytes, 2 * both.embedding.nbytes]
    assert {*both.products} == {*plain.products}


def test_what_is_added_to_embeddings(tmp_path: Path) -> None:
    """Its scale and rank are as those of other matrices, and it counts."""
    plain = random_adapter(tmp_path / "plain", LLAMA, seed=0)
    adapter = random_adapter(tmp_path / "rows", LLAMA, seed=0, rows=True, rank_pattern={"embed_tokens": 4})
    tensors = load_file(tmp_path / "rows" / WEIGHTS)
    assert isinstance(adapter.embedding, AdapterProduct)
    a, b = (tensors[f"base_model.model.model.embed_tokens.lora_embedding_{side}"] for side in "AB")
    np.testing.assert_array_equal(adapter.embedding.down, a)
    np.testing.assert_array_equal(adapter.embedding.up, 2 * b)
    assert {*adapter.products} == {*plain.products}
    assert adapter.bytes - plain.bytes == a.nbytes + b.nbytes
    write_adapter(tmp_path / "half", LLAMA, seed=0, target_modules=["embed_tokens", "q_proj"], only=["q_proj"])
    with pytest.raises(CheckpointError, match=r"embed_tokens\.lora_embedding_A' is absent, which"):
        read_adapter(tmp_path / "half", LLAMA)
    random_adapter(tmp_path / "all", LLAMA, seed=0, target_modules="all-linear")  # of which embeddings are none
    write_adapter(tmp_path / "both", LLAMA, seed=0, rows=True, whole=["model.embed_tokens"])
    with pytest.raises(CheckpointError, match="the embeddings are whole, and LoRA's"):
        read_adapter(tmp_path / "both", LLAMA)


def test_tables_that_were_saved_with_what_is_added_to_them(tmp_path: Path) -> None:
    """As PEFT does by itself: they take the place of the model's, as it has them do."""
    bases = {
        name: np.random.default_rng(1).normal(size=LLAMA.embedding.shape).astype(np.float32)
        for name in ("model.embed_tokens", "lm_head")
    }

    def save(tensors: Tensors) -> None:
        tensors |= {f"base_model.model.{name}.base_layer.weight": base for name, base in bases.items()}

    added = random_adapter(tmp_path / "added", LLAMA, 0, rows=True, head=True)
    whole = random_adapter(tmp_path / "whole", LLAMA, 0, rows=True, head=True, change=save)
    rows, head = added.embedding, added.products["lm_head.weight"]
    assert isinstance(rows, AdapterProduct)
    np.testing.assert_allclose(whole.embedding, bases["model.embed_tokens"] + (rows.up @ rows.down).T, atol=1e-5)
    np.testing.assert_allclose(whole.whole["lm_head.weight"], bases["lm_head"] + head.up @ head.down, atol=1e-5)
    assert added.products.keys() - whole.products.keys() == {"lm_head.weight"}
    write_adapter(tmp_path / "alone", LLAMA, 0, change=save)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.base_layer\.weight' is not among what .* targets"):
        read_adapter(tmp_path / "alone", LLAMA)


def test_tied_tables_are_replaced_together_only_where_peft_ties_them(tmp_path: Path) -> None:
    model = golden_case("llama-mqa").model
    assert model.tied
    for name, ties in (("own", False), ("both", True)):
        for module in ("model.embed_tokens", "lm_head"):
            place = tmp_path / f"{name} {module}"
            adapter = random_adapter(place, model, 0, whole=(module,), ensure_weight_tying=ties)
            replaced = adapter.embedding is not None, model.embedding.name in adapter.whole
            assert replaced == ((True, True) if ties else (module != "lm_head", module == "lm_head"))


@pytest.mark.parametrize(
    ("whole", "saved", "change", "told"),
    [
        ((), ["lm_head"], dict, "no matrix for 'lm_head', which adapter_config.json saves as a whole"),
        ((), ["score"], dict, "saves 'score' as a whole; only model.embed_tokens and lm_head may be"),
        (("lm_head",), ["embed_tokens", "lm_head"], dict, "no matrix for 'embed_tokens'"),
        (
            ("lm_head",),
            ["lm_head"],
            put("base_model.model.lm_head.weight", 9, 9),
            r"lm_head\.weight' has shape \[9, 9\]; the model's is \[\d+, 64\]",
        ),
        (
            ("model.embed_tokens",),
            ["embed_tokens"],
            put("base_model.model.model.embed_tokens.weight", *LLAMA.embedding.shape, value=np.inf),
            r"embed_tokens\.weight' has values that are no finite numbers",
        ),
        (("lm_head",), ["lm_head"], put("base_model.model.lm_head.lora_A.weight", 4, 64), "lora_B.weight' is absent"),
    ],
)
def test_whole_tables_that_do_not_fit(
    whole: tuple[str, ...], saved: list[str], change: Callable[[Tensors], None], told: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, LLAMA, 0, whole=whole, change=change, modules_to_save=saved)
    with pytest.raises(CheckpointError, match=told):
        read_adapter(tmp_path, LLAMA)


def test_the_tables_of_a_model_that_is_a_part_of_a_larger_one(tmp_path: Path) -> None:
    model = golden_case("gemma3-with-vision").model
    prefix = next(each for each in model.prefixes if each != "model.")
    name = f"{prefix}embed_tokens"

    def rename(tensors: Tensors) -> None:
        tensors[f"base_model.model.{name}.weight"] = tensors.pop("base_model.model.model.embed_tokens.weight")

    for saved in ("embed_tokens", name):
        folder = write_adapter(
            tmp_path / saved, model, 0, whole=("model.embed_tokens",), change=rename, modules_to_save=[saved]
        )
        assert read_adapter(folder, model).embedding is not None
    write_adapter(tmp_path / "none", model, 0, modules_to_save=[name])
    with pytest.raises(CheckpointError, match="has no matrix for"):
        read_adapter(tmp_path / "none", model)


def test_a_head_with_both_kinds_of_matrices(tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, 0, whole=("lm_head",), head=True)
    with pytest.raises(CheckpointError, match=r"a whole matrix, and LoRA's for 'lm_head\.weight' besides"):
        read_adapter(tmp_path, LLAMA)


def test_a_module_that_is_not_targeted(tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, seed=0, exclude_modules=["up_proj"])
    with pytest.raises(CheckpointError, match=r"up_proj.* is not among what adapter_config\.json targets"):
        read_adapter(tmp_path, LLAMA)


def test_a_layer_that_is_missing(tmp_path: Path) -> None:
    """Half an adapter would change texts without a word."""

    def cut(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    write_adapter(tmp_path, LLAMA, seed=0, change=cut, only=("q_proj",))
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.q_proj.* is absent, which adapter_config"):
        read_adapter(tmp_path, LLAMA)
    write_adapter(tmp_path, LLAMA, seed=0, change=cut, only=("q_proj",), layers_to_transform=[0])
    assert len(read_adapter(tmp_path, LLAMA).products) == 1


def test_targets_that_the_base_does_not_have(tmp_path: Path) -> None:
    """As of lists that are made for any family."""
    names = ["q_proj", "c_attn", "W_pack", "qkv_proj", "gate_up_proj"]
    write_adapter(tmp_path, LLAMA, seed=0, only=("q_proj",), target_modules=names)
    assert len(read_adapter(tmp_path, LLAMA).products) == len(LLAMA.layers)


def test_an_adapter_of_another_model(tmp_path: Path) -> None:
    write_adapter(tmp_path / "near", golden_case("qwen3").model, seed=0)
    with pytest.raises(CheckpointError, match=r"has shape .*; the model and the config make it") as told:
        read_adapter(tmp_path / "near", LLAMA)
    assert "another model" not in str(told.value), "some of its matrices fit"
    write_adapter(tmp_path / "far", golden_case("llama-mqa").model, seed=0)
    with pytest.raises(CheckpointError, match=r"(?s)is an adapter of another model: .*\(llama\).*has shape"):
        read_adapter(tmp_path / "far", LLAMA)


def test_a_config_that_says_another_rank(tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, seed=0, r=6)
    with pytest.raises(CheckpointError, match=r"q_proj' have rank 4, and adapter_config\.json says 6") as told:
        read_adapter(tmp_path, LLAMA)
    assert "another model" not in str(told.value)


def test_an_adapter_with_a_part_of_the_experts(tmp_path: Path) -> None:
    model = golden_case("olmoe").model
    name = "base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_A.weight"
    write_adapter(tmp_path, model, seed=0, change=put(name, 4, model.hidden))
    with pytest.raises(
        CheckpointError, match=r"(?s)experts\.3\.up_proj\.lora_B\.weight' is absent.*experts\.0.* is absent, which"
    ):
        read_adapter(tmp_path, model)


def test_a_file_that_is_cut_short(tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, seed=0)
    whole = (tmp_path / WEIGHTS).read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (tmp_path / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated"):
            read_adapter(tmp_path, LLAMA)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_adapter(tmp_path, LLAMA)


def test_an_adapter_that_is_empty(tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, seed=0, change=dict.clear, target_modules="all-linear")
    with pytest.raises(CheckpointError, match="has no matrices"):
        read_adapter(tmp_path, LLAMA)


def test_a_config_is_read_first(tmp_path: Path) -> None:
    write_adapter(tmp_path, LLAMA, seed=0, use_dora=True)
    with pytest.raises(ConfigError, match="use_dora"):
        read_adapter(tmp_path, LLAMA)


def test_a_matrix_of_heads_is_refused_by_name(tmp_path: Path) -> None:
    model = golden_case("deepseek-v3").model
    write_adapter(tmp_path, model, 0, change=put(f"{PREFIX}.self_attn.kv_b_proj.lora_A.weight", 4, 8))
    with pytest.raises(CheckpointError, match=r"kv_b_proj\.lora_A\.weight': .* head by head"):
        read_adapter(tmp_path, model)
