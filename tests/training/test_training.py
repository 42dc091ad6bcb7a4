"""Training itself: where torch, transformers and peft are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.training.errors import TrainingError
from motley.training.files import Curve, Point
from motley.training.settings import Settings

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # which peft and transformers give each other

BUNDLED = Path(__file__).parents[2] / "cli" / "models" / "shakespeare-2.6m"
GOLDEN = Path(__file__).parents[1] / "models" / "golden"
DOCUMENTS = Path(__file__).with_name("documents.txt")
"""The Declaration of Independence and Lincoln's address at Gettysburg."""
DEADLINE_S = 120.0
QUICK = Settings(steps=6, batch=2, warm_up=2, rate=2e-3, context=64, rank=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces of other authors' texts, 100 characters each."""
    text = DOCUMENTS.read_text()
    file = tmp_path_factory.mktemp("data") / "documents.jsonl"
    file.write_text("\n".join(json.dumps({"text": text[at : at + 100]}) for at in range(0, len(text), 100)))
    return file


def adapter_of(out: Path) -> bytes:
    return (out / "adapter" / "adapter_model.safetensors").read_bytes()


def test_another_author_is_learnt_and_the_adapter_is_pefts(data: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from motley.training.base import HubTokenizer
    from motley.training.examples import IGNORED, deal, read_examples
    from motley.training.training import summed_loss, train

    settings = replace(QUICK, steps=30, batch=4, rate=5e-3, context=40)  # some pieces are longer
    trained = train(BUNDLED, data, tmp_path / "out", settings)
    assert trained.perplexity is not None
    before, after = trained.perplexity
    assert after < 0.85 * before
    assert [point.step for point in trained.points] == list(range(31))
    assert trained.learnt + trained.held_out == len(data.read_text().splitlines())
    tokenizer = HubTokenizer(BUNDLED, None)
    examples = read_examples(data, tokenizer.render, tokenizer, settings.context, cut=True)
    _, held_out = deal(examples.examples, settings.held_out, settings.seed)
    assert examples.cut == trained.cut > 0
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(BUNDLED, dtype="float32"), tmp_path / "out" / "adapter"
    )
    tokens = sum(int((example.labels != IGNORED).sum()) for example in held_out)
    loss = float(summed_loss(loaded.eval(), held_out).detach()) / tokens
    assert exp(loss) == pytest.approx(after, rel=1e-4)


def test_equal_seeds_make_equal_adapters_and_others_do_not(data: Path, tmp_path: Path) -> None:
    from motley.training.training import train

    settings = replace(QUICK, steps=3, dropout=0.1)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        train(BUNDLED, data, tmp_path / name, replace(settings, seed=seed))
    assert adapter_of(tmp_path / "a") == adapter_of(tmp_path / "b")
    assert adapter_of(tmp_path / "a") != adapter_of(tmp_path / "c")


def test_accumulated_batches_are_one_large_batch(data: Path, tmp_path: Path) -> None:
    from motley.training.training import train

    large = train(BUNDLED, data, tmp_path / "large", replace(QUICK, batch=4))
    small = train(BUNDLED, data, tmp_path / "small", replace(QUICK, batch=1, accumulate=4))
    losses = [[point.loss for point in trained.points if point.loss is not None] for trained in (large, small)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_training_that_dies_at_any_step_ends_as_if_it_had_not(data: Path, tmp_path: Path) -> None:
    from motley.training.training import train

    class Death(Exception):
        pass

    settings = replace(QUICK, steps=7, dropout=0.1, evaluate_every=3)
    whole = train(BUNDLED, data, tmp_path / "whole", settings)
    died: list[int] = []

    def die(point: Point) -> None:
        if point.step not in died and point.step in (0, 1, 4, 6):
            died.append(point.step)
            raise Death

    for _ in range(4):
        with pytest.raises(Death):
            train(BUNDLED, data, tmp_path / "killed", settings, keep_every=2, told=die)
    killed = train(BUNDLED, data, tmp_path / "killed", settings, keep_every=2, told=die)
    assert died == [0, 1, 4, 6]
    assert killed.began_at == 4
    assert killed.points == whole.points
    assert adapter_of(tmp_path / "killed") == adapter_of(tmp_path / "whole")


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "motley.cli.main", "train", *map(str, args)]


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is of POSIX")
def test_kill_9_of_the_command(data: Path, tmp_path: Path) -> None:
    options = ("--steps", 8, "--batch", 2, "--context", 64, "--keep-every", 2, "--json")
    out = tmp_path / "killed"
    process = subprocess.Popen(command(BUNDLED, data, "--out", out, *options), stdout=subprocess.DEVNULL)
    curve = Curve(out / "losses.jsonl")
    end = time.monotonic() + DEADLINE_S
    while not any(point.step >= 3 for point in curve.read()):
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)
    reports: dict[Path, dict[str, Any]] = {}
    for folder in (out, tmp_path / "whole"):
        said = subprocess.run(
            command(BUNDLED, data, "--out", folder, *options), capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert said.returncode == 0, said.stderr
        reports[folder] = json.loads(said.stdout.splitlines()[-1])
    assert reports[out]["began_at"] >= 2
    assert reports[out]["losses"] == reports[tmp_path / "whole"]["losses"]
    assert adapter_of(out) == adapter_of(tmp_path / "whole")


def test_another_training_in_the_same_folder_is_refused(data: Path, tmp_path: Path) -> None:
    from motley.training.training import train

    train(BUNDLED, data, tmp_path / "out", replace(QUICK, steps=1))
    with pytest.raises(TrainingError, match="differs in rate"):
        train(BUNDLED, data, tmp_path / "out", replace(QUICK, steps=1, rate=1e-5))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ("BertConfig", "not a causal language model: its tokens see those after them"),
        ("T5Config", "has no causal language head"),
        ("LlamaConfig", "lacks lm_head.weight"),
    ],
)
def test_a_model_without_a_causal_head_is_refused(config: str, why: str, tmp_path: Path) -> None:
    import transformers

    from motley.training.base import load_base

    small = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    settings = getattr(transformers, config)(**small)
    kind = "AutoModelForMaskedLM" if config == "BertConfig" else "AutoModel"
    getattr(transformers, kind).from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match=why):
        load_base(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    from motley.training.base import load_base

    with pytest.raises(TrainingError, match="no model that transformers knows"):
        load_base(tmp_path)


def test_chats_by_a_template_of_ones_own(tmp_path: Path) -> None:
    from motley.training.training import train

    chat = [{"role": "user", "content": "Who is there?"}, {"role": "assistant", "content": "A friend to this ground."}]
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps({"messages": chat})] * 4))
    with pytest.raises(TrainingError, match="line 1: a chat, but the model has no chat template"):
        train(BUNDLED, tmp_path / "chats.jsonl", tmp_path / "out", QUICK)
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    trained = train(BUNDLED, tmp_path / "chats.jsonl", tmp_path / "out", replace(QUICK, steps=12), template=template)
    losses = [point.loss for point in trained.points if point.loss is not None]
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("family", ["GPT2", "Bloom", "OPT", "Mixtral", "Rwkv"])
def test_any_family(family: str, data: Path, tmp_path: Path) -> None:
    """Random models with the bundled one's tokenizer, each trained without a change of its source."""
    import torch
    import transformers

    from motley.training.training import train

    torch.manual_seed(1)
    shape: dict[str, dict[str, Any]] = {
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
        "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
        "OPT": {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "word_embed_proj_dim": 32,
        },
        "Mixtral": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_local_experts": 2,
        },
        "Rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    }
    config = getattr(transformers, f"{family}Config")(vocab_size=1024, **shape[family])
    model = tmp_path / family
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_bytes((BUNDLED / name).read_bytes())
    few = tmp_path / "few.jsonl"
    few.write_text("".join(data.read_text().splitlines(keepends=True)[:2]))
    settings = replace(QUICK, steps=4, context=32, rate=2e-2, held_out=0.0)
    trained = train(model, few, tmp_path / "out", settings)
    losses = [point.loss for point in trained.points if point.loss is not None]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("Mamba2", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
        ("Llama4Text", {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48}),
    ],
)
def test_linear_modules_that_are_no_plain_product_get_no_adapter(family: str, shape: dict[str, int]) -> None:
    import torch
    import transformers

    from motley.training.base import with_adapters

    config = getattr(transformers, f"{family}Config")(vocab_size=96, hidden_size=32, num_hidden_layers=1, **shape)
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = with_adapters(base, 2, 4.0, 0.0, ())
    tokens = torch.tensor([[1, 2, 3]])
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    adapters = {name: weight for name, weight in model.named_parameters() if "lora_B" in name}
    assert adapters
    for name, weight in adapters.items():
        assert weight.grad is not None, name
        assert not {"router", "out_proj", "conv1d"} & set(name.split(".")), name


def test_each_of_the_experts_in_one_tensor_gets_an_adapter(data: Path, tmp_path: Path) -> None:
    import torch
    import transformers
    from safetensors.torch import load_file

    from motley.training.training import train

    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = transformers.MixtralConfig(vocab_size=1024, num_key_value_heads=2, num_local_experts=3, **shape)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((BUNDLED / name).read_bytes())
    settings = replace(QUICK, steps=4, rate=2e-2, held_out=0.0, targets=("gate_up_proj", "down_proj"))
    losses = {}
    for name, changed in {"whole": settings, "layers": replace(settings, memory=("layers", "labels"))}.items():
        trained = train(tmp_path / "model", data, tmp_path / name, changed)
        losses[name] = [point.loss for point in trained.points if point.loss is not None]
        adapter = load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
        learnt = [value for key, value in adapter.items() if "lora_B" in key]
        assert len(learnt) == 4
        assert all(value.unflatten(1, (4, 3)).any(0).any(0).all() for value in learnt), "of each layer, each expert's"
    assert losses["layers"] == pytest.approx(losses["whole"], rel=1e-4)
    with pytest.raises(TrainingError, match="adapters cannot be made"):
        train(tmp_path / "model", data, tmp_path / "noisy", replace(settings, dropout=0.1))


def test_a_model_in_float16_is_learnt_as_in_float32(data: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from motley.training.training import train

    settings = replace(QUICK, steps=20, batch=4, rate=5e-3)
    whole, half = (
        train(BUNDLED, data, tmp_path / str(is_half), replace(settings, half=is_half)) for is_half in (False, True)
    )
    assert whole.perplexity is not None
    assert half.perplexity is not None
    assert np.log(half.perplexity[1]) == pytest.approx(np.log(whole.perplexity[1]), rel=0.01)
    assert half.points[-1].loss != whole.points[-1].loss
    adapter = load_file(tmp_path / "True" / "adapter" / "adapter_model.safetensors")
    assert {value.dtype for value in adapter.values()} == {torch.float32}


PEAK = """
import sys
from pathlib import Path

import numpy as np
import psutil
import torch

from motley.training.examples import Example
from motley.training.memory.freeing import give_back_what_is_free
from motley.training.settings import Settings
from motley.training.training import train_on

folder = Path(sys.argv[1])
tokens = np.random.default_rng(0).integers(0, 8000, (8, 128))
examples = [Example(row, np.append(row[1:], -100)) for row in tokens]
settings = Settings(steps=2, batch=1, context=128, half=True)
give_back_what_is_free()
train_on(folder / "small", examples, [], folder / "warm", settings)  # loads what torch uses
before = psutil.Process().memory_info().rss
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
train_on(folder / "large", examples, [], folder / "out", settings)
lines = Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
print(peak - before)
"""


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is begun anew on Linux only")
def test_a_model_in_float16_takes_at_most_six_and_a_half_times_its_weights(tmp_path: Path) -> None:
    """From loading to the adapter; of AdamW and activations, too."""
    import torch
    import transformers

    sizes = {}
    for name, layers, width in (("small", 1, 64), ("large", 12, 512)):
        heads = {"num_attention_heads": width // 32, "num_key_value_heads": width // 64}
        shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, **heads}
        config = transformers.LlamaConfig(vocab_size=8000, tie_word_embeddings=True, **shape)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
        sizes[name] = 2 * sum(weight.numel() for weight in model.parameters())
        model.save_pretrained(tmp_path / name)
    said = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, timeout=10 * DEADLINE_S
    )
    assert said.returncode == 0, said.stderr
    assert int(said.stdout.splitlines()[-1]) < 6.5 * sizes["large"]


def test_a_truncated_graph_trains_the_last_layers_as_the_whole_one_begins_to(data: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from motley.training.training import train

    settings = replace(QUICK, steps=1, clip=1e9)
    missed, adapters = {}, {}
    for name, changed in {
        "whole": settings,
        "all six": replace(settings, top=6),
        "two": replace(settings, top=2),
        "two, one by one": replace(settings, top=2, memory=("layers",)),
    }.items():
        missed[name] = train(BUNDLED, data, tmp_path / name, changed).missed
        adapters[name] = load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")
    assert missed["whole"] == missed["all six"] == 0.0
    assert 0.1 < missed["two"] == missed["two, one by one"] < 1.0
    learnt = {name for name, value in adapters["two"].items() if "lora_B" in name and value.any()}
    assert {name.split("layers.")[1][0] for name in learnt} == {"4", "5"}
    for name in adapters["two"]:
        if "lora_A" in name or name in learnt:  # A has no gradient yet
            assert torch.equal(adapters["two"][name], adapters["whole"][name]), name
            assert torch.allclose(adapters["two, one by one"][name], adapters["two"][name], atol=1e-5), name
    with pytest.raises(TrainingError, match="the last 7 layers are to be trained, and the model has 6"):
        train(BUNDLED, data, tmp_path / "seven", replace(settings, top=7))
