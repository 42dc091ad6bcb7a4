"""What an engine is: it computes one rank's graph, and hands every collective to the transport.

A rank's graph is one ONNX model (opset 24). It has standard operators, functions of domain ``motley``, and the nodes
``motley.DistCollective`` and ``motley.Experts``. The functions' bodies are standard operators, so that an engine that
does not know a function can inline it.

``motley.DistCollective`` exchanges values f32[T, ...] between ranks. ``all_reduce`` gives the sum of every rank's
operand. ``all_gather`` gives the operands of all ranks, by rank; rank r has ``counts[r]`` of them, all equally wide.

``motley.Experts`` has the operands x: f32[T, D], weights: f32[T, K], chosen: i64[T, K] and, if there is something to
add to, base: f32[T, D]. Its attribute ``experts`` holds graphs f32[N, D] -> f32[N, D] of standard operators, which read
weights from the graph around them. Row t of the result is
``base[t] + sum of weights[t, k] * experts[chosen[t, k]](x[t])`` over k, added in the order of the experts' numbers. An
engine computes only experts that were chosen, on their rows (`motley.plugins.mixture`). If the graphs of the experts
have several outputs, the node has as many results, and as many bases or none. If the node has the attribute ``layer``
in place of ``experts``, the experts are on other machines, and `Collectives.experts` computes them.

A value that is read on the other side of a collective or of an Experts node is f32[T, D], unless the graph's
``value_info`` declares it. The graph's inputs and outputs have these names:

=====================  =======================  ==============================================================
``hidden``             f32[T, D]                embeddings of this step's T tokens, replicated
``position``           i64[1]                   tokens already in the cache: row t stands at ``position + t``
``rows``               i64[R]                   which of the T rows get logits
``cos_cache.{rope}``   f32[P, rotary/2]         the tables of a rotary embedding, see `RankGraph.constants`; attention
``sin_cache.{rope}``   f32[P, rotary/2]         names those that it rotates by
``key_cache.{layer}``  f32[1, H, C, head_dim]   KV cache of this rank's H KV heads, capacity C (absent if H = 0);
``value_cache.{layer}``                         updated to the outputs ``key_cache.{layer}.out``, ...
``logits``             f32[R, V]{tp}            output: this rank's slice of the vocabulary (absent if V = 0)
=====================  =======================  ==============================================================

Weights are initializers stored as ONNX external data in the *share file*, so that an engine can map it.

- Quantised ones are ``DequantizeLinear`` feeding ``Gemm(transB=1)``: uint4 or uint8 in blocks along K. The zero point
  is one constant, or an initializer with one per block, whose rows are whole bytes.
- FP16 ones are ``Cast`` feeding ``Gemm(transB=1)``; only engines that keep FP16 get them (`keeps_fp16`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import onnx

from motley.plugins.mixture import Compute

F32 = npt.NDArray[np.float32]
T = TypeVar("T")

DOMAIN = "motley"


class EngineError(Exception):
    """An engine cannot do what was asked; the message names the engine, what, and what to do."""


class EngineMemoryError(EngineError):
    """The device that an engine computes on has too little memory for what was asked."""


ROW_TILE = 16
"""Kernels take rows by twos or fours, and may round a last odd row otherwise. If a chunk is cut at a multiple of this
number, every row meets the same kernel as in the whole chunk."""


def micro_chunks(rows: int, halved: bool) -> list[slice]:
    """Cut the rows of a step into those that go through the graph together: all of them, or two halves.

    The cut is the same on every rank: at each collective, every engine has one sum for each of the chunks, in this
    order.
    """
    cut = rows // 2 // ROW_TILE * ROW_TILE if halved else 0
    return [slice(0, cut), slice(cut, rows)] if cut else [slice(0, rows)]


class Pending(Protocol):
    """A collective that has been started."""

    def finish(self) -> None:
        """Wait until the result is there."""


class Collectives(Protocol):
    """The part of the transport that a graph can meet."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, buffer: npt.NDArray[Any]) -> None:
        """Sum `buffer` over all ranks in place, in rank order, so that every rank holds the same bits."""

    def all_reduce_start(self, buffer: npt.NDArray[Any]) -> Pending:
        """Begin an `all_reduce`, so that something else can be computed meanwhile.

        Until it is finished, `buffer` must not be touched and no other collective may be started.
        """

    def all_gather(self, local: npt.NDArray[Any], out: Sequence[npt.NDArray[Any]]) -> None:
        """Copy the array of each rank r to ``out[r]``; arrays of different ranks may have different sizes.

        `local` is this rank's array, and may be ``out[rank]`` itself.
        """

    def experts(self, layer: int) -> Compute:
        """Give what computes the experts of a layer that are on other machines.

        All ranks call it for the same rows in the same order, one chunk of `micro_chunks` at a time. Results are valid
        until the next call.
        """


def transport(collectives: Collectives) -> Collectives:
    """Where collectives go at this moment.

    A rank that is being examined before it serves is given a stand-in, which leads to the session's transport later:
    its attribute ``now`` says to which of them.
    """
    now: Collectives | None = getattr(collectives, "now", None)
    return collectives if now is None else transport(now)


@dataclass(frozen=True)
class CacheSpec:
    """The KV cache of one layer on this rank."""

    layer: int
    heads: int
    head_dim: int


@dataclass(frozen=True)
class RankGraph:
    """One rank's graph with all that an engine needs to run it."""

    proto: onnx.ModelProto
    share_file: Path
    constants: Callable[[int], Mapping[str, F32]]
    """Graph inputs that stay the same for a whole sequence (its rotary tables), by the length of its prompt."""
    caches: Sequence[CacheSpec]
    hidden: int
    """D, the width of the residual."""
    vocabulary: int
    """V, the rows of this rank's slice of the head; may be 0."""
    context: int
    """The longest sequence that will ever be in one slot."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is to be opened."""

    threads: int = 1
    """Compute threads of this rank."""
    max_rows: int = 256
    """The most rows T a step may have (a prefill chunk), the same on every rank."""
    exact: bool = False
    """Promise that a row's bits depend neither on the rows that share its step nor on where columns are cut. An engine
    that cannot refuses."""
    floats: bool = True
    """Whether any matrix is held as floats, be it a router. In exact mode it is the same on every rank."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Settings of this engine alone, by name, see `check_extra`."""

    def check_extra(self, engine: str, *known: str) -> None:
        """Make sure that an engine knows all settings in `extra`.

        Raises:
            EngineError: it does not.
        """
        if unknown := sorted(set(self.extra) - set(known)):
            raise EngineError(
                f"engine {engine!r} has no option {', '.join(unknown)}; it has: {', '.join(known) or 'none'}"
            )


class Engine(Protocol):
    """One rank's executable graph with the KV caches of its slots. Not thread-safe: one thread owns it."""

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        """Start an empty sequence in `slot`. Its cache grows with it.

        Args:
            prompt: tokens that its prompt will have, which some rotary tables depend on.
        """

    def close_slot(self, slot: int) -> None:
        """Forget `slot` and free its cache."""

    def reserve(self, slot: int, tokens: int) -> None:
        """Have the cache of `slot` take so many tokens, without a collective.

        A step makes what room it lacks by itself. But there the other ranks are already waiting for its sums, and an
        engine that has no memory for it ends the session.

        Raises:
            MemoryError, EngineMemoryError: there is no memory for them; the sequence is as it was.
            EngineError: the slot is not open, or these are more than the context.
        """

    def skip(self, slot: int, position: int) -> None:
        """Let the sequence in `slot` go on at `position`: tokens up to there have keys and values of zero.

        Raises:
            EngineError: the slot is not open, or the position is among its tokens or beyond the context.
        """

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        """Run T tokens of the sequence in `slot` through the graph.

        Args:
            hidden: f32[T, D], 1 <= T <= max_rows; may be overwritten.
            position: of the first token; at most as many as the slot holds, which are ``position + T`` afterwards. Less
                is a rewind.
            rows: the rows whose logits are wanted; empty skips the head.
            halved: take the tokens in two `micro_chunks`, so that the collectives of one can hide behind the
                computing of the other. The result is the same.

        Returns:
            f32[R, V]{tp}: logits of this rank's vocabulary slice, valid until the next step.

        Raises:
            EngineError: T, the position or the slot is out of range.
            motley.transport.TransportError: a collective failed.
        """

    @property
    def most_sequences(self) -> int:
        """How many sequences one `decode` may have."""

    def decode(self, slots: Sequence[int], hidden: F32, positions: Sequence[int]) -> F32:
        """Run one token of each of some sequences through the graph, as the rows of one step.

        Weights are read once for all of them, and there is one collective where a step of one token has one.

        Args:
            slots: B different ones, at most `most_sequences`.
            hidden: f32[B, D]; may be overwritten.
            positions: as in `step`.

        Returns:
            f32[B, V]{tp}: logits of this rank's vocabulary slice, valid until the next step.

        Raises: as `step`.
        """

    def close(self) -> None:
        """Free everything; the engine cannot be used again."""


class OneByOne:
    """`Engine.decode` of an engine that takes one sequence at a time."""

    most_sequences = 1

    def decode(self: Engine, slots: Sequence[int], hidden: F32, positions: Sequence[int]) -> F32:
        (slot,), (position,) = slots, positions
        return self.step(slot, hidden, position, [0])


EngineFactory = Callable[[RankGraph, Collectives, EngineOptions], Engine]


@dataclass(frozen=True)
class EngineKind(Generic[T]):
    """The engines of one kind: those that are installed in an entry-point group.

    Attributes:
        group: the name of the group.
        what: what one of them is called in messages.
    """

    group: str
    what: str

    def names(self) -> list[str]:
        return sorted(point.name for point in entry_points(group=self.group))

    def load(self, name: str) -> T:
        """Find one by its entry-point name.

        Raises:
            EngineError: no such engine, or it lacks a package it needs.
        """
        for point in entry_points(group=self.group, name=name):
            try:
                factory: T = point.load()
            except ImportError as error:
                raise EngineError(f"{self.what} {name!r} needs a package that is missing: {error}") from error
            return factory
        raise EngineError(f"no {self.what} is called {name!r}; installed: {', '.join(self.names()) or 'none'}")


ENGINES: EngineKind[EngineFactory] = EngineKind("motley.engines", "engine")
engine_names, load_engine = ENGINES.names, ENGINES.load


def keeps_fp16(name: str) -> bool:
    """Whether an engine holds FP16 matrices as they are: then its class has ``keeps_fp16 = True``.

    Raises:
        EngineError: as `load_engine`.
    """
    return getattr(load_engine(name), "keeps_fp16", False)


def on_gpu(name: str, extra: Mapping[str, str] | None = None) -> bool:
    """Whether an engine with these settings (`EngineOptions.extra`) computes on a GPU, in its memory.

    Engines that always do say so: ``on_gpu = True`` in their class. Those that can do either have the setting
    ``device``, with ``cuda`` for the GPU.

    Raises:
        EngineError: as `load_engine`.
    """
    return getattr(load_engine(name), "on_gpu", False) or (extra or {}).get("device") == "cuda"


def lacking(name: str) -> str:
    """Why an engine cannot run on this machine; empty: nothing is known to be in its way.

    Engines that need more than their packages find out in a function ``check_machine`` of their class, which raises
    `EngineError`.
    """
    try:
        check: Callable[[], None] | None = getattr(load_engine(name), "check_machine", None)
        if check is not None:
            check()
    except EngineError as error:
        return str(error)
    return ""
