"""What a client asks a session to be: every field once, with its default and the values that it may have. Pure.

The HTTP API reads a request by this description and tells it back by it, and `motley run` fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from motley.protocol import BLOCKS, MAX_RANKS, MAX_TRUNK

QUANTISATIONS = ("fp32", "fp16", "int8", "int4", "stored")
LAYOUTS = ("auto", "sliced", "parallel")
"""Of experts; see `motley.orchestrator.planning.layout`."""
WIRES = ("fp32", "bf16", "int8")
CACHE_FORMATS = ("fp32", "fp16", "int8")
"""What keys and values are kept as; every engine knows the first."""
MAX_SEQUENCES = 256
MAX_QUEUE = 4096
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


@dataclass(frozen=True)
class Text:
    """A field that is a string, and one of `choices` if there are any."""

    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Integer:
    """A field that is an integer from `low` to `high`, and one of `choices` if there are any."""

    low: int
    high: int
    choices: tuple[int, ...] = ()


@dataclass(frozen=True)
class Flag:
    """A field that is true or false."""


@dataclass(frozen=True)
class NodeNames:
    """A field that is a list of nodes, one per rank, as `place_of` reads them."""


@dataclass(frozen=True)
class Weights:
    """A field that is a list of numbers, one per rank."""


@dataclass(frozen=True)
class ByNode:
    """A field that is an object from node names to strings, each one of `choices` if there are any."""

    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """A field that is an object from names of settings to strings."""


Kind = Text | Integer | Flag | NodeNames | Weights | ByNode | Settings


def _kind(kind: Kind) -> dict[str, Kind]:
    return {"kind": kind}


class Place(NamedTuple):
    """The node of a rank, and the engine that the rank has; empty: the one that the request has for the node."""

    node: str
    engine: str


def place_of(named: str) -> Place:
    """Read where a rank is to be: ``webgpu@pc`` is node ``pc`` with engine ``webgpu``, ``pc`` leaves the engine open.
    No node has an ``@`` in its name."""
    engine, at, node = named.rpartition("@")
    return Place(node, engine) if at else Place(named, "")


@dataclass(frozen=True)
class SessionRequest:
    """What a client asks for with ``POST /api/sessions``. A field that it leaves out has its default."""

    model: str = field(metadata=_kind(Text()))
    """A local folder, a GGUF file, or a hub id (``owner/name``)."""
    name: str = field(default="", metadata=_kind(Text()))
    """What clients call the model; empty: as the model calls itself."""
    quantisation: str = field(default="stored", metadata=_kind(Text(QUANTISATIONS)))
    block: int = field(default=128, metadata=_kind(Integer(BLOCKS[0], BLOCKS[-1], BLOCKS)))
    """Weights that share a scale, where they are quantised while loading."""
    nodes: tuple[str, ...] = field(default=(), metadata=_kind(NodeNames()))
    """The node of every rank, by rank, with an engine as `place_of` reads it if the rank has one of its own: with
    ``pc`` and ``webgpu@pc`` a node has a rank on its processor and one on its GPU. Empty: all nodes that are there, the
    fastest first."""
    shares: tuple[float, ...] = field(default=(), metadata=_kind(Weights()))
    """The weight of every rank's share, by rank; empty: by speed and memory."""
    context: int = field(default=0, metadata=_kind(Integer(1, 2**31)))
    """Tokens that prompt and answer have together; 0: a default, or what the model allows if that is less."""
    cache_tokens: int = field(default=0, metadata=_kind(Integer(1, 2**31)))
    """Tokens that all requests together may have in the KV caches, at least one context; 0: just one."""
    cache_disk_tokens: int = field(default=0, metadata=_kind(Integer(0, 2**31)))
    """Tokens that they may have besides on every rank's disk; a context may be as long as both together."""
    cache_node_tokens: int = field(default=0, metadata=_kind(Integer(0, 2**31)))
    """Tokens that they may have besides in the memory of nodes with room to spare, which attend to these for the ranks;
    a context may be as long as both together."""
    cache_format: str = field(default=CACHE_FORMATS[0], metadata=_kind(Text(CACHE_FORMATS)))
    """What keys and values are kept as in the KV caches of every rank."""
    sequences: int = field(default=64, metadata=_kind(Integer(1, MAX_SEQUENCES)))
    """Requests that are under way at a time; others wait."""
    queue: int = field(default=256, metadata=_kind(Integer(0, MAX_QUEUE)))
    """Requests that may wait beside those; what comes then is refused."""
    engine: str = field(default="onnxruntime", metadata=_kind(Text()))
    quantisations: Mapping[str, str] = field(default_factory=dict, metadata=_kind(ByNode(QUANTISATIONS)))
    """By node: how ranks there hold the model, instead of `quantisation`."""
    engines: Mapping[str, str] = field(default_factory=dict, metadata=_kind(ByNode()))
    """By node: what computes ranks there, instead of `engine`."""
    engine_options: Mapping[str, str] = field(default_factory=dict, metadata=_kind(Settings()))
    """Settings of `engine` by name, for ranks that have it; an engine refuses those that it does not know."""
    draft_model: str = field(default="", metadata=_kind(Text()))
    """A small model with the same tokenizer, found as `model` is, that guesses tokens on rank 0; empty: none."""
    draft_engine: str = field(default="", metadata=_kind(Text()))
    """What computes the draft model; empty: what computes rank 0."""
    wire: str = field(default="fp32", metadata=_kind(Text(WIRES)))
    """How sums, and rows for experts, travel between ranks."""
    threads: int = field(default=0, metadata=_kind(Integer(1, 1024)))
    """Compute threads of every rank; 0: its daemon decides."""
    exact: bool = field(default=False, metadata=_kind(Flag()))
    """The answers have the same bits for every split and batch."""
    experts: str = field(default="auto", metadata=_kind(Text(LAYOUTS)))
    """How experts are laid out; see `motley.orchestrator.planning.layout`."""
    replicas: int = field(default=1, metadata=_kind(Integer(1, MAX_RANKS)))
    """Nodes that have each expert, where experts are parallel."""
    trunk: int = field(default=1, metadata=_kind(Integer(1, MAX_TRUNK)))
    """Ranks of the rest of the model, where experts are parallel."""

    @property
    def places(self) -> list[Place]:
        """The place of every rank that `nodes` names."""
        return list(map(place_of, self.nodes))

    @property
    def named(self) -> set[str]:
        """Nodes whose ranks have an engine or a quantisation of their own."""
        return {*self.quantisations, *self.engines, *(place.node for place in self.places if place.engine)}

    def engine_at(self, place: Place) -> str:
        """The engine of a rank there."""
        return place.engine or self.engines.get(place.node, self.engine)

    def options_of(self, engine: str) -> Mapping[str, str]:
        """The settings of ranks with an engine: none, where it is another than `engine` of the request."""
        return self.engine_options if engine == self.engine else {}

    @property
    def asking_for_parallel(self) -> list[str]:
        """The fields that ask for parallel experts; empty: the request leaves the layout open, or wants it sliced."""
        asked = {"experts": self.experts == "parallel", "replicas": self.replicas > 1, "trunk": self.trunk > 1}
        return [name for name, asks in asked.items() if asks]

    @property
    def wants_parallel(self) -> bool:
        """Whether it asks for parallel experts, so that a session without them is none."""
        return bool(self.asking_for_parallel)

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
        if self.draft_engine and not self.draft_model:
            raise ContradictionError("draft_engine", "is for a draft model: say which, or leave it out")
        if self.draft_model and self.wants_parallel:
            raise ContradictionError(
                "draft_model", "is for sessions whose experts are in the ranks' shares: leave it out"
            )
        if self.cache_node_tokens and self.cache_disk_tokens:
            raise ContradictionError(
                "cache_node_tokens", "and cache_disk_tokens exclude each other: leave one of them out"
            )
        if self.cache_node_tokens and self.wants_parallel:
            raise ContradictionError(
                "cache_node_tokens",
                "is not for experts on nodes of their own: leave it out, or ask for sliced ones",
            )
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
            ("engines", self.engine, self.engines),
        ):
            for node, unlike in own.items():
                if unlike != whole:
                    raise ContradictionError(
                        name, f"of node {node!r} is {unlike!r}, of others {whole!r}: exact=true needs the same on all"
                    )

        for place in placed:
            if place.engine != self.engine:
                raise ContradictionError(
                    "nodes",
                    f"have engine {place.engine!r} on {place.node!r}, {self.engine!r} elsewhere: exact=true needs the"
                    " same on all",
                )

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


def kinds() -> dict[str, Kind]:
    """Of every field, what it may be, by the field's name."""
    return {own.name: own.metadata["kind"] for own in fields(SessionRequest)}
