"""A chain of real processes against one process, where torch, transformers and peft are installed."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from motley.training.errors import TrainingError
from motley.training.settings import Settings
from tests.transport.certificates import Authority

for _name in ("torch", "transformers", "peft"):
    pytest.importorskip(_name)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # which peft and transformers give each other

DEADLINE_S = 240.0
VOCABULARY = 96
DATA_SEED = 11
SETTINGS = Settings(steps=4, batch=2, accumulate=2, rate=1e-2, warm_up=2, clip=0.5, rank=4, seed=3, evaluate_every=2)
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": SHAPE,
    "Qwen2": SHAPE
    | {"num_key_value_heads": 1, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "Mixtral": SHAPE | {"num_key_value_heads": 1, "num_local_experts": 2},
    "OPT": {key: value for key, value in SHAPE.items() if key != "intermediate_size"}
    | {"word_embed_proj_dim": 32, "ffn_dim": 48, "dropout": 0.0},
    "Bloom": {"hidden_size": 32, "n_layer": 4, "n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 4, "context_length": 64},
}
CASES = [*FAMILIES, "Llama-turn", "Llama-once", "Llama-last"]
"""Of `chain_process`."""


def test_layers_are_cut_by_shares() -> None:
    from motley.training.chain.cut import cut

    assert cut(10, [1, 1]) == [range(5), range(5, 10)]
    assert cut(10, [3, 1, 1]) == [range(6), range(6, 8), range(8, 10)]
    assert cut(3, [100, 1, 1]) == [range(1), range(1, 2), range(2, 3)]
    with pytest.raises(TrainingError, match="2 layers cannot be cut in 3 parts"):
        cut(2, [1, 1, 1])


def test_what_crosses_comes_as_it_went() -> None:
    import torch

    from motley.training.chain.crossing import pack, unpack

    mask = torch.tensor([[True, False]])
    hidden = torch.randn(2, 3, dtype=torch.bfloat16)
    args, kwargs = unpack(pack(((mask, None), {"mask": mask, "pair": [hidden, 1.5], "use_cache": False, "empty": ()})))
    assert torch.equal(args[0], mask)
    assert args[1] is None
    assert torch.equal(kwargs["pair"][0], hidden)
    assert kwargs["pair"][1:] == [1.5]
    assert kwargs["empty"] == ()
    assert len(pack([hidden] * 50)) < len(pack([hidden])) + 50 * 20
    with pytest.raises(TrainingError, match="hands its layers a object"):
        pack({"cache": object()})
    for damaged in (b"", b"\x05" + bytes(7) + b"nonsense", pack([hidden])[:-1]):
        with pytest.raises(TrainingError, match="what is no message"):
            unpack(damaged)


def test_each_node_has_one_part_and_memory_for_the_model() -> None:
    from motley.training.dealing import RUNTIME_BYTES
    from motley.training.mesh.chained import place

    room = RUNTIME_BYTES + 4000
    given = {0: 1.0, 1: 1.0, 2: 3.0, 3: 2.0, 4: 5.0}
    peers = {rank: {"node": f"n{rank}", "memory_bytes": 10 * room, "speed": speed} for rank, speed in given.items()}
    parts, ranks = place(peers, [0, 4], 7, 1000)
    assert ranks == [0, 2, 3, 1], "the fastest of the others has the most layers, and nobody two parts"
    assert [len(part) for part in parts] == [1, 3, 2, 1]
    for short in (0, 2, 4):
        lacking = peers | {short: peers[short] | {"memory_bytes": room - 1}}
        with pytest.raises(
            TrainingError, match=f"needs {room} bytes of memory for this model: n{short} gives {room - 1}"
        ):
            place(lacking, [0, 4], 7, 1000)
    with pytest.raises(TrainingError, match="wants a node beside those that have data"):
        place(peers, list(given), 7, 1000)


def test_a_chain_whose_loss_is_no_number_ends_before_anybody_goes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from motley.training.chain import leader
    from tests.training.chain_process import examples_of

    class Scripted:
        def __init__(self, norm: float) -> None:
            self.norm = norm

        def step(self, rate: float, clip: float) -> float:
            return self.norm

    for value, norm in ((float("nan"), 1.0), (1.0, float("inf"))):
        loss = torch.tensor(value, requires_grad=True)
        monkeypatch.setattr(leader, "summed_loss", lambda model, batch, loss=loss: loss * 1)
        examples = examples_of(DATA_SEED, VOCABULARY)
        with pytest.raises(TrainingError, match="step 1: the loss is no number"):
            leader.lead(Scripted(norm), torch.nn.Module(), examples, SETTINGS, leader.Record())  # type: ignore[arg-type]


def test_who_goes_on_in_turn_knows_when_the_main_owner_led_last() -> None:
    from motley.training.chain.owners import last_led

    assert [last_led(done, 1, 2) for done in range(6)] == [0, 1, 1, 3, 3, 5]
    assert [last_led(done, 2, 3) for done in range(9)] == [0, 1, 2, 2, 2, 2, 2, 7, 8]


@pytest.fixture(scope="module")
def chained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a random model of each family, and adapters that a chain of three processes made of it; and what
    each of these told of the cases."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("chain")
    for family, shape in FAMILIES.items():
        torch.manual_seed(7)
        config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **shape)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / family / "model")
    authority = Authority()
    plans = []
    for rank in range(3):
        papers = authority.issue_rank(rank, "chain")
        plan = {
            "rank": rank,
            "settings": asdict(SETTINGS),
            "folder": str(folder),
            "cases": CASES,
            "shares": [2, 1, 1],
            "certificate": papers.certificate.decode(),
            "key": papers.key.decode(),
            "authority": authority.pem.decode(),
            "data": DATA_SEED,
            "vocabulary": VOCABULARY,
        }
        plans.append(json.dumps(plan))
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with ExitStack() as stack:
        processes = []
        for described in plans:
            command = [sys.executable, "-m", "tests.training.chain_process", described]
            process = subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        addresses = json.dumps([f"127.0.0.1:{process.stdout.readline().strip()}" for process in processes])
        for process in processes:
            print(addresses, file=process.stdin, flush=True)
        said = [process.communicate(timeout=DEADLINE_S) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], [err for _, err in said]
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in said]


def chosen_in(step: int, how: str) -> list[Any]:
    """The examples of a step, whoever has them."""
    from motley.training.examples import batch_of
    from tests.training.chain_process import examples_of

    of_owners = [examples_of(DATA_SEED + owner, VOCABULARY) for owner in range(2)]
    size = SETTINGS.batch * SETTINGS.accumulate

    def some(owner: int, own: int) -> list[Any]:
        return [of_owners[owner][index] for index in batch_of(own, size, len(of_owners[owner]), SETTINGS.seed)]

    if how == "turn":
        return some(step % 2, step // 2)
    return [*some(0, step), *some(1, step)] if how == "once" else some(0, step)


@pytest.mark.parametrize("case", CASES)
def test_a_chain_of_three_learns_what_one_process_does(case: str, chained: tuple[Path, list[dict[str, Any]]]) -> None:
    import torch
    from safetensors.torch import load_file

    from motley.training.base import load_base, save_adapter, with_adapters
    from motley.training.chain.leader import learnt_in
    from motley.training.settings import rate_at
    from motley.training.training import mean_loss, summed_loss
    from tests.training.chain_process import examples_of

    family, _, how = case.partition("-")
    folder, told = chained[0] / family, chained[1][0][case]
    base = load_base(folder / "model")
    torch.manual_seed(SETTINGS.seed)
    model = with_adapters(base, SETTINGS.rank, SETTINGS.alpha, SETTINGS.dropout, ()).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(trained, weight_decay=0.0)
    losses = []
    for step in range(SETTINGS.steps):
        chosen = chosen_in(step, how)
        loss = summed_loss(model, chosen) / learnt_in(chosen)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(trained, SETTINGS.clip)
        optimiser.param_groups[0]["lr"] = rate_at(step, SETTINGS)
        optimiser.step()
        optimiser.zero_grad()
    assert told["losses"] == pytest.approx(losses, rel=1e-5)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)
    assert told["kept"] == [3, 4]
    assert told["evaluated"] == ([3, 4] if how == "turn" else [2, 4]), "in turn, once the main owner leads again"
    held_out = mean_loss(model, examples_of(DATA_SEED, VOCABULARY)[:2], 2)
    assert told["held_out"] == pytest.approx(held_out, rel=1e-5)
    save_adapter(model, folder / f"alone{how}")
    alone, together = (load_file(folder / f"{name}{how}" / "adapter_model.safetensors") for name in ("alone", "chain"))
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        assert torch.allclose(together[name], value, atol=1e-3), name


@pytest.mark.parametrize("case", CASES)
def test_no_token_and_no_label_leaves_who_has_them(case: str, chained: tuple[Path, list[dict[str, Any]]]) -> None:
    owners = [told[case] for told in chained[1] if told[case]]
    assert len(owners) == 1 + case.endswith(("turn", "once"))
    assert all(told["heard"] and not told["shown"] for told in owners)
