"""Little memory: against plain autograd, where torch, transformers and peft are installed."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.training.errors import TrainingError
from motley.training.examples import IGNORED, Example
from motley.training.memory.switches import SWITCHES, parse_switches
from motley.training.settings import Settings

BUNDLED = Path(__file__).parents[2] / "cli" / "models" / "shakespeare-2.6m"
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2},
    "GPT2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
    "Bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 2},
    "Rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 3, "context_length": 64},
}


def test_switches_are_read() -> None:
    assert parse_switches("") == ()
    assert parse_switches("tight") == SWITCHES
    assert parse_switches("labels, int4") == ("int4", "labels")
    with pytest.raises(TrainingError, match="memory: int5 is not known; there are tight, or some of int4"):
        parse_switches("int5,near")


class TestWithTorch:
    pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # which peft and transformers give each other

    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        for name in ("torch", "transformers", "peft"):
            pytest.importorskip(name)

    @staticmethod
    def batch() -> list[Example]:
        rng = np.random.default_rng(3)
        examples = []
        for length in (17, 24):
            tokens = rng.integers(0, 96, length)
            labels = np.append(np.where(rng.random(length - 1) < 0.3, tokens[1:], IGNORED), IGNORED)
            examples.append(Example(tokens, labels))
        return examples

    @classmethod
    def gradients(
        cls, family: str, switches: tuple[str, ...], folder: Path, near: int = 1000, dropout: float = 0.0
    ) -> tuple[float, Any]:
        import torch
        import transformers

        from motley.training.base import with_adapters
        from motley.training.memory.spared import spare
        from motley.training.training import summed_loss

        torch.manual_seed(4)
        config = getattr(transformers, f"{family}Config")(vocab_size=96, **FAMILIES[family])
        model = with_adapters(transformers.AutoModelForCausalLM.from_config(config), 4, 8, dropout, ())
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        with torch.no_grad():
            for weight in trained:  # as after some steps, when both of LoRA's matrices have gradients
                weight.add_(0.1 * torch.randn_like(weight))
        model.train()
        spared = spare(model, switches, near, folder) if switches else None
        torch.manual_seed(5)
        loss = spared.summed_loss(cls.batch()) if spared else summed_loss(model, cls.batch())
        loss.backward()
        return float(loss.detach()), torch.cat([weight.grad.flatten() for weight in trained])

    @pytest.mark.parametrize("family", FAMILIES)
    def test_layers_and_labels_have_the_gradients_of_plain_autograd(
        self, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import torch

        from motley.training.memory import rows, spared

        monkeypatch.setattr(rows, "ROWS", 5)  # stretches of MLPs,
        monkeypatch.setattr(spared, "LOGITS", 96 * 3)  # and of logits
        loss, plain = self.gradients(family, (), tmp_path)
        for switches in (("layers",), ("labels",), ("layers", "labels")):
            spared_loss, own = self.gradients(family, switches, tmp_path)
            assert spared_loss == pytest.approx(loss, rel=1e-6)
            assert torch.linalg.norm(own - plain) < 1e-6 * torch.linalg.norm(plain), switches

    def test_the_noise_of_dropout_is_the_same_on_the_way_back(self, tmp_path: Path) -> None:
        import torch

        _, plain = self.gradients("Llama", (), tmp_path, dropout=0.3)
        _, spared = self.gradients("Llama", ("layers",), tmp_path, dropout=0.3)
        assert torch.linalg.norm(spared - plain) < 1e-6 * torch.linalg.norm(plain)

    @pytest.mark.parametrize("family", ["Llama", "GPT2"])
    def test_near_tokens_and_int4_change_gradients_a_little(self, family: str, tmp_path: Path) -> None:
        from torch.nn.functional import cosine_similarity

        _, plain = self.gradients(family, (), tmp_path)
        _, all_near = self.gradients(family, ("near",), tmp_path / "all")
        assert cosine_similarity(plain, all_near, 0) > 0.999999
        _, near = self.gradients(family, ("near", "labels"), tmp_path / "near", near=24)
        assert 0.99 < cosine_similarity(plain, near, 0) < 0.99999999
        _, int4 = self.gradients(family, ("int4",), tmp_path)
        assert cosine_similarity(plain, int4, 0) > 0.95
        _, both = self.gradients(family, SWITCHES, tmp_path / "both")
        assert cosine_similarity(int4, both, 0) > 0.999999

    @pytest.mark.parametrize("piece", [1 << 22, 700])
    def test_products_of_codes(self, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from motley.training.memory import quantised
        from motley.training.memory.quantised import Codes, FrozenLinear

        monkeypatch.setattr(quantised, "PIECE", piece)
        weight = torch.randn(24, 100, generator=torch.Generator().manual_seed(6))
        for bits, most in ((4, 0.12), (8, 0.008)):
            codes = Codes(weight, bits)
            error = torch.linalg.norm(codes.rows() - weight) / torch.linalg.norm(weight)
            assert error < most
            assert torch.equal(codes.rows(torch.tensor([3, 20])), codes.rows()[[3, 20]])
        assert codes.packed.numel() == 24 * 128
        assert Codes(weight, 4).packed.numel() == 12 * 128
        x = torch.randn(5, 100, requires_grad=True)
        bias = torch.randn(24)
        FrozenLinear(codes, bias)(x).square().sum().backward()
        held = x.detach().requires_grad_()
        torch.nn.functional.linear(held, codes.rows(), bias).square().sum().backward()
        assert torch.allclose(x.grad, held.grad, rtol=1e-5, atol=1e-3)
        some = torch.tensor([3, 20, 9])
        chosen = FrozenLinear(codes, bias).some(x, some)
        assert torch.allclose(chosen, FrozenLinear(codes, bias)(x)[:, some], rtol=1e-5, atol=1e-5)
        assert Codes(torch.zeros(1, 64), 4).rows().abs().max() == 0

    def test_weights_wait_on_disk(self, tmp_path: Path) -> None:
        import transformers

        from motley.training.base import with_adapters
        from motley.training.memory.layers import decoder_layers
        from motley.training.memory.spared import spare

        config = transformers.LlamaConfig(vocab_size=96, **FAMILIES["Llama"])
        model = with_adapters(transformers.AutoModelForCausalLM.from_config(config), 4, 8, 0.0, ())
        layers = decoder_layers(model)
        assert len(layers) == 3
        spared = spare(model, ("layers",), 0, tmp_path)
        spared.summed_loss(self.batch()).backward()
        frozen = [each for layer in layers for each in layer.parameters() if not each.requires_grad]
        assert frozen
        assert all(each.numel() == 0 for each in frozen)
        assert sorted(file.name for file in tmp_path.iterdir()) == [f"layer-{number}.weights" for number in range(3)]

    def test_the_table_of_near_tokens_is_made_once(self, tmp_path: Path) -> None:
        import torch
        import transformers

        from motley.training.base import with_adapters
        from motley.training.memory.head import NearTokens

        config = transformers.LlamaConfig(vocab_size=96, **FAMILIES["Llama"])
        model = with_adapters(transformers.AutoModelForCausalLM.from_config(config), 4, 8, 0.0, ())
        weight = model.get_base_model().get_input_embeddings().weight.detach()
        file = tmp_path / "near.i32"
        near = NearTokens(model, 5, file)

        def nearest(token: int) -> set[int]:
            cosines = torch.nn.functional.cosine_similarity(weight[token], weight, dim=1)
            return set(cosines.topk(5).indices.tolist())

        assert near.union(torch.tensor([7])).tolist() == sorted(nearest(7))
        assert near.union(torch.tensor([95, 7, 95])).tolist() == sorted(nearest(7) | nearest(95))
        assert {7, 95} <= nearest(7) | nearest(95)
        made = file.stat().st_mtime_ns
        assert torch.equal(NearTokens(model, 5, file).union(torch.tensor([7])), near.union(torch.tensor([7])))
        assert file.stat().st_mtime_ns == made
        with pytest.raises(TrainingError, match="another model"):
            NearTokens(model, 6, file)

    def test_a_disk_that_fills_up_ends_the_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from motley.training.memory import layers

        def full(self: Path, *args: Any, **kwargs: Any) -> Any:
            if self.suffix == ".1":
                raise OSError(errno.ENOSPC, "No space left on device")
            return Path_open(self, *args, **kwargs)

        Path_open = layers.Path.open
        monkeypatch.setattr(layers.Path, "open", full)
        with pytest.raises(TrainingError, match="the disk is full"):
            self.gradients("Llama", ("layers",), tmp_path)

    def test_a_training_in_little_memory_learns_and_goes_on(self, tmp_path: Path) -> None:
        from motley.training.training import train

        text = Path(__file__).with_name("documents.txt").read_text()
        data = tmp_path / "documents.jsonl"
        data.write_text("\n".join(json.dumps({"text": text[at : at + 150]}) for at in range(0, len(text), 150)))
        settings = Settings(steps=16, batch=2, warm_up=2, rate=5e-3, context=48, rank=4, memory=SWITCHES, near=100)
        trained = train(BUNDLED, data, tmp_path / "tight", settings)
        plain = train(BUNDLED, data, tmp_path / "plain", replace(settings, memory=()))
        assert trained.perplexity is not None
        assert plain.perplexity is not None
        (before, after), (_, plainly) = trained.perplexity, plain.perplexity
        assert after < 0.9 * before
        assert [file.name for file in (tmp_path / "tight" / "memory").iterdir()] == ["near-100.i32"]
        assert after < sqrt(before * plainly)
