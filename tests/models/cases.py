"""Golden cases and a session of in-process ranks, for the tests of every engine."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import prod
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import pytest

from motley.daemon.models.cutting.holding import has_floats
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.stages import Stage, stages_of
from motley.daemon.models.cutting.units import Units
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.hashed_rows import I64, with_those_before
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.description.operations.rows import StatisticalTopK, Sum, WholeNorm
from motley.daemon.models.files import OpenModel, open_model, open_weights
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.keys import Keys
from motley.daemon.models.reading import describe, read_model
from motley.daemon.rank.blocks.far_file import FarFile
from motley.daemon.weights.closing import Closing
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.engine import F32, CacheBlocks, Engine, EngineFactory, EngineOptions, RankGraph, Span
from tests.models.cuts import apportion, cut
from tests.models.golden_configs import PROMPT
from tests.models.local_group import LocalGroup
from tests.plugins.sequences import Sequences

GOLDEN = Path(__file__).parent / "golden"
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.visual.", "mtp.")
"""What the names of tensors begin with that are not of a text part."""
TELLING = {
    *("gemma3-softcaps", "glm4-moe-qk-norm", "gpt-oss-mxfp4", "llama-biases-odd-sizes", "llama-llama3-rope-tied"),
    *("llama-mqa", "mistral-window", "mixtral-fused-window", "olmo2", "olmoe-clipped-normalised", "phi3-longrope"),
    *("qwen2-moe", "qwen2-some-windows", "qwen3-biases-some-windows", "qwen3-moe-not-normalised"),
    *(
        "granite",
        "smollm3-biases-some-windows",
        "qwen3-next",
        "qwen3-5",
        "deepseek-v3",
        "gemma4-experts",
        "gemma4-given-rows",
    ),
    *("granitemoehybrid", "lfm2", "nemotron-h", "glm4", "hunyuan-moe", "llama4", "ministral3"),
    *("gemma4-given-rows", "nemotron-h-latent", "mimo-v2-flash", "afmoe", "cohere", "starcoder2", "phimoe", "apertus"),
    *("kimi-linear", "falcon-h1", "lfm3", "nanochat", "laguna", "bailing-hybrid", "hy-v4", "glm5-next"),
    *("muse-glimmer", "kolibri1", "axk2", "gemma3n", "longcat-flash", "minimax-m3", "qwen4-exp"),
}
"""Golden cases that have what their family has, and most of what its other cases have."""
KINDS = {
    *("llama-biases-odd-sizes", "gemma2", "phi3-longrope", "gpt-oss-mxfp4", "olmoe-clipped-normalised", "hunyuan-moe"),
    *("llama4", "deepseek-v3", "gemma4-experts", "gemma4-given-rows", "qwen3-next", "nemotron-h-latent", "lfm2"),
    "mimo-v2-flash",
    *("phimoe", "apertus", "laguna", "hy-v4", "glm5-next", "gemma3n", "longcat-flash", "minimax-m3", "qwen4-exp"),
}
"""Golden cases that have every kind of operation and of attention together, as test_description.py checks."""
MADE_OF_OTHERS = {
    *(
        "arcee",
        "deepseek_v2",
        "gemma",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "ministral",
    ),
    *("cohere_compass", "flint", "flex_olmo", "helium", "hyperclovax", "solar_open", "step3p5", "vaultgemma"),
    *("cwm", "glm", "mellum", "minicpm3", "mistral4", "sarvam_moe", "youtu"),
    *("cohere2", "cohere2_moe", "jais2", "nemotron", "olmo_hybrid", "stablelm"),
    *("deepseek_v32", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "gemma2", "glm4_moe_lite"),
    *("glm_moe_dsa",),
    *("axk1", "hunyuan_v1_dense", "hy_v3", "lfm2_moe", "minimax_m2", "olmo3", "qwen3_5_moe", "seed_oss"),
}
"""Families of which each part is in a telling case of another family; so they have none in `TELLING`."""
BLOCKS = CacheBlocks(count=160, tokens=8, slots=8)
"""Of the caches of a `LocalSession`: small ones, so that a sequence has several."""
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A model folder and what transformers computes with it (see make_golden.py)."""

    folder: Path
    model: Model
    tokens: list[int]
    """The prompt and its greedy continuation."""
    prompt: int
    """Tokens of the prompt."""
    logits: F32
    """f32[len(tokens) - 1, V], of every row but the last."""

    def __str__(self) -> str:
        return self.folder.name

    @property
    def heads(self) -> Heads:
        """Of the first layer's attention."""
        return self.attentions[0].heads

    @property
    def attentions(self) -> list[Attend]:
        """Of every layer."""
        return [layer.attention for layer in self.model.layers if layer.attention]

    @property
    def recurrent(self) -> bool:
        """Whether layers have recurrent states."""
        return any(layer.recurrences for layer in self.model.layers)

    @property
    def chooses(self) -> bool:
        """Whether rows see positions that are chosen for them: with what is rounded otherwise, perhaps others."""
        return any(layer.choice for layer in self.model.layers)

    @property
    def windows(self) -> list[int]:
        """How many positions a row of each layer sees; 0: all."""
        return [attend.window for attend in self.attentions]

    def collectives(self, exact: bool = False, elsewhere: bool = False) -> int:
        """Sums over the ranks that a step takes.

        Args:
            exact: by trees, of which each of several blocks side by side has its own.
            elsewhere: experts are; what these are added to, if that is anything, is summed before they are asked.
        """
        total = sum(isinstance(each, WholeNorm | StatisticalTopK) for each in self.model.operations)
        for layer in self.model.layers:
            hosted = layer.experts if elsewhere else None
            sums = [len(each.xs) for each in layer.operations if isinstance(each, Sum)]
            total += sum(sums) if exact or hosted else len(sums)
            total -= hosted is not None and hosted.base is None
        return total

    @property
    def opened(self) -> OpenModel:
        """The model's files, which stay open: to open them, and to see that they are what the config says, takes longer
        than to read them."""
        return _opened(self.folder)

    def changed(self, **changes: Any) -> Model:
        """The model with other keys in its config."""
        return changed(self.folder, **changes)


_open = ExitStack()
atexit.register(_open.close)


@cache
def _opened(folder: Path) -> OpenModel:
    return _open.enter_context(open_model(folder))


@contextmanager
def opening(model: Path) -> Iterator[OpenModel]:
    """As `open_model`; what is golden stays open."""
    if model.parent == GOLDEN:
        yield _opened(model)
        return
    with open_model(model) as opened:
        yield opened


def changed(folder: Path, **changes: Any) -> Model:
    """The model of a folder with other keys in its config, or in the part of it that is about text."""
    keys = Keys.load(folder / "config.json")
    within = {"text_config": keys.values["text_config"] | changes} if "text_config" in keys.values else changes
    return describe(Keys(keys.where, keys.values | within))


TINYLLAMA: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
"""The config of TinyLlama-1.1B."""


def elements_in_files(case: Case) -> int:
    """Elements of all tensors in a case's files that belong to its text part, but for those the model ignores, and rows
    that no expert has (transformers makes some for rows that choose themselves)."""
    with open_weights(case.folder) as files:
        shapes = {name: files.tensor(name, ("F32", "F16", "BF16", "U8")).shape for name in files.names()}
    if (experts := case.model.experts) is not None:
        stacked = [name for name in shapes if name.endswith(".experts.gate_up_proj")]
        shapes |= {name: (experts.count, *shapes[name][1:]) for name in stacked}
    trunks, names = ("model.", *case.model.prefixes), case.model.ignored
    ignored = [*names, *(trunk + name.removeprefix("model.") for trunk in trunks for name in names)]
    table = case.model.embedding
    words = next((part.shape[0] for part in table.parts if part.tensor in shapes), case.model.vocabulary)
    return (case.model.vocabulary - words) * case.model.hidden + sum(
        prod(shape) * (2 if name.endswith("_blocks") else 1)  # a byte is two elements of MXFP4
        for name, shape in shapes.items()
        if not name.endswith("_scales") and not name.startswith((*OTHER_PARTS, *ignored))
    )


def shaped(**changes: Any) -> Model:
    """A model of TinyLlama-1.1B's shape, but for some keys of its config."""
    return describe(Keys(Path("config.json"), TINYLLAMA | changes))


@cache
def golden_cases() -> list[Case]:
    cases = []
    for folder in sorted(GOLDEN.iterdir()):
        with np.load(folder / "expected.npz") as expected:
            cases.append(
                Case(
                    folder=folder,
                    model=read_model(folder),
                    tokens=expected["tokens"].tolist(),
                    prompt=int(expected["prompt"]),
                    logits=expected["logits"],
                )
            )
    return cases


def others_soak(rows: Iterable[Any], among: Collection[str] = KINDS) -> list[Any]:
    """Parameters of a test, each a case or a tuple with one: those of other cases than these wait for `make soak`.

    For tests of what engines do with any model; that each model is computed rightly is tested with all at every commit.
    """
    parameters = []
    for row in rows:
        values = row if isinstance(row, tuple) else (row,)
        (case,) = (str(value) for value in values if isinstance(value, Case))
        parameters.append(pytest.param(*values, marks=pytest.mark.soak if case not in among else ()))
    return parameters


def splits(turn: int) -> list[Any]:
    """Parameters ``case`` and ``count``, on how many ranks: every case has one of them at each commit, those in `KINDS`
    5 or 8, others 2 or 3; which, its name decides and, of two tests, whose turn it is, 0 or 1."""
    counts = {True: (5, 8), False: (2, 3)}
    now = {name: counts[name in KINDS][(crc32(name.encode()) + turn) % 2] for name in map(str, golden_cases())}
    return [
        pytest.param(case, count, marks=() if count == now[str(case)] else pytest.mark.soak)
        for case, count in product(golden_cases(), [1, 2, 3, 5, 8])
    ]


def golden_case(name: str) -> Case:
    """The golden case in the folder of this name."""
    (found,) = (case for case in golden_cases() if str(case) == name)
    return found


def expert_cases() -> list[Case]:
    """Those with experts."""
    return [case for case in golden_cases() if case.model.experts]


def dense_cases() -> list[Case]:
    """Those without experts."""
    return [case for case in golden_cases() if case.model.experts is None]


def whole_share(units: Units) -> Share:
    """The share of a single rank."""
    return Share(1, range(units.kv_groups), range(units.mlp), range(units.vocabulary))


def uneven_shares(units: Units, ranks: int) -> list[Share]:
    """An odd split: the finest attention units, in unlike proportions, with ranks that have nothing of a kind."""
    if ranks == 1:
        return [whole_share(units)]
    split = units.attention_splits[-1]
    attention = [(rank * 5 + 3) % 7 for rank in range(ranks)]  # 3 1 6 4 2 0 5 3
    mlp = [(rank * 3 + 2) % 5 for rank in range(ranks)]  # 2 0 3 1 4 2 0 3
    words = [(rank * 2 + 1) % 3 for rank in range(ranks)]  # 1 0 2 1 0 2 1 0
    return [
        Share(split, *ranges)
        for ranges in zip(
            cut(apportion(units.kv_groups * split, attention)),
            cut(apportion(units.mlp, mlp)),
            cut(apportion(units.vocabulary, words)),
            strict=True,
        )
    ]


def staged_shares(units: Units, stages: Sequence[tuple[range, int]]) -> list[Share]:
    """The shares of stages, of which each has some layers on so many ranks, cut oddly."""
    found: list[Share] = []
    for number, (layers, ranks) in enumerate(stages):
        last = number == len(stages) - 1
        for share in uneven_shares(units, ranks):
            found.append(replace(share, layers=layers, vocabulary=share.vocabulary if last else range(0)))
    return found


class LocalSession(Closing):
    """A model on ranks that are threads of this process, each with an engine of its own."""

    def __init__(
        self,
        model: Path | OpenModel,
        factory: EngineFactory | Sequence[EngineFactory],
        shares: Sequence[Share],
        folder: Path,
        quantisation: str | Sequence[str] = "fp32",
        block: int = 32,
        options: EngineOptions | None = None,
        context: int | None = None,
        exact: bool = False,
        declare: Callable[..., Declared] = build_rank_graph,
        blocks: CacheBlocks = BLOCKS,
        prompt: int = PROMPT,
    ) -> None:
        """`folder` is for the share files; `factory` and `quantisation` may be one for each rank. `exact`: the graphs
        are, and the shares are in exact mode's units. `declare`: what makes the graphs. `prompt`: of all sequences."""
        each = [quantisation] * len(shares) if isinstance(quantisation, str) else quantisation
        self._files = ExitStack()
        opened = self._files.enter_context(opening(model)) if isinstance(model, Path) else model
        self._opened, described = opened, opened.model
        self._stages = stages_of(shares, len(described.layers))
        self._groups = [LocalGroup(len(stage.ranks)) for stage in self._stages]
        self.members = members = [group.member(place) for group in self._groups for place in range(group.size)]
        self._threads = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(len(shares))]
        self._told: dict[tuple[int, int], int] = {}
        """Tokens by their blocks and places in these, of models whose rows depend on those before them."""
        self.graphs: list[RankGraph] = []
        self.engines: list[Engine] = []
        try:
            for rank in range(len(shares)):
                own = [described, shares, rank, each[rank], block, context or described.context, opened.stored, exact]
                declared = declare(*own, beside=set(each)) if len(set(each)) > 1 else declare(*own)
                share_file = folder / f"rank{rank}" / SHARE_FILE
                share_file.parent.mkdir(parents=True)
                write_share(self._opened.source, declared.weights, declared.share_bytes, share_file)
                far = None
                if blocks.far:
                    far = FarFile(folder, blocks, declared.caches)
                    self._files.callback(far.close)
                self.graphs.append(replace(declared.bind(share_file), blocks=blocks, far=far))
                open_engine = factory[rank] if isinstance(factory, Sequence) else factory
                own_options = replace(options or EngineOptions(), floats=has_floats(described, each[rank]))
                build = self._threads[rank].submit(open_engine, self.graphs[rank], members[rank], own_options)
                self.engines.append(build.result())
            self.sequences = Sequences(self.engines[0], self.graphs[0], prompt)
        except BaseException:
            self.close()
            raise

    def step(
        self,
        tokens: Sequence[int],
        position: int,
        wanted: int | None = None,
        sequence: int = 0,
        halved: bool = False,
    ) -> F32:
        """f32[R, V]: the logits of the last `wanted` tokens (None: of every token), the ranks' slices side by side."""
        count = len(tokens) if wanted is None else wanted
        return self.run([self.sequences.span(sequence, position, len(tokens), count)], tokens, halved)

    def decode(self, sequences: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> F32:
        """f32[B, V]: the logits of a token of each of some sequences, the ranks' slices side by side."""
        places = zip(sequences, positions, strict=True)
        return self.run([self.sequences.span(*each, 1, 1) for each in places], tokens)

    def run(self, spans: Sequence[Span], tokens: Sequence[int], halved: bool = False) -> F32:
        """f32[R, V]: what a step gives, the ranks' slices side by side."""
        hidden = self.rows(spans, tokens)
        through = [span._replace(wanted=span.rows) for span in spans]
        for stage, after in pairwise(self._stages):
            each = self._step(stage, hidden, through, halved)
            hidden = each[0]
            assert all(np.array_equal(own, hidden) for own in each), "residuals are the same bits on all ranks"
            recent = self._with_those_before(spans, tokens)
            hidden = self._opened.with_hashed(hidden, tokens, recent, after.layers)
        return np.concatenate(self._step(self._stages[-1], hidden, spans, halved), axis=1)

    def rows(self, spans: Sequence[Span], tokens: Sequence[int]) -> F32:
        """What a step begins with."""
        return self._opened.rows(tokens, self._with_those_before(spans, tokens), self._stages[0].layers)

    def _with_those_before(self, spans: Sequence[Span], tokens: Sequence[int]) -> I64 | None:
        """Tokens of a step with those before them, where these say which rows they begin with: they are found where
        the keys of a sequence are, as another may have been there before."""
        recent, size = self._opened.model.recent, self.graphs[0].blocks.tokens
        if not recent:
            return None
        found, left = [], [*tokens]
        for span in spans:
            end = span.position + span.rows
            places = [(int(span.blocks[position // size]), position % size) for position in range(end)]
            own, left = left[: span.rows], left[span.rows :]
            self._told.update(zip(places[span.position :], own, strict=True))
            told = np.array([self._told.get(place, 0) for place in places], np.int32)
            found.append(with_those_before(told, span.position, end, recent))
        return np.concatenate(found)

    def _step(self, stage: Stage, hidden: F32, spans: Sequence[Span], halved: bool) -> list[F32]:
        return self._everywhere(lambda engine: engine.step(hidden.copy(), spans, halved).copy(), stage.ranks)

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to far ones on every rank."""
        self._everywhere(lambda engine: engine.move(pairs))

    def close(self) -> None:
        self._everywhere(lambda engine: engine.close())
        for thread in self._threads:
            thread.shutdown()
        self._files.close()

    def _everywhere(self, act: Callable[[Engine], T], ranks: range | None = None) -> list[T]:
        """Let the thread of each of some ranks (None: all) do it; the first error is raised once all have stopped."""

        def guarded(engine: Engine) -> T:
            try:
                return act(engine)
            except BaseException:
                for group in self._groups:
                    group.abort()
                raise

        able = range(len(self.engines)) if ranks is None else ranks
        futures = [self._threads[rank].submit(guarded, self.engines[rank]) for rank in able]
        wait(futures)
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
