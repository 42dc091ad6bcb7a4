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

``motley.Adapted`` adds what adapters make of a product, and is stated in `motley.plugins.adapted_engine`. The
operators of layers with a recurrent state are stated in `motley.plugins.recurrent`.

A value that is read on the other side of a collective or of an Experts node is f32[T, D], unless the graph's
``value_info`` declares it. The graph's inputs and outputs have these names:

=====================  =======================  ==============================================================
``hidden``             f32[T, D]                embeddings of this step's T tokens, replicated; or the residual of a
                                                layer, where the graph has only the layers that follow it
``position``           i64[1]                   of a span: where its first row stands; its others follow
``rows``               i64[R]                   which of the T rows get logits
``cos_cache.{rope}``   f32[P, rotary/2]         the tables of a rotary embedding, see `RankGraph.constants`; attention
``sin_cache.{rope}``   f32[P, rotary/2]         names those that it rotates by
``key_cache.{layer}``  f32[1, H, C, head_dim]   of a span: what its sequence has in the blocks of this rank's H KV
``value_cache.{layer}``                         heads, C positions (absent if H = 0, or where the keys are the values);
                                                updated to the outputs ``key_cache.{layer}.out``, ...
``index_cache.{layer}``  f32[1, 1, C, d]        likewise the index keys by which positions are chosen
``logits``             f32[R, V]{tp}            output: this rank's slice of the vocabulary (absent if V = 0); or, of
                                                a graph without the last layers, the residual, replicated: V = D then;
                                                of a rank whose model has its own head guess tokens, D columns more
=====================  =======================  ==============================================================

A step has rows of several sequences, a `Span` of each. Everything is computed for all rows alike, but attention: each
span's rows attend to the keys and values of their own sequence. These lie in *blocks*, of which an engine has a fixed
number, allocated when it is opened (`CacheBlocks`). Whoever calls the engine decides which blocks a sequence has; an
engine keeps nothing else of a sequence, but its state where a model has recurrent layers.

Weights are initializers stored as ONNX external data in the *share file*, so that an engine can map it.

- Quantised ones are ``DequantizeLinear`` feeding ``Gemm(transB=1)``: uint4 or uint8 in blocks along K. The zero point
  is one constant, or an initializer with one per block, whose rows are whole bytes.
- FP16 ones are ``Cast`` feeding ``Gemm(transB=1)``; only engines that keep FP16 get them, see
  `motley.plugins.installed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import onnx

from motley.plugins.block_holder import BlockHolder
from motley.plugins.mixture import Compute
from motley.plugins.recurrent import StateSpec

F32 = npt.NDArray[np.float32]

DOMAIN = "motley"
SCALES = ".scales"
"""What the array of a cache's scales is called after the cache, where it is int8."""
CACHE_FORMATS = ("fp32", "fp16", "int8")
"""What keys and values can be kept as; every engine knows the first."""


class EngineError(Exception):
    """An engine cannot do what was asked; the message names the engine, what, and what to do."""


class EngineMemoryError(EngineError):
    """The device that an engine computes on has too little memory for what was asked."""


class EngineLostError(EngineError):
    """The device that an engine computes on is there no more for this process; another one may open it anew."""


ROW_TILE = 16
"""Kernels take rows by twos or fours, and may round a last odd row otherwise. If a step is cut at a multiple of this
number, every row meets the same kernel as in the whole step."""


def micro_chunks(rows: int, halved: bool) -> list[slice]:
    """Cut the rows of a step into those that go through the graph together: all of them, or two halves.

    The cut is the same on every rank: at each collective, every engine has one sum for each of the chunks, in this
    order.
    """
    half = rows // 2
    cut = (half // ROW_TILE * ROW_TILE or half) if halved else 0
    return [slice(0, cut), slice(cut, rows)] if cut else [slice(0, rows)]


class Pending(Protocol):
    """A collective that has been started."""

    def advance(self) -> None:
        """Let what has come be passed on, if others wait for that; to be called now and then while computing, on the
        one that was started first. Never waits."""

    def finish(self) -> None:
        """Wait until the result is there."""


@dataclass(frozen=True)
class FormatSpeed:
    """How fast products are with weights in one format.

    Attributes:
        format: ``int4``, ``int8``, ``fp16`` or ``fp32``.
        bytes_per_s: weights read, one row at a time.
        row_bytes_per_s: weights read, times the rows that they are multiplied by, many at a time.
    """

    format: str
    bytes_per_s: float
    row_bytes_per_s: float


@dataclass(frozen=True)
class DeviceSpeed:
    """How fast an engine is on a GPU; what is 0, or missing, nobody knows.

    Attributes:
        memory_bandwidth: bytes of weights that it reads each second, of floats.
        layer_s: seconds that a layer takes for a row besides reading its weights: its small operations.
        host_s: seconds in which what is summed gets to the host and back.
        speeds: of products, in formats that were measured.
    """

    memory_bandwidth: float = 0.0
    layer_s: float = 0.0
    host_s: float = 0.0
    speeds: Sequence[FormatSpeed] = ()


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

        Until it is finished, `buffer` must not be touched. One more may be started meanwhile, and is finished after it;
        no other collective may be called.
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
    """The KV cache of one layer on this rank, or that of its index keys."""

    layer: int
    heads: int
    head_dim: int
    window: int = 0
    """How many positions a row sees, its own among them; 0: all."""
    keys_alone: bool = False
    """The keys are the values too, so there is no cache of values."""
    index: bool = False
    """It is of the keys by which positions are chosen; there are no values to these."""

    @property
    def names(self) -> tuple[str, ...]:
        """What a graph calls its caches: that of keys, and that of values if there is one."""
        kinds = ("index",) if self.index else ("key",) if self.keys_alone else ("key", "value")
        return tuple(f"{kind}_cache.{self.layer}" for kind in kinds)


def is_alone(collectives: Collectives) -> bool:
    """Whether what a rank sums at this moment is the sum already, and nobody has to be given it: it has no others. A
    stand-in that examines a rank is given every sum: its attribute ``examines`` is true."""
    own = transport(collectives)
    return own.size == 1 and not getattr(own, "examines", False)


@dataclass(frozen=True)
class CacheBlocks:
    """The blocks in which an engine keeps keys and values, of each layer and KV head alike.

    Layers whose rows see a window may have blocks of their own, fewer: a sequence needs those of its latest positions.

    Attributes:
        count: how many there are in the memory that the engine computes in, for all sequences together. At first they
            are zero.
        tokens: positions in each.
        format: one of `CACHE_FORMATS`. Keys and values are rounded when they are written, also for the rows of the step
            that writes them: ``fp16`` to nearest, half to even; ``int8`` to a scale for each token and head and codes,
            as attention.c states it.
        far: how many blocks there are besides, elsewhere. Their numbers follow. They are only read.
        held: how many of these, the last ones, another machine keeps (`BlockHolder`); the others are in `FarBlocks`.
        windowed: how many blocks a layer with a window has in place of all these; 0: it has the same as other layers.
        window: the widest window of such layers, in positions.
        slots: how many sequences can have a recurrent state at a time, where a model has any.
        snapshots: how many more states there is room for, to begin with; their numbers follow those of the slots.
    """

    count: int
    tokens: int
    format: str = "fp32"
    far: int = 0
    windowed: int = 0
    window: int = 0
    slots: int = 1
    snapshots: int = 0
    held: int = 0

    @property
    def on_disk(self) -> int:
        """How many far blocks no other machine keeps."""
        return self.far - self.held

    @property
    def first_held(self) -> int:
        """The number of the first block that another machine keeps, if one does."""
        return self.count + self.on_disk

    @property
    def states(self) -> int:
        """How many recurrent states of a layer there is room for."""
        return self.slots + self.snapshots

    def is_windowed(self, spec: CacheSpec) -> bool:
        """Whether a layer has the blocks of layers with a window."""
        return bool(self.windowed and spec.window)

    def count_of(self, spec: CacheSpec) -> int:
        """How many blocks a layer has in the memory that the engine computes in."""
        return self.windowed if self.is_windowed(spec) else self.count

    def movable(self, caches: Iterable[CacheSpec]) -> list[CacheSpec]:
        """The layers, of those given, whose blocks can be far."""
        return [spec for spec in caches if not self.is_windowed(spec)]

    def arrays(self, caches: Iterable[CacheSpec]) -> dict[str, tuple[tuple[int, ...], npt.DTypeLike]]:
        """What a block holds of some layers, as arrays: the shape and the type of each, by name.

        Keys and values are [H, tokens, d], by the names that the graph has for them; scales of int8 are
        f32[H, tokens], by that name and `SCALES`.
        """
        kept = {"fp32": np.float32, "fp16": np.float16, "int8": np.int8}[self.format]
        arrays: dict[str, tuple[tuple[int, ...], npt.DTypeLike]] = {}
        for spec in caches:
            for name in spec.names:
                arrays[name] = (spec.heads, self.tokens, spec.head_dim), kept
                if self.format == "int8":
                    arrays[f"{name}{SCALES}"] = (spec.heads, self.tokens), np.float32
        return arrays

    def bytes_of(self, caches: Iterable[CacheSpec]) -> int:
        """Bytes of all blocks of some layers, without far ones."""
        return sum(
            self.count_of(spec) * self.tokens * len(spec.names) * spec.heads * cached_bytes(self.format, spec.head_dim)
            for spec in caches
        )

    def check_able(
        self, engine: str, formats: Sequence[str], reads_far_blocks: bool = False, keeps_windows: bool = False
    ) -> None:
        """Make sure that an engine can keep keys and values like that.

        Args:
            formats: that it can keep them in.
            reads_far_blocks: whether it can have far ones.
            keeps_windows: whether layers with a window can have fewer.

        Raises:
            EngineError: it cannot.
        """
        if self.windowed and not keeps_windows:
            raise EngineError(
                f"engine {engine!r} cannot give layers with a window fewer blocks than others; plan the session anew"
            )
        if self.on_disk and not reads_far_blocks:
            raise EngineError(
                f"engine {engine!r} cannot keep KV caches on a disk; ask for none there, or for another engine"
            )
        if self.format not in formats:
            raise EngineError(
                f"engine {engine!r} cannot keep KV caches as {self.format!r}; it can as: {', '.join(formats)}. Ask for"
                " another cache format, or for another engine"
            )


class FarBlocks(Protocol):
    """A rank's cache blocks that are not in the memory which its engine computes in, but on a disk, say.

    They have the arrays of `CacheBlocks.arrays`. An engine writes a whole block here when it is told to move it, and
    reads it where it is.
    """

    def read(self, name: str) -> npt.NDArray[Any]:
        """Give one array of all far blocks, C-contiguous: [far, *shape]. What is written shows in it."""

    def write(self, name: str, number: int, values: npt.NDArray[Any]) -> None:
        """Keep one array of a far block.

        Args:
            number: of the block, the first far one being 0.
            values: C-contiguous, of the array's shape and type.

        Raises:
            OSError: it cannot be written.
        """


def cached_bytes(cache_format: str, head_dim: int) -> int:
    """Bytes that the keys of one token's head take in one of `CACHE_FORMATS`; its values take as many."""
    return {"fp32": 4 * head_dim, "fp16": 2 * head_dim, "int8": head_dim + 4}[cache_format]


class Span(NamedTuple):
    """Consecutive tokens of one sequence, as rows of a step: one that was just chosen, a piece of a prompt, a draft.

    Attributes:
        blocks: i32[N], C-contiguous; the keys and values of position p are in block ``blocks[p // tokens]`` of
            `CacheBlocks`, in its place ``p % tokens``. It has as many as the span's last position needs, or more; block
            numbers are valid, and none is far that the span's rows go to: the caller has seen to that.
        position: where the first of the rows stands. All positions before it are in the blocks.
        rows: how many they are. Their keys and values go to the blocks.
        wanted: of how many of them the logits are wanted: of the last ones.
        prompt: how long the sequence's prompt is, in tokens, for rotary tables that depend on it
            (`RankGraph.constants`).
        windowed: as `blocks`, of layers that have blocks of their own (`CacheBlocks.windowed`); None: there are none.
            Those of positions that none of the rows sees there have any numbers, also below 0.
        adapter: the slot of the adapter that the rows are computed with, 1 to `RankGraph.adapters`; 0: none.
        slot: where the sequence's recurrent states are, where a model has any. They are zero at position 0, and else
            what the rows before have left there; whoever calls does not leave any out.
        guesses: how many of the rows, the last ones, may turn out to be wrong: states stay as they are before these.
            If the sequence's next span begins among or after them, those before it were right.
    """

    blocks: npt.NDArray[np.int32]
    position: int
    rows: int
    wanted: int = 0
    prompt: int = 0
    windowed: npt.NDArray[np.int32] | None = None
    slot: int = 0
    guesses: int = 0
    adapter: int = 0


@dataclass(frozen=True)
class RankGraph:
    """One rank's graph with all that an engine needs to run it."""

    proto: onnx.ModelProto
    share_file: Path
    constants: Callable[[int], Mapping[str, F32]]
    """Graph inputs that stay the same for a whole sequence (its rotary tables), by the length of its prompt."""
    same_tables: Callable[[int], int]
    """The shortest prompt that has the same ones, the very same object, as a prompt of this length: 0 unless a rotary
    embedding of the model, of any rank's layers, is stretched for long prompts."""
    caches: Sequence[CacheSpec]
    blocks: CacheBlocks
    hidden: int
    """D, the width of the residual."""
    vocabulary: int
    """V, the columns of ``logits``: the rows of this rank's slice of the head, and what else is in them; may be 0."""
    context: int
    """The longest sequence that there will ever be, in tokens."""
    far: FarBlocks | None = None
    """Where the far ones of `blocks` are that no other machine keeps; None: there are none."""
    holder: BlockHolder | None = None
    """Another machine that keeps the others; None: there is none."""
    adapters: int = 0
    """How many slots for adapters there are (`motley.plugins.adapted_engine`), numbered from 1; 0: the graph has no
    Adapted nodes."""
    states: Sequence[StateSpec] = ()
    """The recurrent states of the layers of which this rank has heads."""
    beside: int = 0
    """Columns of the rows that a step begins with behind the first D: of a second table, or of further streams."""

    @property
    def entering(self) -> int:
        """Columns of the rows that a step begins with."""
        return self.hidden + self.beside


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is to be opened."""

    threads: int = 1
    """Compute threads of this rank."""
    max_rows: int = 256
    """The most rows T that a step may have, the same on every rank."""
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
    """One rank's executable graph with the blocks of its KV caches. Not thread-safe: one thread owns it.

    An engine keeps nothing of a sequence but what is in its blocks and its slot. All memory is allocated when it is
    opened.
    """

    @property
    def most_spans(self) -> int:
        """How many spans a step may have."""

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        """Run the rows of some sequences through the graph.

        Weights are read once for all of them, and there is one collective where a step of one token has one.

        Args:
            hidden: f32[T, D], 1 <= T <= max_rows, the rows of all spans in their order; may be overwritten.
            spans: at most `most_spans`, each of at least one row. No two write to the same block, and none reads what
                another one writes.
            halved: take the rows in two `micro_chunks`, so that the collectives of one can hide behind the computing of
                the other. The result is the same.

        Returns:
            f32[R, V]{tp}: logits of this rank's vocabulary slice for the wanted rows of the spans, in order, valid
            until the next step; without any the head is skipped.

        Raises:
            EngineError: rows or spans do not fit, see `motley.plugins.spans.check_step`; or computing failed.
            motley.transport.TransportError: a collective failed.
        """

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to far ones, one after another, so that others can be kept in their place.

        Args:
            pairs: the numbers of a block and of the far one that is overwritten; both are valid, the caller has seen to
                that.

        Raises:
            OSError: a far one cannot be written, or its holder is lost. Those that were to be moved are unharmed.
            EngineError: computing failed.
        """

    def close(self) -> None:
        """Free everything; the engine cannot be used again."""


EngineFactory = Callable[[RankGraph, Collectives, EngineOptions], Engine]


def blocks_in_memory(engine: Engine) -> Mapping[str, npt.NDArray[Any]]:
    """The arrays of all near blocks of an engine that `keeps_prefixes`, which it has as ``cached``: [count, *shape]
    each, by the names of `CacheBlocks.arrays`. Whoever calls may write to blocks that no sequence has."""
    cached: Mapping[str, npt.NDArray[Any]] = engine.cached  # type: ignore[attr-defined]
    return cached
