from __future__ import annotations

import json
from math import exp
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.training.adapters import merge, read_adapter, write_adapter
from motley.training.dealing import RUNTIME_BYTES, Trainer, deal_examples, need_bytes
from motley.training.errors import TrainingError
from motley.training.examples import Example
from motley.training.files import Curve, Point
from motley.training.merging import (
    Change,
    dare,
    nearest_of_rank,
    normalised,
    ties,
    weighted_mean,
    weights_of_losses,
)
from motley.training.settings import How, Settings
from motley.training.tensors import tensors_of, write_tensors

BUNDLED = Path(__file__).parents[2] / "cli" / "models" / "shakespeare-2.6m"

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["q"], "fan_in_fan_out": False}


def change(seed: int, rank: int = 2) -> Change:
    rng = np.random.default_rng(seed)
    return Change(rng.normal(size=(rank, 7)).astype(np.float32), rng.normal(size=(5, rank)).astype(np.float32))


def dense(*rows: list[float]) -> dict[str, Change]:
    values = np.array(rows, np.float32)
    return {"m": Change(values, np.eye(len(values), dtype=np.float32))}


def test_the_mean_is_exact_and_what_one_lacks_counts_as_nothing() -> None:
    first, second = {"q": change(1), "k": change(2)}, {"q": change(3, rank=3)}
    merged = weighted_mean([first, second], [0.25, 0.75])
    np.testing.assert_allclose(
        merged["q"].dense, 0.25 * first["q"].dense + 0.75 * second["q"].dense, rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(merged["k"].dense, 0.25 * first["k"].dense, rtol=1e-6)
    assert {each.a.shape[0] for each in merged.values()} == {5}


def test_weights_follow_losses_and_are_checked() -> None:
    assert weights_of_losses([2.0, 2.0]) == [0.5, 0.5]
    heavy, light = weights_of_losses([1.0, 3.0])
    assert heavy / light == pytest.approx(exp(2))
    assert heavy + light == pytest.approx(1)
    assert normalised([3, 1], 2) == [0.75, 0.25]
    assert normalised([], 4) == [0.25] * 4
    for bad in ([1.0], [1.0, -1.0], [0.0, 0.0]):
        with pytest.raises(TrainingError, match="2 numbers"):
            normalised(bad, 2)


def test_ties_by_hand() -> None:
    first, second = dense([4.0, -3.0, 0.1, 2.0]), dense([-1.0, -5.0, 0.2, 0.1])
    whole = ties([first, second], [0.5, 0.5], 1.0, "m")
    np.testing.assert_allclose(whole, [[4.0, -4.0, 0.15, 1.05]])
    trimmed = ties([first, second], [0.5, 0.5], 0.5, "m")
    np.testing.assert_allclose(trimmed, [[4.0, -4.0, 0.0, 0.0]])
    other = ties([first, second], [0.1, 0.9], 0.5, "m")
    np.testing.assert_allclose(other, [[-1.0, -4.8, 0.0, 0.0]])


def test_dare_drops_by_chance_and_keeps_the_expectation() -> None:
    adapter = {"m": Change(np.ones((1, 400), np.float32), np.ones((300, 1), np.float32))}
    dropped = dare([adapter], [1.0], 0.2, 3, "m")
    assert set(np.unique(dropped)) == {0.0, 5.0}
    assert dropped.mean() == pytest.approx(1.0, rel=0.02)
    np.testing.assert_array_equal(dropped, dare([adapter], [1.0], 0.2, 3, "m"))
    assert (dropped != dare([adapter], [1.0], 0.2, 4, "m")).any()
    np.testing.assert_array_equal(dare([adapter], [1.0], 1.0, 3, "m"), adapter["m"].dense)


def test_the_nearest_change_of_a_rank() -> None:
    original = change(5, rank=3).dense
    near, missed = nearest_of_rank(original, 3)
    assert missed < 1e-5
    np.testing.assert_allclose(near.dense, original, atol=1e-5)
    nearer, missed = nearest_of_rank(original, 1)
    assert missed == pytest.approx(np.linalg.norm(nearer.dense - original) / np.linalg.norm(original), rel=1e-4)
    wide, _ = nearest_of_rank(original, 9)
    np.testing.assert_allclose(wide.dense, original, atol=1e-5)


def write(folder: Path, name: str, seed: int, alpha: float = 6) -> Path:
    adapter = folder / name / "adapter"
    write_adapter(adapter, CONFIG, {"model.q": change(seed), "model.k": change(seed + 10)})
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
    return adapter


def test_folders_are_merged_with_their_scales(tmp_path: Path) -> None:
    first, second = write(tmp_path, "a", 1), write(tmp_path, "b", 2, alpha=2)
    merge([first, second], How.LINEAR, tmp_path / "both", weights=[1, 3])
    merged = read_adapter(tmp_path / "both").changes
    expected = 0.25 * 3 * change(1).dense + 0.75 * change(2).dense
    np.testing.assert_allclose(merged["model.q"].dense, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(TrainingError, match="exists already"):
        merge([first, second], How.LINEAR, tmp_path / "both")


def test_by_loss_as_measured_beside_the_adapters(tmp_path: Path) -> None:
    folders = [write(tmp_path, name, seed, alpha=2) for seed, name in enumerate("ab")]
    with pytest.raises(TrainingError, match="no held-out loss is known"):
        merge(folders, How.LOSS, tmp_path / "both")
    for folder, loss in zip(folders, (1.0, 3.0), strict=True):
        Curve(folder.parent / "losses.jsonl").add(Point(4, 1.0, held_out=loss))
    merge(folders, How.LOSS, tmp_path / "both")
    merged = read_adapter(tmp_path / "both").changes
    heavy, light = weights_of_losses([1.0, 3.0])
    expected = heavy * change(0).dense + light * change(1).dense
    np.testing.assert_allclose(merged["model.q"].dense, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", [How.TIES, How.DARE])
def test_an_adapter_of_what_has_any_rank_says_what_it_misses(how: How, tmp_path: Path) -> None:
    folders = [write(tmp_path, name, seed) for seed, name in enumerate("ab")]
    assert merge(folders, how, tmp_path / "whole", density=0.5, rank=5) < 1e-5
    assert 0.05 < merge(folders, how, tmp_path / "small", density=0.5, rank=1) < 1
    whole = read_adapter(tmp_path / "whole").changes
    scaled = [{"m": Change(change(seed).a, 3 * change(seed).b)} for seed in range(2)]
    if how is How.TIES:
        np.testing.assert_allclose(whole["model.q"].dense, ties(scaled, [0.5, 0.5], 0.5, "m"), atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_into_a_checkpoint(dtype: type[np.generic], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    before = {f"model.{name}.weight": np.ones((5, 7), dtype) for name in ("q", "k", "o")}
    write_tensors(model / "model.safetensors", before)
    (model / "config.json").write_text("{}")
    folders = [write(tmp_path, name, seed) for seed, name in enumerate("ab")]
    merge(folders, How.LINEAR, tmp_path / "merged", into=model)
    after = tensors_of(tmp_path / "merged" / "model.safetensors")
    expected = 1 + 1.5 * (change(0).dense + change(1).dense)
    assert list(after) == list(before)
    assert after["model.q.weight"].dtype == dtype
    values = after["model.q.weight"].astype(np.float32)
    np.testing.assert_allclose(
        values, expected, rtol=0, atol=2 * float(ml_dtypes.finfo(dtype).eps) * abs(expected).max()
    )
    np.testing.assert_array_equal(after["model.o.weight"], before["model.o.weight"])
    assert (tmp_path / "merged" / "config.json").read_text() == "{}"


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tensors(model / "model.safetensors", {"other.weight": np.ones((5, 7), np.float32)})
    adapter = write(tmp_path, "a", 1)
    with pytest.raises(TrainingError, match=r"has no tensor model\.[qk]\.weight"):
        merge([adapter], How.LINEAR, tmp_path / "out", into=model)
    assert not (tmp_path / "out").exists()
    odd = tmp_path / "odd"
    write_adapter(odd, CONFIG, {"model.q": Change(np.ones((2, 3), np.float32), np.ones((5, 2), np.float32))})
    with pytest.raises(TrainingError, match="not of one model"):
        merge([adapter, odd], How.LINEAR, tmp_path / "out")


def test_what_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no adapter in PEFT's format"):
        read_adapter(tmp_path)
    adapter = write(tmp_path, "a", 1)
    (adapter / "adapter_config.json").write_text(json.dumps(CONFIG | {"peft_type": "IA3"}))
    with pytest.raises(TrainingError, match="not a LoRA adapter"):
        read_adapter(adapter)
    adapter = write(tmp_path, "b", 1)
    data = (adapter / "adapter_model.safetensors").read_bytes()
    (adapter / "adapter_model.safetensors").write_bytes(data[:-5])
    with pytest.raises(TrainingError, match="truncated"):
        read_adapter(adapter)


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.integers(0, 10), st.floats(0.1, 10)), min_size=1, max_size=8).filter(
        lambda nodes: any(free >= 5 for free, _ in nodes)
    ),
)
def test_all_examples_are_dealt_by_speed_among_those_with_memory(count: int, nodes: list[tuple[int, float]]) -> None:
    trainers = [Trainer(str(index), free, speed) for index, (free, speed) in enumerate(nodes)]
    dealt = deal_examples(count, trainers, 5)
    assert sorted(index for part in dealt.values() for index in part) == list(range(count))
    able = {each.name: each.speed for each in trainers if each.free_bytes >= 5}
    assert dealt.keys() <= able.keys()
    for name, part in dealt.items():
        assert abs(len(part) - count * able[name] / sum(able.values())) <= 1


def test_nobody_has_the_memory() -> None:
    with pytest.raises(TrainingError, match="takes 11 bytes on a node, and none has more than 10 free"):
        deal_examples(5, [Trainer("a", 10, 1.0), Trainer("b", 3, 1.0)], 11)


class TestWithPeft:
    pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # which peft and transformers give each other

    @pytest.mark.parametrize("family", ["Llama", "GPT2"])
    def test_merged_at_run_time_and_into_the_weights_say_the_same(self, family: str, tmp_path: Path) -> None:
        for name in ("torch", "transformers", "peft"):
            pytest.importorskip(name)
        import torch
        import transformers
        from peft import PeftModel

        from motley.training.base import save_adapter, with_adapters

        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = getattr(transformers, f"{family}Config")(
            vocab_size=96, **(shape if family == "Llama" else {"n_embd": 32, "n_layer": 2, "n_head": 2})
        )
        torch.manual_seed(3)
        auto = transformers.AutoModelForCausalLM
        auto.from_config(config).save_pretrained(tmp_path / "model")
        for index, name in enumerate("ab"):
            adapted = with_adapters(auto.from_pretrained(tmp_path / "model"), 2 + index, 8.0, 0.0, ())
            with torch.no_grad():
                for weight in adapted.parameters():
                    if weight.requires_grad:
                        weight.copy_(0.2 * torch.randn_like(weight))
            save_adapter(adapted, tmp_path / name)
        folders = [tmp_path / name for name in "ab"]
        merge(folders, How.LINEAR, tmp_path / "both", weights=[1, 2])
        merge(folders, How.LINEAR, tmp_path / "whole", weights=[1, 2], into=tmp_path / "model")
        prompt = torch.tensor([[5, 9, 2]])
        said = []
        for model in (
            PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "model"), tmp_path / "both"),
            auto.from_pretrained(tmp_path / "whole"),
            auto.from_pretrained(tmp_path / "model"),
        ):
            with torch.no_grad():
                logits = model.eval()(input_ids=prompt).logits
            written = model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
            said.append((logits, written.tolist()))
        (merged, text), (into, same), (base, _) = said
        assert torch.allclose(merged, into, atol=1e-4)
        assert text == same
        assert not torch.allclose(merged, base, atol=1e-2)

    def test_experts_in_one_tensor_are_merged_one_by_one(self, tmp_path: Path) -> None:
        for name in ("torch", "transformers", "peft"):
            pytest.importorskip(name)
        import torch
        import transformers
        from peft import PeftModel
        from peft.tuners.lora.layer import ParamWrapper

        from motley.training.base import save_adapter, with_adapters

        shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.MixtralConfig(vocab_size=32, num_local_experts=12, num_key_value_heads=1, **shape)

        def base() -> Any:
            torch.manual_seed(3)
            return transformers.AutoModelForCausalLM.from_config(config)

        def changed(model: Any) -> list[Any]:
            return [each.get_delta_weight("default") for each in model.modules() if isinstance(each, ParamWrapper)]

        made = []
        for index, name in enumerate("ab"):
            adapted = with_adapters(base(), 2 + index, 8.0, 0.0, ("q_proj", "gate_up_proj", "down_proj"))
            with torch.no_grad():
                for weight in adapted.parameters():
                    if weight.requires_grad:
                        weight.copy_(0.2 * torch.randn_like(weight))
            save_adapter(adapted, tmp_path / name)
            made.append(changed(adapted))
        folders = [tmp_path / name for name in "ab"]
        merge(folders, How.LINEAR, tmp_path / "both", weights=[1, 3])
        together = changed(PeftModel.from_pretrained(base(), tmp_path / "both"))
        assert len(together) == 2
        for merged, first, second in zip(together, *made, strict=True):
            assert merged.shape[0] == 12
            assert torch.allclose(merged, 0.25 * first + 0.75 * second, atol=1e-5)
        with pytest.raises(TrainingError, match="merge without --into"):
            merge(folders, How.LINEAR, tmp_path / "whole", into=tmp_path / "model")


def test_training_takes_more_for_larger_batches_and_longer_examples() -> None:
    def need(batch: int, tokens: int) -> int:
        example = Example(np.zeros(tokens, np.int64), np.zeros(tokens, np.int64))
        return need_bytes(BUNDLED, [example], Settings(batch=batch))

    assert RUNTIME_BYTES + 4 * 2.6e6 < need(1, 10) < need(4, 10) == need(1, 40)


def test_dora_is_folded_into_a_model_and_nowhere_else(tmp_path: Path) -> None:
    """As PEFT does it: rows get the lengths that the adapter says."""
    name = "model.layers.0.self_attn.q_proj"
    whole = tensors_of(BUNDLED / "model.safetensors")[f"{name}.weight"].astype(np.float32)
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, whole.shape[1])).astype(np.float32), rng.normal(size=(len(whole), 2)).astype(np.float32)
    lengths = rng.uniform(0.5, 2, len(whole)).astype(np.float32)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"use_dora": True}))
    prefix = f"base_model.model.{name}.lora_"
    matrices = {f"{prefix}A.weight": a, f"{prefix}B.weight": b, f"{prefix}magnitude_vector": lengths}
    write_tensors(folder / "adapter_model.safetensors", matrices)
    merge([folder], How.LINEAR, tmp_path / "model", into=BUNDLED)
    got = tensors_of(tmp_path / "model" / "model.safetensors")[f"{name}.weight"]
    changed = whole + 3 * b @ a
    expected = changed / np.linalg.norm(changed, axis=1, keepdims=True) * lengths[:, None]
    np.testing.assert_allclose(
        got.astype(np.float32), expected, rtol=2e-2 if got.dtype != np.float32 else 1e-5, atol=1e-5
    )
    for refused in ({}, {"into": BUNDLED, "how": How.DARE}):
        with pytest.raises(TrainingError, match="DoRA"):
            merge([folder], refused.pop("how", How.LINEAR), tmp_path / "other", **refused)
    write_tensors(folder / "adapter_model.safetensors", matrices | {f"{prefix}magnitude_vector": lengths[:-1]})
    with pytest.raises(TrainingError, match="DoRA's lengths do not fit"):
        read_adapter(folder)
