"""Which axis of which weight is cut, against what transformers cuts in its tensor parallelism.

``tp_plans.json`` has `base_model_tp_plan` of the configs of transformers 5.23.0, by ``model_type``: ``colwise`` cuts
the rows of a matrix as a checkpoint has it, ``rowwise`` its columns, and what is not named is whole on every rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from motley.daemon.models.description.axes import W
from motley.daemon.models.description.operations import Operation, weights_of
from motley.daemon.models.description.operations.experts import Experts
from tests.models.cases import Case, golden_cases

PLANS: Mapping[str, Mapping[str, str]] = json.loads(
    (Path(__file__).parent / "tp_plans.json").read_text(encoding="utf-8")
)
CUTS = {
    "colwise": "rows",
    "colwise_gather_output": "rows",
    "packed_colwise": "rows",
    "rowwise": "columns",
    "packed_rowwise": "columns",
    "rowwise_split_input": "columns",
    "mla_kv_a_proj": "rows",  # of one head of keys, which every rank has that has query heads
    "replicated_with_grad_allreduce": "nothing",
}
SHARED = {
    "layers.*.mlp.shared_expert.gate_proj": "transformers has the shared expert whole on every rank",
    "layers.*.mlp.shared_expert.up_proj": "the same",
    "layers.*.mlp.shared_expert.down_proj": "the same",
}
WHOLE_MLPS = {
    f"layers.*.mlp.{module}{part}_proj": "transformers has MLPs and the shared expert whole on every rank"
    for module in ("", "shared_experts.")
    for part in ("gate", "up", "down")
}
SHARED_EXPERTS = {name.replace("_expert.", "_experts."): why for name, why in SHARED.items()}
WHOLE_NORMS = {
    "layers.*.self_attn.q_norm": "transformers gathers all queries on every rank; here ranks sum their squares",
    "layers.*.self_attn.k_norm": "the same of keys",
}
GATHERED = {
    "layers.*.linear_attn.out_proj": "transformers gathers all heads' results on every rank; here ranks sum terms",
    **dict.fromkeys(
        (f"layers.*.linear_attn.{name}" for name in ("conv1d_q", "conv1d_k", "conv1d_v", "decay", "dt_bias")),
        "transformers has all heads' recurrent states on every rank",
    ),
}
WHOLE_DELTA = dict.fromkeys(
    (
        f"layers.*.linear_attn.{name}"
        for letter in "qkv"
        for name in (*(f"{each}_proj" for each in "qkvbago"), f"conv1d_{letter}", "decay", "dt_bias")
    ),
    "transformers has the whole of these layers on every rank",
)
WHOLE_KIMI_DELTA = {
    f"layers.*.self_attn.{name}": "transformers has all heads of these layers on every rank"
    for name in (
        *("q_proj", "k_proj", "v_proj", "b_proj", "f_b_proj", "g_b_proj"),
        *("conv1d_q", "conv1d_k", "conv1d_v", "decay", "dt_bias"),
    )
}
WHOLE_HEADS = {
    f"layers.*.self_attn.{name}": "transformers has all heads on every rank, as it does not cut sinks"
    for name in (*(f"{letter}_proj" for letter in "qkvo"), "sinks")
}
TRANSPOSED = {
    "layers.*.feed_forward.experts.gate_up_proj": "files have it transposed, and transformers cuts it as it is there",
    "layers.*.feed_forward.experts.down_proj": "the same",
}
HEADS_NORMS = {
    "layers.*.self_attn.q_halves_norm": "transformers has the gains of all heads on every rank",
    "layers.*.self_attn.k_halves_norm": "the same of keys",
}
WHOLE_READERS = {
    **dict.fromkeys(
        (
            f"{module}.input_mix_weight_down"
            for module in (
                "layers.*.attn_hyper_connection",
                "layers.*.mlp_hyper_connection",
                "hyper_connection_mixer",
            )
        ),
        "transformers sums terms of what narrow matrices make; here every rank has these, as a sum more takes longer",
    ),
    "layers.*.self_attn.indexer.index_qk_proj": "transformers cuts it, and gathers what it makes; every rank needs all",
}
WHOLE_ATTENTION = dict.fromkeys(
    (f"layers.*.self_attn.{name}_proj" for name in ("q_query", "q_gate", "k", "v", "o")),
    "transformers has all heads on every rank",
)
DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "cohere": HEADS_NORMS,
    "cohere2_moe": SHARED_EXPERTS,
    "qwen3_next": GATHERED,
    "qwen3_5": GATHERED,
    "qwen3_5_moe": GATHERED,
    "qwen4_exp": GATHERED | WHOLE_READERS | WHOLE_ATTENTION,
    "qwen2_moe": SHARED,
    "flex_olmo": WHOLE_NORMS,
    "flint": WHOLE_HEADS,
    "glm5_next": WHOLE_KIMI_DELTA,
    "llama4": TRANSPOSED,
    "minimax_m2": WHOLE_NORMS,
    "olmo2": WHOLE_NORMS,
    "olmo_hybrid": WHOLE_NORMS | WHOLE_DELTA,
    "olmo3": WHOLE_NORMS,
    "olmoe": WHOLE_NORMS,
    "solar_open": {name: why for name, why in WHOLE_MLPS.items() if "shared" in name},
    "step3p5": WHOLE_MLPS,
}
"""Where we cut otherwise, and why."""


def weights(operations: Iterable[Operation]) -> Iterator[W]:
    """Those of experts' bodies too."""
    for each in operations:
        yield from weights_of(each)
        if isinstance(each, Experts):
            yield from weights(each.body)


def modules(w: W) -> list[str]:
    """What a plan may call the module of a weight: its own, or one that it is a part of. Experts' are stacked there."""
    found = []
    for name in (w.name, *(part.tensor for part in w.parts)):
        module = re.sub(r"^layers\.\d+\.", "layers.*.", name.removeprefix("model.").removesuffix(".weight"))
        module = re.sub(r"\.(self_attn|mlps)\.\d+\.", r".\1.*.", module)
        found.append(module.replace(".{expert}", "").replace("[{expert}]", ""))
    return found


def cut_by_us(w: W) -> str:
    if w.out.cut:
        return "rows"
    return "columns" if w.in_ is not None and w.in_.cut else "nothing"


@pytest.mark.parametrize("case", [case for case in golden_cases() if case.model.family in PLANS], ids=str)
def test_the_same_axes_are_cut(case: Case) -> None:
    plan = PLANS[case.model.family]
    met, unlike = set(), set()
    for layer in case.model.layers:
        for w in weights(layer.operations):
            names = modules(w)
            planned = next((name for name in names if name in plan), names[0])
            met.add(planned)
            if cut_by_us(w) != CUTS[plan.get(planned, "replicated_with_grad_allreduce")]:
                unlike.add(planned)
    assert unlike == set(DIFFERENCES.get(case.model.family, {}))
    # Not of weights: how results of experts are summed, that sinks are cut as their heads are, norms without gains.
    no_weights = {
        "layers.*.mlp.experts",
        "layers.*.mlp.experts.identity_expert",
        "layers.*.feed_forward.experts",
        "layers.*.self_attn",
        "layers.*.self_attn.v_norm",
        "layers.*.ple.ple_embedding.ngram_embedding",  # whose rows are read from the files
    }
    plain = {f"layers.*.mlp.{part}_proj" for part in ("gate", "up", "down")}
    dense = plain if len(case.model.expert_layers) == len(case.model.layers) else set()  # no layer has them
    assert set(plan) - met <= no_weights | dense


def test_every_family_with_a_plan_is_compared() -> None:
    described = {case.model.family for case in golden_cases()}
    assert described & set(PLANS)
    assert set(DIFFERENCES) <= described
