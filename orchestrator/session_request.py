"""What a client asks a session to be: every field once, with its default and the values that it may have. Pure.

The HTTP API reads a request by this description, publishes it and tells it back by it, and `motley run` fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import AfterValidator, ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from motley.orchestrator.docstrings import add_docstrings
from motley.protocol import (
    MAX_ADAPTER_RANK,
    MAX_ADAPTERS,
    MAX_QUEUE,
    MAX_RANKS,
    MAX_SEQUENCES,
    MAX_TRUNK,
    OWN_HEAD,
    QUEUE,
    SEQUENCES,
)

Quantisation = Literal["fp32", "fp16", "int8", "int4", "stored"]
Layout = Literal["auto", "sliced", "parallel"]
"""Of experts; see `motley.orchestrator.planning.experts.layout`."""
Wire = Literal["fp32", "bf16", "int8"]
CacheFormat = Literal["fp32", "fp16", "int8"]
"""What keys and values are kept as; every engine knows the first."""
Embeddings = Literal["", "mean", "last"]
Block = Literal[16, 32, 64, 128, 256]
CACHE_FORMATS: tuple[CacheFormat, ...] = get_args(CacheFormat)
"""The widest first."""
AUTO = "auto"
"""Stands for an engine where each node has the best one: see `motley.orchestrator.serving.plans.taking_part`."""
ON_PROCESSOR = "onnxruntime"
"""The engine that ``auto`` means on a processor, and of experts on nodes of their own."""
ON_GPU = ("cuda", "webgpu")
"""The engines that ``auto`` may mean on a GPU, the first that can be."""
INEXACT = (
    *("cuda", "onnxruntime-cuda", "onnxruntime-tensorrt-rtx", "reference"),
    *("tensorrt", "tensorrt-whole", "webgpu"),
)
"""Engines that cannot keep exact=true. One of somebody else's says so itself, when its ranks start."""


class ContradictionError(Exception):
    """Two fields of a request exclude each other. `field` is the one to change, the message says why."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(why)
        self.field = field


class Place(NamedTuple):
    """The node of a rank, and the engine that the rank has; empty: the one that the request has for the node."""

    node: str
    engine: str


def place_of(named: str) -> Place:
    """Read where a rank is to be: ``webgpu@pc`` is node ``pc`` with engine ``webgpu``, ``pc`` leaves the engine open.
    No node has an ``@`` in its name."""
    engine, at, node = named.rpartition("@")
    return Place(node, engine) if at else Place(named, "")


def _weights(weights: tuple[float, ...]) -> tuple[float, ...]:
    if weights and not any(weights):
        raise PydanticCustomError("invalid_value", "must not be all 0")
    return weights


def _name(name: str) -> str:
    if "/" in name or (name and not name.strip()):
        why = "must not be blank or have a / in it; leave it out for the model's own"
        raise PydanticCustomError("invalid_value", why)
    return name


StageRanks = Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)]
Stages = (
    Annotated[int, Field(strict=True, ge=0, le=MAX_RANKS)]
    | Annotated[tuple[StageRanks, ...], Field(min_length=2, max_length=MAX_RANKS)]
)
Weight = Annotated[float, Field(strict=True, ge=0, le=1e9)]
Tokens = Annotated[int, Field(strict=True, ge=0, le=2**31)]


_CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True, json_schema_extra=add_docstrings)


@dataclass(frozen=True, config=_CHECKED)
class SessionRequest:
    """What a client asks for with ``POST /api/sessions``. A field that it leaves out has its default.

    Raises:
        pydantic.ValidationError: a field is not what it may be.
    """

    model: Annotated[str, Field(min_length=1)]
    """A local folder, a GGUF file, or a hub id (``owner/name``)."""
    name: Annotated[str, AfterValidator(_name)] = ""
    """What clients call the model; empty: as the model calls itself."""
    quantisation: Quantisation = "stored"
    block: Block = 128
    """Weights that share a scale, where they are quantised while loading."""
    nodes: Annotated[tuple[str, ...], Field(max_length=MAX_RANKS)] = ()
    """The node of every rank, by rank, with an engine as `place_of` reads it if the rank has one of its own: with
    ``pc`` and ``webgpu@pc`` a node has a rank on its processor and one on its GPU. Empty: all nodes that are there, the
    fastest first."""
    shares: Annotated[tuple[Weight, ...], Field(max_length=MAX_RANKS), AfterValidator(_weights)] = ()
    """The weight of every rank's share, by rank; empty: by speed and memory."""
    stages: Stages = 0
    """How many stages the ranks form, of some of the layers each; 1: every rank has a share of every layer; 0: whatever
    is quickest. Or how many ranks each stage has, of those that `nodes` names, in their order."""
    context: Tokens = 0
    """Tokens that prompt and answer have together; 0: a default, or what the model allows if that is less."""
    cache_tokens: Tokens = 0
    """Tokens that all requests together may have in the KV caches, at least one context; 0: just one."""
    cache_disk_tokens: Tokens = 0
    """Tokens that they may have besides on every rank's disk; a context may be as long as all together."""
    cache_node_tokens: Tokens = 0
    """Tokens that they may have besides in the memory of nodes with room to spare, which attend to these for the ranks;
    a context may be as long as all together. With tokens on disks too, those come first that cost a step less, as the
    ranks have measured."""
    cache_format: CacheFormat = "fp32"
    """What keys and values are kept as in the KV caches of every rank."""
    keep_prefixes: StrictBool = False
    """Keep what is in the KV caches on every rank's disk, so that the next session that is planned alike on these nodes
    begins with the prompts that this one knew."""
    embeddings: Embeddings = ""
    """Embed texts in the place of answering: an embedding is the mean of what the model makes of a text's tokens behind
    its last norm, or that of the last token, with length 1. Empty: the session answers."""
    sequences: Annotated[int, Field(strict=True, ge=1, le=MAX_SEQUENCES)] = SEQUENCES
    """Requests that are under way at a time; others wait."""
    queue: Annotated[int, Field(strict=True, ge=0, le=MAX_QUEUE)] = QUEUE
    """Requests that may wait beside those; what comes then is refused."""
    engine: str = AUTO
    """What computes ranks: an engine, or ``auto``: on a node whose GPU is faster than its processor an engine on that,
    if it can do what is asked for; elsewhere ``onnxruntime``."""
    quantisations: Mapping[str, Quantisation] = Field(default_factory=dict)
    """By node: how ranks there hold the model, instead of `quantisation`."""
    engines: Mapping[str, str] = Field(default_factory=dict)
    """By node: what computes ranks there, instead of `engine`."""
    engine_options: Mapping[str, str] = Field(default_factory=dict)
    """Settings of `engine` by name, for ranks that have it; an engine refuses those that it does not know."""
    draft_model: str = ""
    """A small model with the same tokenizer, found as `model` is, that guesses tokens on rank 0; ``own``: the model's
    own head, which some have to predict tokens further ahead; empty: none."""
    draft_engine: str = ""
    """What computes the draft model; empty: what computes rank 0."""
    adapters: Annotated[int, Field(strict=True, ge=0, le=MAX_ADAPTERS)] = 0
    """LoRA adapters that every rank has room for at a time; more may be known, and take turns. 0: none are."""
    adapter_rank: Annotated[int, Field(strict=True, ge=1, le=MAX_ADAPTER_RANK)] = 64
    """The largest rank that there is room for in each."""
    wire: Wire = "fp32"
    """How sums, and rows for experts, travel between ranks."""
    threads: Annotated[int, Field(strict=True, ge=0, le=1024)] = 0
    """Compute threads of every rank; 0: its daemon decides."""
    exact: StrictBool = False
    """The answers have the same bits for every split and batch."""
    recover: StrictBool = True
    """When a rank is lost, go on with the nodes that are left, whichever the request names; else the session ends."""
    experts: Layout = "auto"
    """How experts are laid out; see `motley.orchestrator.planning.experts.layout`."""
    replicas: Annotated[int, Field(strict=True, ge=1, le=MAX_RANKS)] = 1
    """Nodes that have each expert, where experts are parallel."""
    trunk: Annotated[int, Field(strict=True, ge=1, le=MAX_TRUNK)] = 1
    """Ranks of the rest of the model, where experts are parallel."""

    @property
    def places(self) -> list[Place]:
        """The place of every rank that `nodes` names."""
        return list(map(place_of, self.nodes))

    @property
    def named(self) -> set[str]:
        """Nodes whose ranks have an engine or a quantisation of their own."""
        return {*self.quantisations, *self.engines, *(place.node for place in self.places if place.engine)}

    @property
    def all_named(self) -> set[str]:
        """Nodes that it says anything of."""
        return {place.node for place in self.places} | self.named

    def engine_at(self, place: Place) -> str:
        """The engine of a rank there. Where a node has several ranks, ``auto`` is the processor's."""
        engine = place.engine or self.engines.get(place.node, self.engine)
        several = [each.node for each in self.places].count(place.node) > 1
        return ON_PROCESSOR if engine == AUTO and several else engine

    @property
    def expert_engine(self) -> str:
        """The engine of experts on nodes of their own."""
        return ON_PROCESSOR if self.engine == AUTO else self.engine

    def options_of(self, engine: str) -> Mapping[str, str]:
        """The settings of ranks with an engine: none, where it is another than `engine` of the request."""
        return self.engine_options if engine == self.engine else {}

    @property
    def has_own_head(self) -> bool:
        """Whether the model's own head is to guess tokens."""
        return self.draft_model == OWN_HEAD

    @property
    def asking_for_parallel(self) -> list[str]:
        """The fields that ask for parallel experts; empty: the request leaves the layout open, or wants it sliced."""
        asked = {"experts": self.experts == "parallel", "replicas": self.replicas > 1, "trunk": self.trunk > 1}
        return [name for name, asks in asked.items() if asks]

    @property
    def wants_parallel(self) -> bool:
        """Whether it asks for parallel experts, so that a session without them is none."""
        return bool(self.asking_for_parallel)

    @property
    def wants_stages(self) -> bool:
        """Whether it asks for several stages."""
        return self.stages not in (0, 1)

    def check(self) -> None:
        """Refuse what cannot be asked for together, whatever the model and the nodes are.

        Raises:
            ContradictionError: two fields exclude each other.
        """
        if self.experts == "sliced" and self.wants_parallel:
            raise ContradictionError(
                self.asking_for_parallel[0], "is for experts on nodes of their own: leave out experts 'sliced'"
            )
        if self.shares and self.wants_parallel:
            raise ContradictionError(
                "shares", "are of sliced experts; where experts are on nodes of their own, leave them out"
            )
        self._check_stages()
        if self.draft_engine and not self.draft_model:
            raise ContradictionError("draft_engine", "is for a draft model: say which, or leave it out")
        if self.draft_model and self.wants_parallel:
            raise ContradictionError(
                "draft_model", "is for sessions whose experts are in the ranks' shares: leave it out"
            )
        if self.embeddings and self.draft_model:
            raise ContradictionError("draft_model", "guesses tokens of answers, and embeddings have none: leave it out")
        if self.has_own_head and self.wants_stages:
            raise ContradictionError(
                "stages",
                "are without the model's own head, which guesses on the first node and reads what the last layers make:"
                " leave stages out, or take another draft model",
            )
        if self.embeddings and self.keep_prefixes:
            raise ContradictionError(
                "keep_prefixes", "is for answers, and an embedding is made of all of its text: leave it out"
            )
        if self.cache_node_tokens and self.wants_parallel:
            raise ContradictionError(
                "cache_node_tokens",
                "is not for experts on nodes of their own: leave it out, or ask for sliced ones",
            )
        if self.engine_options and self.engine == AUTO:
            raise ContradictionError("engine_options", f"are of one engine: name it, as engine {ON_PROCESSOR!r}")
        placed = [place for place in self.places if place.engine]
        if placed and self.wants_parallel:
            raise ContradictionError(
                "nodes",
                f"give the rank on {placed[0].node!r} an engine of its own, which is for sliced experts: use engines",
            )
        if not self.exact:
            return
        if self.wire != "fp32":
            raise ContradictionError(
                "wire", f"{self.wire!r} rounds sums by rank, which exact=true forbids: leave it out"
            )
        if self.engine in INEXACT:
            raise ContradictionError("engine", f"{self.engine!r} cannot keep exact=true; use engine 'onnxruntime'")
        for name, whole, own in (
            ("quantisations", self.quantisation, self.quantisations),
            ("engines", self.expert_engine, self.engines),
        ):
            for node, unlike in own.items():
                if unlike != whole:
                    raise ContradictionError(
                        name, f"of node {node!r} is {unlike!r}, of others {whole!r}: exact=true needs the same on all"
                    )

        for place in placed:
            if place.engine != self.expert_engine:
                raise ContradictionError(
                    "nodes",
                    f"have engine {place.engine!r} on {place.node!r}, {self.expert_engine!r} elsewhere:"
                    " exact=true needs the same on all",
                )

    def _check_stages(self) -> None:
        """
        Raises:
            ContradictionError: stages are asked for that there cannot be.
        """
        if not self.wants_stages:
            return
        for field in self.asking_for_parallel:
            raise ContradictionError(field, "is for experts on nodes of their own, which ranks in stages cannot have")
        if self.shares:
            raise ContradictionError("shares", "are of every layer, and cannot be given for stages: leave one out")
        if isinstance(self.stages, tuple) and sum(self.stages) != len(self.nodes):
            told = f"are of {sum(self.stages)} ranks, and nodes names {len(self.nodes)}: name one for each rank"
            raise ContradictionError("stages", told)
        if isinstance(self.stages, int) and 0 < len(self.nodes) < self.stages:
            raise ContradictionError("stages", f"of {self.stages} need as many nodes: {len(self.nodes)} are named")

    def to_json(self) -> dict[str, Any]:
        """All fields, as JSON has them."""
        plain = {own.name: getattr(self, own.name) for own in fields(self)}
        return {
            name: list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            for name, value in plain.items()
        }

    def body(self) -> dict[str, Any]:
        """The body of ``POST /api/sessions`` that asks for this: what has its default is left out."""
        default = SessionRequest(self.model).to_json()
        told = self.to_json()
        return {name: told[name] for name in told if name == "model" or told[name] != default[name]}
