"""From operations to ONNX nodes, for whatever part of a model somebody has.

`Nodes` lowers the operations of a description one by one. It is told what its owner has of each axis (`Holding`): a
rank has its share (`motley.daemon.models.graph.rank_graph`), an expert host a slice
(`motley.daemon.models.graph.expert_graph`). Operators are standard ones, with the functions of
`motley.daemon.models.graph.cached_attention`.

A value that every rank has is made only once somebody reads it, so an owner without units of a block computes nothing
of it. A partial value is one or several *terms*: one of all that the owner has, or one for each leaf of the tree of
sums (`motley.daemon.models.cutting.tree`). There is one way for each kind of operation, and all of them are here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from onnx import TensorProto

from motley.daemon.models.cutting.holding import Formats
from motley.daemon.models.description.axes import Axis, Kind, Placement, Value, W
from motley.daemon.models.description.operations import Operation
from motley.daemon.models.description.operations.attention import Attend, Choose
from motley.daemon.models.description.operations.experts import Experts, Route
from motley.daemon.models.description.operations.recurrence import (
    DeltaRule,
    DilatedConvolution,
    HeadParts,
    Recurrence,
    ShortConvolution,
    StateSpace,
)
from motley.daemon.models.description.operations.rows import (
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
from motley.daemon.models.graph.adapted_parts import Parts, attributes_of_parts, parts_of
from motley.daemon.models.graph.cached_attention import attention_of
from motley.daemon.models.graph.chosen_positions import (
    CHOSEN_BLOCKS,
    CHOSEN_MEANS,
    CHOSEN_POOLS,
    CHOSEN_POSITIONS,
)
from motley.daemon.models.graph.emitter import LARGEST, Emitter
from motley.daemon.models.graph.head_products import HEAD_PRODUCTS
from motley.daemon.models.graph.recurrence import lower_head_parts
from motley.daemon.models.graph.routing import Router
from motley.daemon.models.graph.streams import match_streams, read_streams, stream_gates, write_streams
from motley.daemon.models.graph.xielu import XIELU
from motley.daemon.weights.places import numbered
from motley.daemon.weights.spec import Piece, Weight
from motley.plugins.adapters import ADAPTED
from motley.plugins.engine import DOMAIN

CLAMPED_LIMIT, CLAMPED_ALPHA = 7.0, 1.702
"""Of `Activation.CLAMPED`."""

_ALONE: Mapping[Activation, tuple[str, Mapping[str, str]]] = {
    Activation.GELU_TANH: ("Gelu", {"approximate": "tanh"}),
    Activation.SIGMOID: ("Sigmoid", {}),
    Activation.SILU: ("Swish", {}),
}
"""The operator that opens a gate which nothing is multiplied by, and its attributes."""

Terms = Mapping[range, str]
"""The terms of a partial value, by the leaves that they are of."""


class Holding(Protocol):
    """What somebody has of a model."""

    def ranges(self, axis: Axis) -> list[range]:
        """The elements of an axis, in order; an element may be there twice; all of it if it is not cut."""

    def leaves(self, axis: Axis) -> dict[range, range]:
        """The terms that a product along an axis is made in: the elements of each, by leaves of the tree of sums.

        One term of all elements, unless sums are exact; none where there are no elements.
        """


class Nodes(Emitter):
    """Lowers operations; values are known by name."""

    def __init__(self, holding: Holding, held: Formats, expert: int | None = None) -> None:
        """Begin with nothing.

        Args:
            held: see `Emitter`.
            expert: whose number stands for ``{expert}`` in names.
        """
        super().__init__(held)
        self.holding = holding
        self.expert = expert
        self.terms: dict[str, Terms] = {}
        """Of partial values."""
        self.adapts = False
        """Whether adapters may add to the products that are lowered from now on."""
        self.adapted: Parts = {}
        """What is here of the matrices that adapters may add to, by the parts' names in Adapted nodes."""
        self._made: dict[str, str] = {}
        """The nodes' names of values that have been made."""
        self._waiting: dict[str, Operation] = {}
        """What makes values that nobody has read yet."""

    # -- operations --------------------------------------------------------------------------------------------------

    def lower(self, operations: Iterable[Operation]) -> None:
        """Lower operations in order; those whose results nobody reads are left out."""
        for each in operations:
            if isinstance(each, Sum | Experts):
                self._emit(each)
            elif isinstance(each, Route):
                made = (each.weights, each.chosen, *([each.kept] if each.kept else []))
                self._waiting |= dict.fromkeys((value.name for value in made), each)
            elif isinstance(each, WholeNorm | StatisticalTopK):
                self._emit(each)  # every rank takes part in its sum
            elif isinstance(each, HeadParts):
                self._waiting |= dict.fromkeys((y.name for y in each.ys), each)
            elif isinstance(each, Linear):
                for y in each.ys:
                    self._waiting[y.name] = each
                if each.ys[0].placement is Placement.PARTIAL:
                    self._emit(each)
            else:
                self._waiting[each.y.name] = each

    def given(self, value: Value, name: str = "") -> None:
        """A value that is there: an input, or what somebody else has made."""
        self._made[value.name] = name or self.named(value.name)

    def has(self, value: Value) -> bool:
        """Whether there is anything of a value here: of a sharded one there may be nothing."""
        return value.placement is Placement.REPLICATED or bool(self.width(value.axis))

    def read(self, value: Value) -> str:
        """The name of a value, which is made now if it has not been."""
        if value.name not in self._made:
            self._emit(self._waiting[value.name])
        return self._made[value.name]

    def maker(self, value: Value) -> Operation:
        """The operation that makes a value which was not given."""
        return self._waiting[value.name]

    def named(self, name: str) -> str:
        return numbered(name, self.expert)

    def width(self, axis: Axis) -> int:
        """Elements of an axis that are here."""
        return sum(map(len, self.holding.ranges(axis)))

    def _emit(self, operation: Operation) -> None:
        match operation:
            case Norm():
                self._norm(operation)
            case Linear(ys=ys) if ys[0].placement is Placement.PARTIAL:
                self.terms[ys[0].name] = self._terms(operation)
            case Linear():
                self._linear(operation)
            case HeadLinear():
                self._head_linear(operation)
            case Join():
                self._join(operation)
            case SideBySide(xs, y):
                self._made[y.name] = self.node("Concat", [*map(self.read, xs)], self.named(y.name), axis=1)
                self._tell_width(y)
            case StreamGates() | ReadStreams() | WriteStreams() | MatchStreams():
                self._streams(operation)
            case Clip(x, y, low, high):
                self._make(y, "Clip", [self.read(x), self.floats(low), self.floats(high)])
            case HeadParts():
                lower_head_parts(self, operation)
            case Choose():
                self._choose(operation)
            case Attend():
                self._attend(operation)
            case DeltaRule() | StateSpace() | ShortConvolution() | DilatedConvolution():
                self.recurrence(operation)
            case Gated():
                self._gated(operation)
            case Xielu(x, y, bend, fall):
                self.functions[XIELU.name] = XIELU
                name, own = self.named(y.name), {"bend": bend, "fall": fall}
                numbers = [self._vector(f"{name}.{called}", w) for called, w in own.items()]
                self._made[y.name] = self.node(XIELU.name, [self.read(x), *numbers], name, domain=DOMAIN)
            case Scale(x, y, by):
                self._scale(x, y, by)
            case Times(x, w, y):
                self._make(y, "Mul", [self.read(x), self._vector(f"{self.named(y.name)}.by", w)])
            case ScaleRows():
                self._scale_rows(operation)
            case SoftCap(x, y, cap) if cap == 1.0:
                self._make(y, "Tanh", [self.read(x)])
            case SoftCap(x, y, cap):
                small = self.node("Mul", [self.read(x), self.floats(1 / cap)], f"{self.named(y.name)}.part")
                bounded = self.node("Tanh", [small], f"{self.named(y.name)}.bounded")
                self._make(y, "Mul", [bounded, self.floats(cap)])
            case Add(residual, x, y) if y.placement is Placement.PARTIAL:
                self.terms[y.name] = self._both(self.partial(residual), self.partial(x), self.named(y.name))
            case Add(residual, x, y):
                self._make(y, "Add", [self.read(residual), self.read(x)])
            case Route():
                self._route(operation)
            case Sum():
                self.sum(operation)
            case WholeNorm():
                self.whole_norm(operation)
            case StatisticalTopK():
                self.statistical_top_k(operation)
            case AsLarge():
                self._as_large(operation)
            case Experts():
                self.experts(operation)

    def sum(self, operation: Sum) -> None:
        """Sum over everyone's terms; only ranks can."""
        raise AssertionError(f"{operation.y.name} is summed by ranks")

    def whole_norm(self, operation: WholeNorm) -> None:
        """Norm over everyone's parts of an axis; only ranks can."""
        raise AssertionError(f"{operation.name} is computed by ranks")

    def statistical_top_k(self, operation: StatisticalTopK) -> None:
        """What is above a threshold that is about everyone's parts of an axis; only ranks can."""
        raise AssertionError(f"{operation.name} is computed by ranks")

    def recurrence(self, operation: Recurrence) -> None:
        """Read and change a recurrent state; only ranks have any."""
        raise AssertionError(f"{operation.y.name} is computed by ranks")

    def experts(self, operation: Experts) -> None:
        """The sum over a row's experts; only ranks make it."""
        raise AssertionError(f"{operation.y.name} is computed by ranks")

    def _norm(self, norm: Norm) -> None:
        x, name = self.read(norm.x), self.named(norm.y.name)
        heads = norm.x.axis.heads
        if heads is None:
            self._made[norm.y.name] = self._normed(norm, x, name, self._gain(norm, norm.x.axis.size))
            self._tell_width(norm.y)
            return
        count = self.width(norm.x.axis) // heads.size
        apart = self.node("Reshape", [x, self.integers((-1, count, heads.size))], f"{name}.heads")
        whole = norm.gain if norm.gain is not None and norm.gain.out == norm.x.axis else None
        gain = self.ones(heads.size) if whole else self._gain(norm, heads.size)
        normed = self._normed(norm, apart, name, gain)
        rows = self.node("Reshape", [normed, self.integers((-1, count * heads.size))], f"{name}.rows")
        if whole:
            pieces = tuple(Piece(whole.name, own) for own in self.holding.ranges(whole.out))
            gains = self.weight(Weight(f"{name}.weight", pieces, offset=norm.offset))
            rows = self.node("Mul", [rows, gains], f"{name}.weighed")
        self._made[norm.y.name] = rows
        self._tell_width(norm.y)

    def _normed(self, norm: Norm, x: str, name: str, gain: str) -> str:
        bias = []
        if norm.gain is not None and norm.gain.bias:
            piece = Piece(norm.gain.bias, range(norm.gain.out.size))
            bias = [self.weight(Weight(f"{name}.bias", (piece,)))]
        operator = "LayerNormalization" if norm.centred else "RMSNormalization"
        return self.node(operator, [x, gain, *bias], name, axis=-1, epsilon=norm.epsilon)

    def _as_large(self, operation: AsLarge) -> None:
        """Means are products with a row of equal numbers, which engines compute faster than sums of rows."""
        x, of, name = self.read(operation.x), self.read(operation.of), self.named(operation.y.name)
        width = operation.x.axis.size
        means = []
        for called, value in (("of", of), ("own", x)):
            squares = self.node("Mul", [value, value], f"{name}.{called}.squared")
            means.append(self.node("Gemm", [squares, self.row_of(1 / width, width)], f"{squares}.mean", transB=1))
        bounds = [self.floats(operation.least), self.floats(LARGEST)]
        divisor = self.node("Clip", [means[1], *bounds], f"{name}.divisor")
        quotient = self.node("Div", [means[0], divisor], f"{name}.quotient")
        self._make(operation.y, "Mul", [x, self.node("Sqrt", [quotient], f"{name}.ratio")])

    def _vector(self, name: str, w: W) -> str:
        """A weight f32[N], all of it."""
        return self.weight(Weight(name, (Piece(w.name, range(w.out.size)),)))

    def _gain(self, norm: Norm, width: int) -> str:
        if norm.gain is None:
            return self.ones(width)
        name = f"{self.named(norm.y.name)}.weight"
        return self.weight(Weight(name, (Piece(norm.gain.name, range(width)),), offset=norm.offset))

    def _linear(self, linear: Linear) -> None:
        """Products side by side, and then apart."""
        pieces = [piece for w in linear.ws for piece in self._rows_of(w)]
        biases = [piece for w in linear.ws for piece in self._bias_of(w)]
        name = self.named(linear.name)
        only = self.named(linear.ys[0].name) if len(linear.ys) == 1 else ""
        product = self.matmul(name, self.read(linear.x), pieces, biases, only, linear.ws[0].stays_float)
        if only:
            self._made[linear.ys[0].name] = product
            self._tell_width(linear.ys[0])
            return
        widths = {self.named(y.name): self.width(y.axis) for y in linear.ys}
        self.split(product, widths)
        for y in linear.ys:
            self.given(y)
            self._tell_width(y)

    def _rows_of(self, w: W) -> list[Piece]:
        """What this owner has of a matrix whose rows may be cut."""
        assert w.in_ is not None
        tensor = numbered(w.name, self.expert)
        return [Piece(tensor, rows, range(w.in_.size)) for rows in self.holding.ranges(w.out)]

    def _bias_of(self, w: W) -> list[Piece]:
        tensor = numbered(w.bias, self.expert)
        return [Piece(tensor, rows) for rows in self.holding.ranges(w.out)] if w.bias else []

    def _terms(self, linear: Linear) -> Terms:
        """f32[T, K]{tp} -> f32[T, N] for each leaf: the parts of a product that some columns of its matrix make."""
        (w,) = linear.ws
        assert w.in_ is not None
        columns = self.holding.leaves(w.in_)
        if not columns:
            return {}
        name, x = self.named(linear.name), self.read(linear.x)
        suffixes = [_suffix(leaf) for leaf in columns]
        xs = [x]
        if len(columns) > 1:
            widths = [len(own) for own in columns.values()]
            parts = [f"{name}{suffix}.x" for suffix in suffixes]
            xs = self.split(x, dict(zip(parts, widths, strict=True)))
        rows, tensor = range(w.out.size), numbered(w.name, self.expert)
        made = {}
        for (leaf, own), part, suffix in zip(columns.items(), xs, suffixes, strict=True):
            # The bias belongs to the first columns, so that it is added once.
            bias = [Piece(numbered(w.bias, self.expert), rows)] if w.bias and own.start == 0 else []
            at = f"{name}{suffix}" if len(columns) > 1 else name
            made[leaf] = self.matmul(at, part, [Piece(tensor, rows, own)], bias)
        return made

    def _head_linear(self, linear: HeadLinear) -> None:
        name, heads, w = self.named(linear.y.name), linear.x.axis.heads, linear.w
        assert heads is not None
        assert w.in_ is not None
        self.functions[HEAD_PRODUCTS.name] = HEAD_PRODUCTS
        operands = [self.read(linear.x), self.matrix(f"{name}.weight", self._rows_of(w))]
        width, first = self.width(linear.x.axis), linear.first
        more = {"heads": width // heads.size, "first": first, "last": first + w.in_.size, "width": width}
        self.node(HEAD_PRODUCTS.name, operands, name, domain=DOMAIN, **more)
        self.crosses(name, self.width(linear.y.axis))
        self.given(linear.y, name)

    def _join(self, join: Join) -> None:
        name, apart = self.named(join.y.name), []
        made = [self.read(x) for x in join.xs]  # all first: what has three dimensions crosses no segment
        for index, (x, own) in enumerate(zip(join.xs, made, strict=True)):
            assert x.axis.heads is not None
            size, width = x.axis.heads.size, self.width(x.axis)
            self.crosses(own, width)
            heads = self.node("Reshape", [own, self.integers((-1, width // size, size))], f"{name}.{index}.heads")
            if join.first and index == 0:
                bounds = [self.integers([number]) for number in (join.first, size, 2)]
                heads = self.node("Slice", [heads, *bounds], f"{name}.{index}.rest")
            apart.append(heads)
        joined = self.node("Concat", apart, f"{name}.heads", axis=2)
        whole = self.width(join.y.axis)
        self.crosses(name, whole)
        self.given(join.y, self.node("Reshape", [joined, self.integers((-1, whole))], name))

    def _streams(self, operation: StreamGates | ReadStreams | WriteStreams | MatchStreams) -> None:
        """A node of `motley.plugins.streams`."""
        y, more = operation.y, {}
        match operation:
            case StreamGates(logits=logits, scale=scale, base=base, streams=streams):
                function = stream_gates(scale.out.size, streams, operation.rounds)
                own = [
                    self._vector(f"{self.named(y.name)}.{name}", w) for name, w in (("scale", scale), ("base", base))
                ]
                read = [self.read(logits), *own]
                more = {name: getattr(operation, name) for name in ("epsilon", "written", "least", "rounds")}
            case ReadStreams(x=x, gates=gates):
                streams = x.axis.size // y.axis.size
                function = read_streams(streams)
                read = [self.read(x), self.read(gates) if isinstance(gates, Value) else self.floats(*gates)]
            case WriteStreams(x=x, gates=gates, rows=rows):
                streams = x.axis.size // rows.axis.size
                mixes = isinstance(gates, Value) and gates.axis.size > 2 * streams
                function = write_streams(streams, mixes)
                said = self.read(gates) if isinstance(gates, Value) else self.floats(*[0.0] * streams, *gates)
                read = [self.read(x), said, self.read(rows)]
            case MatchStreams(queries=queries, keys=keys, rows=rows):
                streams = queries.axis.size // rows.axis.size
                function, more = match_streams(streams), {"scale": rows.axis.size**-0.5}
                read = [*map(self.read, (queries, keys, rows))]
        self.functions[function.name] = function
        self._make(y, function.name, read, domain=DOMAIN, streams=streams, **more)

    def _choose(self, choose: Choose) -> None:
        cache, width, heads = f"index_cache.{choose.layer}", self.width(choose.y.axis), choose.heads.queries
        rows, function, rope = [choose.q, choose.k], CHOSEN_POSITIONS, choose.rope or "none"
        more: dict[str, Any] = {"count": width, "rotary_dim": self.rotary_size(choose)}
        pooling = []
        if choose.weights is not None:
            rows.append(choose.weights)
        elif choose.means is None:
            heads, function = self.width(choose.q.axis) // choose.heads.size, CHOSEN_BLOCKS
            more |= {"count": width // heads, "latest": choose.latest}
        if choose.pooling is not None:
            assert choose.rope is None, "pooled keys are not turned"
            function = CHOSEN_POOLS
            pooling.append(self.matrix(f"{choose.y.name}.pooling", self._rows_of(choose.pooling), floats=True))
            del more["rotary_dim"]
        if (means := choose.means) is not None:
            function = CHOSEN_MEANS
            lists = width // choose.y.axis.heads.size if choose.y.axis.heads else 1
            more |= {"count": width // lists, "lists": lists, "epsilon": means.epsilon}
            piece = Piece(means.gain.name, range(means.gain.out.size))
            pooling.append(self.weight(Weight(f"{choose.y.name}.gain", (piece,), offset=means.offset)))
        if choose.block > 1:
            more |= {"block": choose.block, "blocks": more["count"] // choose.block}
        operands = [*map(self.read, rows), cache, "position"]
        self.functions[function.name] = function
        self.crosses(choose.y.name, width, TensorProto.INT64)
        self.node(
            function.name,
            [*operands, f"cos_cache.{rope}", f"sin_cache.{rope}", *pooling],
            choose.y.name,
            f"{cache}.out",
            domain=DOMAIN,
            heads=heads,
            head_dim=choose.heads.size,
            **more,
        )
        self.given(choose.y)

    def _attend(self, attend: Attend) -> None:
        values = [] if attend.v is None else [attend.v]
        caches = [f"{kind}_cache.{attend.layer}" for kind in ("key", "value")[: 1 + len(values)]]
        rope = "none" if attend.rope is None else attend.rope
        chosen = [] if attend.chosen is None else [attend.chosen]
        operands = [*map(self.read, (attend.q, attend.k, *values, *chosen)), *caches, "position"]
        if attend.borrowed or chosen:  # they are made before something else that is no part of a segment
            for value in (attend.q, attend.k, *values):
                self.crosses(self.read(value), self.width(value.axis))
        made = f"{self.named(attend.y.name)}.borrowed" if attend.borrowed else ""
        operands += [f"cos_cache.{rope}", f"sin_cache.{rope}"]
        function, more = attention_of(attend)
        own = {"sinks": attend.sinks} if attend.sinks is not None else {}
        own |= dict(zip(("q_gain", "k_gain"), attend.gains or (), strict=False))
        for name, w in own.items():
            (rows,) = self.holding.ranges(w.out)
            operands.append(self.weight(Weight(f"{self.named(attend.y.name)}.{name}", (Piece(w.name, rows),))))
        self.functions[function.name] = function
        heads = attend.heads
        self.node(
            function.name,
            operands,
            attend.y.name,
            *(f"{made}.{cache}.out".removeprefix(".") for cache in caches),
            domain=DOMAIN,
            q_heads=self.width(attend.q.axis) // heads.size,
            kv_heads=self.width(attend.k.axis) // heads.size,
            head_dim=heads.size,
            rotary_dim=self.rotary_size(attend),
            scale=attend.scale,
            soft_cap=attend.soft_cap,
            **more,
        )
        self.given(attend.y)

    def rotary_size(self, operation: Attend | Choose) -> int:
        """How many elements of each head are rotated; only ranks attend."""
        raise AssertionError(f"{operation.y.name} is computed by ranks")

    def _gated(self, gated: Gated) -> None:
        name, gate = self.named(gated.y.name), self.read(gated.gate)
        if gated.up is None:
            operator, more = _ALONE[gated.activation]
            self._made[gated.y.name] = self.node(operator, [gate], name, **more)
            self._tell_width(gated.y)
            return
        up = self.read(gated.up)
        match gated.activation:
            case Activation.SILU:
                if gated.limits:
                    gate, up = self._bounded(gate, up, *gated.limits)
                opened = self.node("Swish", [gate], f"{gate}.swish")
            case Activation.GELU_TANH:
                opened = self.node("Gelu", [gate], f"{gate}.gelu", approximate="tanh")
            case Activation.SIGMOID | Activation.SOFTPLUS:
                self.crosses(gate, self.width(gated.gate.axis))  # it is made before the attention that it opens
                opens = "Sigmoid" if gated.activation is Activation.SIGMOID else "Softplus"
                opened = self.node(opens, [gate], f"{gate}.{opens.lower()}")
            case Activation.RELU:
                opened = self.node("Relu", [gate], f"{gate}.relu")
            case Activation.CLAMPED:
                gate, up = self._bounded(gate, up, CLAMPED_LIMIT, CLAMPED_LIMIT)
                up = self.node("Add", [up, self.floats(1.0)], f"{up}.plus_one")
                opened = self.node("Swish", [gate], f"{gate}.swish", alpha=CLAMPED_ALPHA)
        self._made[gated.y.name] = self.node("Mul", [opened, up], name)
        self._tell_width(gated.y)

    def _bounded(self, gate: str, up: str, most: float, magnitude: float) -> tuple[str, str]:
        """A gate and up with bounds."""
        least_of_both = self.node("Min", [gate, self.floats(most)], f"{gate}.clamped")
        bounds = [self.floats(-magnitude), self.floats(magnitude)]
        return least_of_both, self.node("Clip", [up, *bounds], f"{up}.clamped")

    def is_whole(self, value: Value) -> bool:
        """Whether a value is here as a whole: a partial one may be, if somebody else has summed what it is made of."""
        if value.placement is not Placement.PARTIAL or value.name in self._made:
            return True
        maker = self._waiting.get(value.name)
        return isinstance(maker, Scale | ScaleRows) and self.is_whole(maker.x)

    def _scale(self, x: Value, y: Value, by: float) -> None:
        if self.is_whole(x):
            self._make(y, "Mul", [self.read(x), self.floats(by)])
            return
        self.terms[y.name] = {
            leaf: self.node("Mul", [term, self.floats(by)], f"{term}.scaled") for leaf, term in self.partial(x).items()
        }

    def _both(self, one: Terms, other: Terms, name: str) -> Terms:
        """The terms of a sum, leaf by leaf."""
        return {
            leaf: self.node("Add", [term, other[leaf]], f"{name}{_suffix(leaf) if len(one) > 1 else ''}")
            for leaf, term in one.items()
        }

    def _scale_rows(self, scale: ScaleRows) -> None:
        """Scale the rows of a value; of a partial one each term, where there are any, so that no gate is idle."""
        name = self.named(scale.y.name)
        if self.is_whole(scale.x):
            x = self.read(scale.x)
            self._make(scale.y, "Mul", [x, self._share(scale, name)])
            return
        terms = self.partial(scale.x)
        share = self._share(scale, name) if terms else ""
        self.terms[scale.y.name] = {
            leaf: self.node("Mul", [term, share], f"{name}{_suffix(leaf) if len(terms) > 1 else ''}")
            for leaf, term in terms.items()
        }

    def _share(self, scale: ScaleRows, name: str) -> str:
        """The number that each row is multiplied by."""
        by = self.read(scale.by)
        return self.node("Sigmoid", [by], f"{name}.share") if scale.opened else by

    def _route(self, route: Route) -> None:
        """See `motley.daemon.models.graph.routing`."""
        Router(self, route).lower(self.read(route.logits))
        self.given(route.weights)
        self.given(route.chosen)
        if route.kept is not None:
            self.given(route.kept)
            self._tell_width(route.kept)

    def crosses(self, name: str, width: int, kind: int = TensorProto.FLOAT) -> None:
        """Declare a value [T, width] that may be read on the other side of something that engines compute themselves;
        only those of ranks need it."""

    def partial(self, value: Value) -> Terms:
        """The terms of a partial value that are made here."""
        if value.name not in self.terms:
            self._emit(self._waiting[value.name])
        return self.terms[value.name]

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _make(self, y: Value, op: str, inputs: list[str], **attributes: Any) -> None:
        self._made[y.name] = self.node(op, inputs, self.named(y.name), **attributes)
        self._tell_width(y)

    def _tell_width(self, y: Value) -> None:
        """Declare a value that is neither a residual nor cut, so that whoever reads it knows how wide it is."""
        if y.axis.kind is Kind.PLAIN:
            self.crosses(self._made[y.name], y.axis.size)

    def matmul(
        self, name: str, x: str, pieces: list[Piece], bias: list[Piece], output: str = "", floats: bool = False
    ) -> str:
        """f32[T, K] -> f32[T, N] with the weight f32[N, K] `name`, held as its pieces' tensors are."""
        matrix = self.matrix(f"{name}.weight", pieces, floats)
        biases = [self.weight(Weight(f"{name}.bias", tuple(bias)))] if bias else []
        y = output or name
        if not self.adapts:
            return self.node("Gemm", [x, matrix, *biases], y, transB=1)
        product = self.node("Gemm", [x, matrix, *biases], f"{y}.unadapted", transB=1)
        parts = parts_of(pieces)
        self.adapted |= parts
        return self.node(ADAPTED, [x, product], y, domain=DOMAIN, **attributes_of_parts(parts))


def _suffix(leaves: range) -> str:
    return f".{leaves.start}"
