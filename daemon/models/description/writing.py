"""Writing the operations of a layer down, in order, with the types of their activations checked.

A family calls the methods of a `Writer`; each appends an operation and returns the value it makes. Types follow from
the axes of weights (`motley.daemon.models.description.axes`): a matrix whose output axis is cut makes a sharded value
of a replicated one, a matrix whose input axis is cut makes a partial one of a sharded one. A value that has to be
replicated and is partial is summed over the ranks first, so this is where collectives are placed. What does not fit is
refused.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.description.axes import (
    Axis,
    Heads,
    Kind,
    Placement,
    RecurrentHeads,
    Value,
    W,
    key_axis,
    query_axis,
)
from motley.daemon.models.description.model import Layer
from motley.daemon.models.description.operations import Operation
from motley.daemon.models.description.operations.attention import Attend, Choose, Means, Warmth
from motley.daemon.models.description.operations.experts import Experts, Route, Routing
from motley.daemon.models.description.operations.recurrence import (
    DeltaRule,
    DilatedConvolution,
    HeadParts,
    ShortConvolution,
    StateSpace,
)
from motley.daemon.models.description.operations.rows import (
    ALONE,
    Activation,
    Add,
    AsLarge,
    Clip,
    Gated,
    HeadLinear,
    Join,
    Linear,
    Norm,
    Scale,
    ScaleRows,
    SideBySide,
    SoftCap,
    StatisticalTopK,
    Sum,
    Times,
    WholeNorm,
    Xielu,
)
from motley.daemon.models.description.operations.streams import (
    MatchStreams,
    ReadStreams,
    StreamGates,
    WriteStreams,
)
from motley.daemon.models.keys import ConfigError

OfOneValue = (
    Norm
    | StatisticalTopK
    | AsLarge
    | HeadLinear
    | Join
    | SideBySide
    | StreamGates
    | ReadStreams
    | WriteStreams
    | MatchStreams
    | Clip
    | Choose
    | Attend
    | DeltaRule
    | StateSpace
    | ShortConvolution
    | DilatedConvolution
    | Gated
    | Xielu
    | Sum
    | Scale
    | Times
    | ScaleRows
    | SoftCap
    | Add
    | Experts
)
"""Operations that make one value."""


class ShardingError(ConfigError):
    """Operations that do not fit each other; the message names the operation and the value."""


class Writer:
    """Collects operations. Names of values are unique within a model; they begin with ``layers.N.`` in layer N."""

    def __init__(self, x: Value) -> None:
        """`x` is what the operations begin with: a residual, the rows of one, or an expert's input."""
        self.x = x
        self.operations: list[Operation] = []
        self._names = {x.name}

    def layer(self, y: Value) -> Layer:
        """The layer that was written, from the residual it began with to `y`."""
        return Layer(self.x, self._wants(y, Placement.REPLICATED, "the end of a layer"), tuple(self.operations))

    def norm(
        self, name: str, x: Value, gain: W | None, epsilon: float, offset: float = 0.0, centred: bool = False
    ) -> Value:
        """RMS norm of whole rows f32[T, D], or of each head of sharded rows by itself (`gain` is of one head then, or
        of all side by side); see `Norm`."""
        if x.axis.heads is None:
            x = self.replicated(x)
            width = x.axis.size
        else:
            width = x.axis.heads.size
        if gain is not None and gain.shape != (width,) and gain.out != x.axis:
            raise ShardingError(f"{name}: a norm of {width} elements cannot have a gain {gain.name} of {gain.shape}")
        if gain is not None and gain.bias and x.axis.heads is not None:
            raise ShardingError(f"{name}: a norm of heads has no bias")
        return self._made(Norm(x, Value(name, x.axis, x.placement), gain, epsilon, offset, centred))

    def whole_norm(self, name: str, xs: tuple[Value, ...], gains: tuple[W, ...], epsilon: float) -> tuple[Value, ...]:
        """RMS norms of sharded rows, each over its whole axis; their squares are summed over the ranks at once."""
        for x, gain in zip(xs, gains, strict=True):
            self._wants(x, Placement.SHARDED, name)
            if gain.out != x.axis:
                raise ShardingError(f"{name}: the gain {gain.name} is not along the axis of {x.name}")
        ys = tuple(Value(f"{x.name}.norm", x.axis, x.placement) for x in xs)
        self._append(WholeNorm(name, xs, ys, gains, epsilon), *ys)
        return ys

    def statistical_top_k(self, name: str, x: Value, deviations: float) -> Value:
        """What of sharded rows is so many standard deviations above their mean, see `StatisticalTopK`."""
        self._wants(x, Placement.SHARDED, name)
        return self._made(StatisticalTopK(name, x, Value(f"{x.name}.above", x.axis, x.placement), deviations))

    def as_large(self, name: str, x: Value, of: Value, least: float) -> Value:
        """Rows as large as those of another value, see `AsLarge`."""
        for each in (x, of):
            self._wants(each, Placement.REPLICATED, name)
        if x.axis.size != of.axis.size:
            raise ShardingError(f"{name}: {x.name} and {of.name} are of unlike axes")
        return self._made(AsLarge(x, of, Value(name, x.axis), least))

    def linear(self, name: str, x: Value, *ws: W, ys: tuple[str, ...] = ()) -> tuple[Value, ...]:
        """Products of x with some matrices, computed as one; `ys` names the results if there are several."""
        inner = ws[0].in_
        if inner is None or any(w.in_ != inner for w in ws) or len({bool(w.bias) for w in ws}) > 1:
            raise ShardingError(f"{name}: matrices that are one product need one input axis, all a bias or none")
        if len({w.out.cut for w in ws}) > 1 or len({w.stays_float for w in ws}) > 1:
            raise ShardingError(f"{name}: matrices that are one product are cut alike, and all of them route or none")
        if inner.cut:
            if x.axis != inner:
                raise ShardingError(f"{name}: {ws[0].name} is cut along {inner.called}, and {x.name} is not")
            self._wants(x, Placement.SHARDED, name)
            if len(ws) > 1 or ws[0].out.cut:
                raise ShardingError(f"{name}: {ws[0].name} can be cut along one axis only, by itself")
            placement = Placement.PARTIAL
        else:
            x = self.replicated(x)
            if x.axis.size != inner.size:
                raise ShardingError(f"{name}: {x.name} is {x.axis.size} wide, {ws[0].name} wants {inner.size}")
            placement = Placement.SHARDED if ws[0].out.cut else Placement.REPLICATED
        named = ys or (name,)
        made = tuple(Value(own, w.out, placement) for own, w in zip(named, ws, strict=True))
        self._append(Linear(name, x, ws, made), *made)
        return made

    def head_linear(self, name: str, x: Value, w: W, first: int = 0) -> Value:
        """A product of each head of x with a matrix of its own, see `HeadLinear`."""
        heads, made = x.axis.heads, w.out.heads
        if heads is None or made is None or (heads.queries, heads.keys) != (made.queries, made.keys):
            raise ShardingError(f"{name}: {x.name} and {w.name} are not of the same heads")
        if w.in_ is None or w.in_.cut or w.bias or first + w.in_.size > heads.size or x.axis.kind is not w.out.kind:
            raise ShardingError(f"{name}: {w.name} cannot be multiplied with a part of the heads of {x.name}")
        self._wants(x, Placement.SHARDED, name)
        return self._made(HeadLinear(x, w, Value(name, w.out, Placement.SHARDED), first))

    def join(self, name: str, *xs: Value, first: int = 0) -> Value:
        """The heads of some values, the parts of each head one behind another, see `Join`."""
        kind, heads = xs[0].axis.kind, [x.axis.heads for x in xs]
        if kind not in (Kind.HEADS, Kind.KV_HEADS) or any(x.axis.kind is not kind for x in xs):
            raise ShardingError(f"{name}: {' and '.join(x.name for x in xs)} are not of the same heads")
        sizes = [each.size for each in heads if each is not None]
        if len({(each.queries, each.keys) for each in heads if each is not None}) > 1:
            raise ShardingError(f"{name}: {' and '.join(x.name for x in xs)} are of unlike heads")
        for x in xs:
            self._wants(x, Placement.SHARDED, name)
        assert heads[0] is not None
        whole = replace(heads[0], size=sum(sizes) - first)
        axis = query_axis(whole) if kind is Kind.HEADS else key_axis(whole)
        return self._made(Join(xs, Value(name, axis, Placement.SHARDED), first))

    def side_by_side(self, name: str, *xs: Value) -> Value:
        """The rows of some values, which every rank has, one behind another."""
        xs = tuple(map(self.replicated, xs))
        axis = Axis(Kind.PLAIN, sum(x.axis.size for x in xs), " + ".join(x.axis.called for x in xs))
        return self._made(SideBySide(xs, Value(name, axis)))

    def as_streams(self, name: str, streams: Axis, *rows: Value) -> Value:
        """Rows as residual streams along an axis: one for each of these, or one for all."""
        count = self._streams(name, streams, rows[0].axis)
        rows = tuple(map(self.replicated, rows if len(rows) > 1 else rows * count))
        if len(rows) != count or any(each.axis != rows[0].axis for each in rows):
            raise ShardingError(f"{name}: {' and '.join(each.name for each in rows)} are not {count} streams")
        return self._made(SideBySide(rows, Value(name, streams)))

    def stream_gates(
        self,
        name: str,
        logits: Value,
        scale: W,
        base: W,
        streams: int,
        *,
        epsilon: float,
        written: float = 0.0,
        least: float = 0.0,
        rounds: int = 0,
    ) -> Value:
        """How a block reads residual streams, writes to them and mixes them, see `StreamGates`."""
        self._wants(logits, Placement.REPLICATED, name)
        parts = [streams, 2 * streams, (2 + streams) * streams]
        if logits.axis.size not in parts or base.shape != (logits.axis.size,):
            raise ShardingError(f"{name}: {logits.name} and {base.name} are not made for {streams} streams")
        count = parts.index(logits.axis.size) + 1
        if scale.shape != (count,) or scale.out.cut or (count == len(parts)) != bool(rounds):
            raise ShardingError(f"{name}: {scale.name} and {rounds} rounds are not for gates of {count} parts")
        y = Value(name, logits.axis)
        return self._made(StreamGates(logits, y, scale, base, streams, epsilon, written, least, rounds))

    def read_streams(self, name: str, x: Value, gates: Value | tuple[float, ...], row: Axis) -> Value:
        """What a block reads of residual streams, along the axis of one, see `ReadStreams`."""
        count = self._streams(name, x.axis, row)
        self._check_gates(name, x, gates, gates.axis.size >= count if isinstance(gates, Value) else len(gates) == count)
        return self._made(ReadStreams(x, gates, Value(name, row)))

    def write_streams(self, x: Value, gates: Value | tuple[float, ...], rows: Value, name: str = "") -> Value:
        """The residual streams after a block: each gets its part of what the block makes, summed over the ranks first
        if it is partial, see `WriteStreams`; `name` is by default that of the block's residual."""
        rows = self.replicated(rows)
        name = name or f"{_block(rows.name)}.residual"
        count = self._streams(name, x.axis, rows.axis)
        possible = (2 * count, (2 + count) * count)
        fits = gates.axis.size in possible if isinstance(gates, Value) else len(gates) == count
        self._check_gates(name, x, gates, fits)
        return self._made(WriteStreams(x, gates, rows, Value(name, x.axis)))

    def match_streams(self, name: str, queries: Value, keys: Value, rows: Value) -> Value:
        """Rows as residual streams, by how far queries and keys of these fit each other, see `MatchStreams`."""
        self._streams(name, queries.axis, rows.axis)
        for each in (queries, keys, rows):
            self._wants(each, Placement.REPLICATED, name)
        if keys.axis != queries.axis:
            raise ShardingError(f"{name}: {queries.name} and {keys.name} are of unlike axes")
        return self._made(MatchStreams(queries, keys, rows, Value(name, queries.axis)))

    def _check_gates(self, name: str, x: Value, gates: Value | tuple[float, ...], fits: bool) -> None:
        """Refuse gates that do not fit the streams, and what some ranks do not have."""
        for each in (x, gates):
            if isinstance(each, Value):
                self._wants(each, Placement.REPLICATED, name)
        if not fits:
            called = gates.name if isinstance(gates, Value) else gates
            raise ShardingError(f"{name}: {called} are not the gates of the streams of {x.name}")

    @staticmethod
    def _streams(name: str, streams: Axis, row: Axis) -> int:
        """How many rows along an axis are side by side along another."""
        count, rest = divmod(streams.size, row.size)
        if streams.kind is not Kind.PLAIN or row.kind is not Kind.HIDDEN or rest or count < 2:
            raise ShardingError(f"{name}: {streams.called} are no streams of {row.called}")
        return count

    def clip(self, x: Value, limit: float) -> Value:
        """No element is larger than `limit` in magnitude."""
        if x.placement is Placement.PARTIAL:
            x = self.replicated(x)
        return self._made(Clip(x, Value(f"{x.name}.clipped", x.axis, x.placement), -limit, limit))

    def choose(
        self,
        name: str,
        layer: int,
        q: Value,
        k: Value,
        weights: Value,
        heads: Heads,
        count: int,
        *,
        rope: str | None,
        pooling: W | None = None,
    ) -> Value:
        """Which `count` positions each row sees, i64[T, count], see `Choose`; where index keys are pooled, those of
        whole blocks, and all but one of a block besides."""
        widths = (heads.queries * heads.size, heads.size * (1 if pooling is None else 2), heads.queries)
        for value, width in zip((q, k, weights), widths, strict=True):
            if value.axis.size != width or value.axis.cut:
                raise ShardingError(f"{name}: {value.name} is not made of {heads.queries} heads of {heads.size}")
            self._wants(value, Placement.REPLICATED, name)
        block = 1 if pooling is None else pooling.shape[0]
        if pooling is not None and (pooling.shape[1:] != (heads.size,) or count % block):
            raise ShardingError(f"{name}: {pooling.name} pools no {count} positions of heads of {heads.size}")
        y = Value(name, Axis(Kind.PLAIN, count + block - 1, "index_topk"))
        return self._made(Choose(layer, q, k, weights, y, heads, rope, block, pooling=pooling))

    def choose_means(
        self,
        name: str,
        layer: int,
        q: Value,
        k: Value,
        heads: Heads,
        kv_heads: Heads,
        count: int,
        block: int,
        means: Means,
        *,
        rope: str,
    ) -> Value:
        """The same of blocks of so many positions whose keys are means, see `Choose`: each KV head sees what all index
        heads choose together, i64[T, KV heads * (count + block - 1)]{tp}.

        Args:
            kv_heads: the heads of the attention.
        """
        if q.axis.size != heads.queries * heads.size or k.axis.size != heads.size or q.axis.cut or k.axis.cut:
            raise ShardingError(f"{name}: {q.name} and {k.name} are not made of {heads.queries} heads of {heads.size}")
        for value in (q, k):
            self._wants(value, Placement.REPLICATED, name)
        if means.gain.shape != (heads.size,) or block < 2 or count % block or not count:
            raise ShardingError(f"{name}: {count} positions in blocks of {block}, or {means.gain.name}, do not fit")
        y = Value(name, key_axis(replace(kv_heads, size=count + block - 1)), Placement.SHARDED)
        return self._made(Choose(layer, q, k, None, y, heads, rope, block, means=means))

    def choose_blocks(
        self,
        name: str,
        layer: int,
        q: Value,
        k: Value,
        heads: Heads,
        blocks: int,
        block: int,
        latest: int,
        *,
        rope: str,
    ) -> Value:
        """Which `blocks` of so many positions each KV head sees, i64[T, KV heads * blocks * block]{tp}, see `Choose`.

        Args:
            heads: of the attention, but with as many elements as an index query has.
        """
        if q.axis != key_axis(heads) or k.axis.cut or k.axis.size != heads.size or latest > blocks:
            raise ShardingError(f"{name}: {q.name} and {k.name} are not of an index head for each KV head")
        self._wants(q, Placement.SHARDED, name)
        self._wants(k, Placement.REPLICATED, name)
        y = Value(name, key_axis(replace(heads, size=blocks * block)), Placement.SHARDED)
        return self._made(Choose(layer, q, k, None, y, Heads(heads.keys, 1, heads.size), rope, block, latest))

    def attend(
        self,
        name: str,
        layer: int,
        q: Value,
        k: Value,
        v: Value | None,
        heads: Heads,
        *,
        rope: str | None,
        window: int,
        scale: float,
        soft_cap: float = 0.0,
        sinks: W | None = None,
        chunked: bool = False,
        warmth: Warmth | None = None,
        gains: tuple[W, W] | None = None,
        borrowed: bool = False,
        chosen: Value | None = None,
    ) -> Value:
        """Causal attention to the cache of a layer, see `Attend`."""
        for value, axis in ((q, query_axis(heads)), (k, key_axis(heads)), (v, key_axis(heads))):
            if value is None:
                continue
            if value.axis != axis:
                raise ShardingError(f"{name}: {value.name} is not made of this layer's heads")
            self._wants(value, Placement.SHARDED, name)
        for gain in gains or ():
            if gain.shape != (heads.size,):
                raise ShardingError(f"{name}: heads of {heads.size} elements cannot have a gain of {gain.shape}")
        if chosen is not None:
            self._wants(chosen, Placement.SHARDED if chosen.axis.cut else Placement.REPLICATED, name)
        y, more = Value(name, q.axis, Placement.SHARDED), (soft_cap, sinks, chunked, warmth, gains, borrowed, chosen)
        return self._made(Attend(layer, q, k, v, y, heads, rope, window, scale, *more))

    def head_parts(self, name: str, x: Value, *parts: tuple[str, Axis]) -> tuple[Value, ...]:
        """The heads of sharded rows taken apart: results by name and axis, in the order of each head's elements."""
        self._wants(x, Placement.SHARDED, name)
        of = x.axis.heads
        heads = [axis.heads for _, axis in parts]
        alike = of is not None and all(each is not None and each.keys == of.keys for each in heads)
        if not alike or sum(axis.size for _, axis in parts) != x.axis.size:
            raise ShardingError(f"{name}: {x.name} is not made of heads with these parts")
        ys = tuple(Value(own, axis, Placement.SHARDED) for own, axis in parts)
        self._append(HeadParts(x, ys), *ys)
        return ys

    def delta_rule(
        self,
        name: str,
        layer: int,
        qkvz: tuple[Value, Value, Value, Value],
        gates: tuple[Value, Value],
        heads: RecurrentHeads,
        *,
        filters: tuple[W, W, W],
        decay: W,
        bias: W,
        gain: W,
        epsilon: float,
        written: float = 1.0,
        squashed: bool = False,
        floor: float = 0.0,
    ) -> Value:
        """What reads and changes a layer's recurrent state, see `DeltaRule`; `gates` are b and a."""
        key, value, gate, speed = heads.key_axis, heads.value_axis, heads.gate_axis, bias.out
        for each, axis in zip((*qkvz, *gates), (key, key, value, value, gate, speed), strict=True):
            if each.axis != axis:
                raise ShardingError(f"{name}: {each.name} is not made of this layer's heads")
            self._wants(each, Placement.SHARDED, name)
        outs = [w.out for w in (*filters, decay)]
        alike = outs == [key, key, value, gate] and speed in (gate, heads.speed_axis)
        if not alike or len({w.in_ for w in filters}) > 1 or filters[0].in_ is None:
            raise ShardingError(f"{name}: the filters, the decay or the bias are not of this layer's heads")
        if gain.shape != (heads.value_size,):
            raise ShardingError(f"{name}: heads of {heads.value_size} elements cannot have a gain of {gain.shape}")
        y = Value(name, value, Placement.SHARDED)
        return self._made(
            DeltaRule(layer, *qkvz, *gates, y, heads, filters, decay, bias, gain, epsilon, written, squashed, floor)
        )

    def state_space(
        self,
        name: str,
        layer: int,
        xz: tuple[Value, Value],
        bc: tuple[Value, Value],
        dt: Value,
        heads: RecurrentHeads,
        *,
        filters: tuple[W, W, W],
        filter_biases: tuple[W, W, W] | None,
        decay: W,
        bias: W,
        skip: W,
        limits: tuple[float, float],
    ) -> Value:
        """What reads and changes a layer's recurrent state, see `StateSpace`."""
        inner, key, gate = heads.group_axis, heads.key_axis, heads.gate_axis
        for each, axis in zip((*xz, *bc, dt), (inner, inner, key, key, gate), strict=True):
            if each.axis != axis:
                raise ShardingError(f"{name}: {each.name} is not made of this layer's heads")
            self._wants(each, Placement.SHARDED if axis.cut else Placement.REPLICATED, name)
        outs = [w.out for w in (*filters, *(filter_biases or filters), decay, bias, skip)]
        if outs != [inner, key, key] * 2 + [gate] * 3 or len({w.in_ for w in filters}) > 1 or filters[0].in_ is None:
            raise ShardingError(f"{name}: filters, decay, bias or skip are not of this layer's heads")
        y = Value(name, inner, Placement.SHARDED)
        return self._made(StateSpace(layer, *xz, *bc, dt, y, heads, filters, filter_biases, decay, bias, skip, limits))

    def short_convolution(
        self, name: str, layer: int, bcx: tuple[Value, Value, Value], own: W, bias: W | None
    ) -> Value:
        """Products of two values, convolved over a few rows, times a third, see `ShortConvolution`."""
        for each in bcx:
            if each.axis != own.out or own.in_ is None or (bias is not None and bias.out != own.out):
                raise ShardingError(f"{name}: {each.name} and the filter {own.name} are of unlike axes")
            self._wants(each, Placement.SHARDED, name)
        y = Value(name, own.out, Placement.SHARDED)
        return self._made(ShortConvolution(layer, *bcx, y, own, bias))

    def dilated_convolution(self, name: str, layer: int, x: Value, own: W, dilation: int) -> Value:
        """Rows convolved over some of those before them, see `DilatedConvolution`; `layer` is whose state it is."""
        self._wants(x, Placement.REPLICATED, name)
        if own.out != x.axis or own.in_ is None or dilation < 1:
            raise ShardingError(f"{name}: {x.name} and the filter {own.name} are of unlike axes")
        return self._made(DilatedConvolution(layer, x, Value(name, x.axis), own, dilation))

    def gated(
        self,
        name: str,
        gate: Value,
        up: Value | None,
        activation: Activation,
        limits: tuple[float, float] | None = None,
    ) -> Value:
        """What the down projection of an MLP gets, see `Gated`."""
        if limits and activation is not Activation.SILU:
            raise ShardingError(f"{name}: {gate.name} is not bounded by {limits} where it opens by {activation}")
        if up is None and activation not in ALONE:
            raise ShardingError(f"{name}: {gate.name} opens nothing by {activation}")
        if up is not None and (gate.axis != up.axis or gate.placement is not up.placement):
            raise ShardingError(f"{name}: {gate.name} and {up.name} are of unlike axes")
        return self._made(Gated(gate, up, Value(name, gate.axis, gate.placement), activation, limits))

    def xielu(self, name: str, x: Value, bend: W, fall: W) -> Value:
        """An activation that learns how it bends, see `Xielu`."""
        for w in (bend, fall):
            if w.shape != (1,) or w.out.cut:
                raise ShardingError(f"{name}: {w.name} is no single number")
        self._wants(x, Placement.SHARDED, name)
        return self._made(Xielu(x, Value(name, x.axis, x.placement), bend, fall))

    def replicated(self, x: Value) -> Value:
        """The value on every rank: its sum over the ranks if it is partial, which is made once.

        Raises:
            ShardingError: it is sharded.
        """
        if x.placement is not Placement.PARTIAL:
            return self._wants(x, Placement.REPLICATED, "a replicated value is needed")
        return self._summed(x)

    def _summed(self, *xs: Value) -> Value:
        """The sum of partial values over the ranks."""
        summed = next((each.y for each in self.operations if isinstance(each, Sum) and each.xs == xs), None)
        return summed or self._made(Sum(xs, Value(f"{_block(xs[-1].name)}.reduced", xs[-1].axis)))

    def scaled(self, x: Value, by: float, name: str = "") -> Value:
        """x times a number; x itself where that is 1."""
        return x if by == 1.0 else self._made(Scale(x, Value(name or f"{x.name}.scaled", x.axis, x.placement), by))

    def scaled_sum(self, x: Value, by: float) -> Value:
        """The same of a partial value, summed over the ranks first: who adds it to a residual then multiplies it."""
        return self.scaled(self.replicated(x), by)

    def times(self, name: str, x: Value, w: W) -> Value:
        """x times a weight: a number f32[1], or one for each element of whole rows, f32[N]."""
        if w.shape not in ((1,), (x.axis.size,)) or w.out.cut:
            raise ShardingError(f"{name}: {w.name} is no single number, nor one for each of {x.axis.size} elements")
        return self._made(Times(self.replicated(x), w, Value(name, x.axis)))

    def scaled_rows(self, name: str, x: Value, by: Value, opened: bool = True) -> Value:
        """x times the sigmoid of a number per row, f32[T, 1] on every rank, or if that is not `opened`, times it."""
        self._wants(by, Placement.REPLICATED, name)
        return self._made(ScaleRows(x, by, Value(name, x.axis, x.placement), opened))

    def soft_capped(self, x: Value, cap: float, name: str = "") -> Value:
        """``cap * tanh(x / cap)``; x itself where the cap is 0."""
        if not cap:
            return x
        if x.placement is Placement.PARTIAL:
            x = self.replicated(x)
        return self._made(SoftCap(x, Value(name or f"{x.name}.capped", x.axis, x.placement), cap))

    def add(self, residual: Value, x: Value, *more: Value, name: str = "") -> Value:
        """The residual after a block, or after several side by side: what they make is added, summed over the ranks
        first if it is partial, at once; several are all partial. `name` is by default that of the block's residual."""
        self._wants(residual, Placement.REPLICATED, "a residual")
        for each in (x, *more) if more else ():
            self._wants(each, Placement.PARTIAL, "one of several blocks")
            if each.axis != residual.axis:
                raise ShardingError(f"{each.name} is no residual's: it is along {each.axis.called}")
        x = self._summed(x, *more) if more else self.replicated(x)
        if x.axis != residual.axis:
            raise ShardingError(f"{x.name} is no residual's: it is along {x.axis.called}")
        return self._made(Add(residual, x, Value(name or f"{_block(x.name)}.residual", residual.axis)))

    def both(self, name: str, one: Value, other: Value) -> Value:
        """The sum of two partial values, of which every rank adds its own terms, so that both have one sum over the
        ranks; they are made along axes that are cut alike."""
        for x in (one, other):
            self._wants(x, Placement.PARTIAL, name)
        if one.axis != other.axis:
            raise ShardingError(f"{name}: {one.name} and {other.name} are of unlike axes")
        return self._made(Add(one, other, Value(name, one.axis, Placement.PARTIAL)))

    def route(self, name: str, x: Value, router: W, routing: Routing) -> tuple[Value, Value]:
        """The weights f32[T, K] of every row's experts, and which these are, i64[T, K]."""
        weights, numbers, kept = self._routed(name, x, router, routing)
        if kept is not None:
            raise ShardingError(f"{name}: what a row keeps of itself is not asked for")
        return weights, numbers

    def route_and_keep(self, name: str, x: Value, router: W, routing: Routing) -> tuple[tuple[Value, Value], Value]:
        """The same of rows that may choose themselves, and how much of itself each keeps, f32[T, 1]."""
        weights, numbers, kept = self._routed(name, x, router, routing)
        if kept is None:
            raise ShardingError(f"{name}: no row can choose itself")
        return (weights, numbers), kept

    def _routed(self, name: str, x: Value, router: W, routing: Routing) -> tuple[Value, Value, Value | None]:
        (logits,) = self.linear(name, x, router)
        experts = logits.axis.size - routing.identities
        if routing.chosen > experts:
            raise ShardingError(f"{name}: {routing.chosen} of {experts} experts cannot be chosen")
        chosen = Axis(Kind.PLAIN, routing.chosen, "num_experts_per_tok")
        weights, numbers = Value(f"{name}.weights", chosen), Value(f"{name}.chosen", chosen)
        if not routing.identities:
            self._append(Route(logits, weights, numbers, routing), weights, numbers)
            return weights, numbers, None
        if routing.scores != "softmax" or routing.normalised or routing.groups > 1 or routing.gains is not None:
            raise ShardingError(f"{name}: rows choose themselves by a softmax alone")
        kept = Value(f"{name}.kept", Axis(Kind.PLAIN, 1, "1"))
        self._append(Route(logits, weights, numbers, routing, kept), weights, numbers, kept)
        return weights, numbers, kept

    def experts(
        self,
        name: str,
        layer: int,
        x: Value,
        route: tuple[Value, Value],
        count: int,
        body: tuple[Writer, Value],
        base: Value | None = None,
        scales_inputs: bool = False,
    ) -> Value:
        """The weighted sum of what the rows' experts make of them, added to `base`, which is partial.

        Args:
            body: what an expert computes: the writer that began with its rows, and the value it ends with.
            scales_inputs: see `Experts`.
        """
        if scales_inputs and route[0].axis.size > 1:
            raise ShardingError(f"{name}: inputs are scaled for one expert of a row, not for {route[0].axis.size}")
        writer, result = body
        self._wants(result, Placement.PARTIAL, name)
        if base is not None:
            self._wants(base, Placement.PARTIAL, name)
        y = Value(name, result.axis, Placement.PARTIAL)
        operations = tuple(writer.operations)
        return self._made(Experts(layer, x, *route, y, count, operations, writer.x, result, base, scales_inputs))

    def _made(self, operation: OfOneValue) -> Value:
        self._append(operation, operation.y)
        return operation.y

    def _append(self, operation: Operation, *made: Value) -> None:
        """Append an operation and the values that it makes, whose names must be new: graphs know values by them."""
        for value in made:
            if value.name in self._names:
                raise ShardingError(f"{value.name} is the name of two values; name what they are made by differently")
            self._names.add(value.name)
        self.operations.append(operation)

    @staticmethod
    def _wants(value: Value, placement: Placement, what: str) -> Value:
        if value.placement is not placement:
            raise ShardingError(f"{what}: {value.name} is {value.placement.value}, not {placement.value}")
        return value


def _block(name: str) -> str:
    """The block of a layer that a value is of: ``layers.3.attention`` of ``layers.3.attention.output``."""
    return ".".join(name.split(".")[:3])
