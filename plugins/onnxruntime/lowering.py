"""Lowers a rank's graph to operators that ONNX Runtime or our own kernels compute fast on a CPU.

==============================================  ==============================================================
in the graph                                    in the runtime (domain ``com.microsoft`` where not standard)
==============================================  ==============================================================
``DequantizeLinear`` -> ``Gemm(transB=1)``      `motley.plugins.segments.PRODUCT`, not for the runtime: its
                                                ``MatMulNBits`` reads int4 at half the speed of the memory
``Split`` -> ``CachedAttention``                `motley.plugins.segments.ATTENTION` on packed QKV
``ChosenPositions`` and its kin                 `motley.plugins.segments.CHOICE`
``DequantizeLinear`` -> ``HeadProducts``        `motley.plugins.segments.HEAD_PRODUCT`; of floats it is inlined
``Split`` -> ``GatedDelta``                     `motley.plugins.segments.DELTA` on packed QKVZ
``Split`` -> ``StateSpace``                     `motley.plugins.segments.SPACE` on packed XZ and BC
``Split`` -> ``ShortConvolution``               `motley.plugins.segments.CONVOLUTION` on packed BCX
``DilatedConvolution``                          `motley.plugins.segments.DILATED`
``Add`` -> ``RMSNormalization`` of rows         `motley.plugins.segments.NORM`, with a ``Mul`` by a number before it
``Add`` -> ``LayerNormalization`` of rows       the same, centred
``Reshape`` -> ``RMSNormalization`` of heads    `motley.plugins.segments.HEAD_NORMS` on packed QKV
``Split`` -> ``Swish`` -> ``Mul``               `motley.plugins.segments.GATED`
``Split`` -> ``Sigmoid`` -> ``Mul``             the same, of a gate behind queries, keys and values
``Swish``                                       ``QuickGelu(alpha=1)``
==============================================  ==============================================================

A row does not depend on the rows beside it where the number of rows is even: only kernels are used that keep to that.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx.inliner
from onnx import NodeProto, TensorProto, helper, numpy_helper

from motley.plugins.engine import DOMAIN
from motley.plugins.native.rows import ANY
from motley.plugins.nodes import CHOICE, CHOSEN, NORMS, SPARSE_MIXER, XIELU, attributes_of, is_experts
from motley.plugins.recurrent import DILATED_CONVOLUTION, GATED_DELTA, SHORT_CONVOLUTION, STATE_SPACE
from motley.plugins.segments import (
    ATTENTION,
    CONVOLUTION,
    DELTA,
    DILATED,
    GATED,
    HEAD_NORMS,
    HEAD_PRODUCT,
    NORM,
    PRODUCT,
    SPACE,
)
from motley.plugins.streams import MATCH_STREAMS

MICROSOFT = "com.microsoft"
HEAD_PRODUCTS = "HeadProducts"
"""The function of domain ``motley``."""
_PACKED = {
    GATED_DELTA: (DELTA, ((4, "qkvz"), (2, "ba"))),
    STATE_SPACE: (SPACE, ((2, "xz"), (2, "bc"), (1, "dt"))),
    SHORT_CONVOLUTION: (CONVOLUTION, ((3, "bcx"),)),
    DILATED_CONVOLUTION: (DILATED, ((1, "x"),)),
}
"""What computes each operator with a recurrent state, and how many of its operands lie side by side, called what."""


_INLINED = (MATCH_STREAMS, SPARSE_MIXER, XIELU)
"""Functions of domain ``motley`` that the runtime computes operator by operator."""


@dataclass(frozen=True)
class Lowered:
    """What an engine runs: the lowered nodes in order, and the initializers that they read, by name."""

    nodes: list[NodeProto]
    initializers: Mapping[str, TensorProto]


@dataclass(frozen=True)
class HeadNorms:
    """The norms of the heads of some parts of rows.

    Attributes:
        x: the name of the rows.
        firsts: where each part begins in them.
        gains: the name of the gain of each part's heads; "": they are not normed.
        heads: how many each part has.
        size: of a head.
        width: of the rows.
    """

    x: str
    firsts: list[int]
    gains: list[str]
    heads: list[int]
    size: int
    epsilon: float
    width: int


@dataclass(frozen=True)
class _Part:
    """An operand of an attention: what it is made from, by which norm of heads, if any, and the values on the way."""

    source: str
    norm: NodeProto | None = None
    made: tuple[str, ...] = ()


def lower(model: onnx.ModelProto) -> Lowered:
    """Lower the whole graph; collectives stay as they are, and so do Experts nodes around their graphs."""
    return Lowering.lower(model)


class Lowering:
    """Lowers nodes for the CPU. What it does with products, norms and gates a subclass may do otherwise."""

    fuses = True
    """Whether norms and gates become kernels of ours."""
    fuses_products = True
    """Whether products with quantised matrices become one node, see `product`."""

    @classmethod
    def lower(cls, model: onnx.ModelProto) -> Lowered:
        """See `lower`."""
        if any(node.op_type == HEAD_PRODUCTS and not is_narrow(model.graph, node) for node in model.graph.node):
            model = onnx.inliner.inline_selected_functions(model, [(DOMAIN, HEAD_PRODUCTS)])
        if any(node.op_type in _INLINED for node in model.graph.node):
            model = onnx.inliner.inline_selected_functions(model, [(DOMAIN, name) for name in _INLINED])
        initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        return Lowered(cls(model.graph.node, initializers).run(), initializers)

    def __init__(self, nodes: Iterable[NodeProto], initializers: dict[str, TensorProto]) -> None:
        self._nodes = list(nodes)
        self._initializers = initializers
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self._nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._gates: dict[str, tuple[NodeProto, str, tuple[float, float]]] = {}
        """By the result of a gate: what splits gate and up, or the gate from others; the activation; and the largest
        that a gate is, and that up is in magnitude."""
        self._head_norms: dict[str, HeadNorms] = {}
        """By the result of an attention, the norms of its heads."""
        self._absorbed: set[str] = set()
        """Values that a kernel makes for itself."""
        if self.fuses:
            for node in self._nodes:
                self._find_gate(node)
                self._find_head_norms(node)
                self._find_factor(node)

    def run(self) -> list[NodeProto]:
        """The lowered nodes."""
        return _without_unused([new for node in self._nodes for new in self._lower(node)])

    def _lower(self, node: NodeProto) -> Iterator[NodeProto]:
        if node.domain == DOMAIN and node.op_type.startswith("CachedAttention"):
            yield from self._attention(node)
        elif node.domain == DOMAIN and node.op_type in CHOSEN:
            yield _renamed(node, CHOICE, node.input)
        elif node.domain == DOMAIN and node.op_type in _PACKED:
            yield from self._recurrence(node)
        elif is_experts(node):
            yield self._experts(node)
        elif (
            self.fuses_products
            and node.op_type == "Gemm"
            and (source := self._made_by(node.input[1], "DequantizeLinear"))
        ):
            yield self._product(node, source)
        elif node.domain == DOMAIN and node.op_type == HEAD_PRODUCTS:
            yield self._head_products(node)
        elif not self.fuses:
            yield node
        elif node.op_type in NORMS and not self._made_by(node.input[0], "Reshape"):  # that is of heads
            yield self._norm(node)
        elif node.output[0] in self._gates:
            yield self._gated(node, *self._gates[node.output[0]])
        elif node.output[0] in self._absorbed:
            return  # made by the gate or the norm that reads it
        elif self._is_made_by_norm(node):
            return
        elif node.op_type == "Swish":
            alpha = attributes_of(node).get("alpha", 1.0)
            yield helper.make_node("QuickGelu", node.input, node.output, domain=MICROSOFT, alpha=alpha)
        else:
            yield node

    def _norm(self, node: NodeProto) -> NodeProto:
        source = self._residual_add(node)
        added, factor = self._terms(source) if source else ([node.input[0], ""], 1.0)
        total = [source.output[0]] if source else []
        gain, bias = [*node.input[1:], ""][:2]
        return helper.make_node(
            NORM,
            [*added, gain, bias],
            [node.output[0], *total],
            domain=DOMAIN,
            epsilon=attributes_of(node)["epsilon"],
            factor=factor,
            centred=int(node.op_type == "LayerNormalization"),
        )

    def _experts(self, node: NodeProto) -> NodeProto:
        """The node with its experts lowered."""
        lowered = NodeProto()
        lowered.CopyFrom(node)
        for attribute in lowered.attribute:
            for graph in attribute.graphs:
                nodes = type(self)(graph.node, self._initializers).run()
                del graph.node[:]
                graph.node.extend(nodes)
        return lowered

    def _made_by(self, value: str, op_type: str) -> NodeProto | None:
        node = self._producer.get(value)
        return node if node is not None and node.op_type == op_type and not node.domain else None

    def _find_gate(self, product: NodeProto) -> None:
        """Note `product` if it is an opened gate times up, by any of the activations that our kernels know."""
        if product.op_type != "Mul" or product.domain:
            return
        sigmoid = self._made_by(product.input[0], "Sigmoid")
        if sigmoid is not None and (split := self._made_by(sigmoid.input[0], "Split")):
            self._gates[product.output[0]] = split, "sigmoid", ANY
            self._absorbed.add(sigmoid.output[0])
        opened = self._made_by(product.input[0], "Swish") or self._made_by(product.input[0], "Gelu")
        if opened is None:
            return
        gate, up, inner, limits = opened.input[0], product.input[1], [opened], ANY
        activation = "gelu_tanh" if opened.op_type == "Gelu" else "silu"
        if attributes_of(opened).get("alpha", 1.0) != 1.0:
            clamps = self._clamps(opened, up)
            if clamps is None:
                return
            activation, inner = "clamped", [opened, *clamps]
            gate, up = clamps[0].input[0], clamps[1].input[0]
        elif opened.op_type == "Swish" and (bounds := self._bounds(gate, up)):
            inner += bounds
            gate, up = (bound.input[0] for bound in bounds)
            limits = self._numeral(bounds[0].input[1]), self._numeral(bounds[1].input[2])
        split = self._made_by(gate, "Split")
        if split is not None and [*split.output] == [gate, up]:
            self._gates[product.output[0]] = split, activation, limits
            self._absorbed.update(node.output[0] for node in inner)

    def _gated(self, product: NodeProto, split: NodeProto, activation: str, limits: tuple[float, float]) -> NodeProto:
        widths = numpy_helper.to_array(self._initializers[split.input[1]]).tolist()
        sigmoid = self._made_by(product.input[0], "Sigmoid")
        number = list(split.output).index(sigmoid.input[0]) if sigmoid else 0
        return helper.make_node(
            GATED,
            [split.input[0], *([product.input[1]] if sigmoid else [])],
            product.output,
            domain=DOMAIN,
            columns=widths[number],
            activation=activation,
            width=sum(widths),
            first=sum(widths[:number]),
            gate_limit=limits[0],
            up_limit=limits[1],
        )

    def _clamps(self, opened: NodeProto, up: str) -> list[NodeProto] | None:
        """What bounds gate and up and adds 1 to up, if the numbers are those of our kernels' ``clamped``."""
        more = self._made_by(up, "Add")
        bounds = self._bounds(opened.input[0], more.input[0]) if more else None
        if more is None or bounds is None:
            return None
        names = (bounds[0].input[1], bounds[1].input[2], more.input[1])
        alike = [*map(self._numeral, names)] == [7.0, 7.0, 1.0] and abs(attributes_of(opened)["alpha"] - 1.702) < 1e-6
        return [*bounds, more] if alike else None

    def _bounds(self, gate: str, up: str) -> list[NodeProto] | None:
        """What bounds a gate, and up by a number and its negative."""
        least, clip = self._made_by(gate, "Min"), self._made_by(up, "Clip")
        if least is None or clip is None or self._numeral(clip.input[1]) != -self._numeral(clip.input[2]):
            return None
        return [least, clip]

    def _numeral(self, name: str) -> float:
        """A number of the graph itself."""
        return float(numpy_helper.to_array(self._initializers[name]).item())

    def _residual_add(self, node: NodeProto) -> NodeProto | None:
        """The addition of two activations that `node`, if it is a normalisation, is the first to read."""
        if node.op_type not in NORMS:
            return None
        add = self._made_by(node.input[0], "Add")
        if add is None or any(name in self._initializers for name in add.input):
            return None
        return add if self._readers[add.output[0]][0] is node else None

    def _is_made_by_norm(self, node: NodeProto) -> bool:
        """Whether `node` is such an addition."""
        return node.op_type == "Add" and any(
            self._residual_add(reader) is node for reader in self._readers.get(node.output[0], ())
        )

    def _scaled(self, value: str) -> tuple[str, float] | None:
        """What a value is a number times, if nobody else reads it, and that number."""
        by = self._made_by(value, "Mul")
        if by is None or len(self._readers[value]) != 1 or by.input[1] not in self._initializers:
            return None
        factor = self._initializers[by.input[1]]
        return (by.input[0], float(numpy_helper.to_array(factor).item())) if not factor.dims else None

    def _terms(self, add: NodeProto) -> tuple[list[str], float]:
        """What is added, and by what the first of it is multiplied before."""
        for one, other in (add.input, reversed(add.input)):
            if scaled := self._scaled(one):
                return [scaled[0], other], scaled[1]
        return [*add.input], 1.0

    def _find_factor(self, norm: NodeProto) -> None:
        """Note what a norm multiplies by itself."""
        add = self._residual_add(norm)
        if add is not None:
            terms, _ = self._terms(add)
            self._absorbed.update(name for name in add.input if name not in terms)

    def _find_head_norms(self, attention: NodeProto) -> None:
        """Note the norms of an attention's heads, if they are split from one value.

        Without a norm, if more is split from that value: the heads must lie side by side alone.
        """
        if attention.domain != DOMAIN or not attention.op_type.startswith("CachedAttention"):
            return
        parts = [self._normed(name) for name in attention.input[: len(attention.output)]]
        split = self._made_by(parts[0].source, "Split")
        norms = [part.norm for part in parts if part.norm]
        if split is None or not {part.source for part in parts} <= {*split.output}:
            return
        size, epsilons = attributes_of(attention)["head_dim"], {attributes_of(norm)["epsilon"] for norm in norms}
        if len(epsilons) > 1 or not (norms or len(split.output) > len(parts)):
            return
        widths = numpy_helper.to_array(self._initializers[split.input[1]]).tolist()
        numbers = [list(split.output).index(part.source) for part in parts]
        self._head_norms[attention.output[0]] = HeadNorms(
            split.input[0],
            [sum(widths[:number]) for number in numbers],
            [part.norm.input[1] if part.norm else "" for part in parts],
            [widths[number] // size for number in numbers],
            size,
            epsilons.pop() if epsilons else 0.0,
            sum(widths),
        )
        self._absorbed.update(name for part in parts for name in part.made)

    def _normed(self, value: str) -> _Part:
        """How one of an attention's operands is made."""
        rows = self._made_by(value, "Reshape")
        norm = self._made_by(rows.input[0], "RMSNormalization") if rows else None
        heads = self._made_by(norm.input[0], "Reshape") if norm else None
        if rows is None or norm is None or heads is None:
            return _Part(value)
        made = (value, norm.output[0], heads.output[0])
        alone = all(len(self._readers[name]) == 1 for name in made)
        return _Part(heads.input[0], norm, made) if alone and norm.input[1] in self._initializers else _Part(value)

    def _product(self, gemm: NodeProto, dequantise: NodeProto) -> NodeProto:
        (data, scale, zeros), bits, shape, block = self._codes(dequantise)
        bias = gemm.input[2] if len(gemm.input) > 2 else ""
        return self.product([gemm.input[0], data, scale, zeros, bias], gemm.output[0], bits, shape, block)

    def _head_products(self, node: NodeProto) -> NodeProto:
        dequantise = self._made_by(node.input[1], "DequantizeLinear")
        assert dequantise is not None, node.name
        operands, bits, _, block = self._codes(dequantise)
        attributes = attributes_of(node)
        return helper.make_node(
            HEAD_PRODUCT,
            [node.input[0], *operands],
            node.output,
            domain=DOMAIN,
            bits=bits,
            block=block,
            **{name: attributes[name] for name in ("heads", "first", "width")},
        )

    def _codes(self, dequantise: NodeProto) -> tuple[list[str], int, tuple[int, int], int]:
        """A quantised matrix as kernels take it: codes, scales and zero points ("": all are in the middle); the bits of
        a code; columns and rows; and codes that share a scale."""
        data, scale, zero_point = dequantise.input
        block = attributes_of(dequantise)["block_size"]
        rows, blocks = self._initializers[scale].dims
        bits = 4 if self._initializers[data].data_type == TensorProto.UINT4 else 8
        symmetric = self._made_by(zero_point, "ConstantOfShape") is not None
        if not symmetric:
            assert blocks * bits % 8 == 0, data  # as the declaration of a weight promises
            self._initializers[zero_point] = _reinterpreted(self._initializers[zero_point], (rows, blocks * bits // 8))
        self._initializers[data] = _reinterpreted(self._initializers[data], (rows, blocks, block * bits // 8))
        return [data, scale, "" if symmetric else zero_point], bits, (blocks * block, rows), block

    def product(self, operands: list[str], y: str, bits: int, shape: tuple[int, int], block: int) -> NodeProto:
        """A product with a quantised matrix, as a node.

        Args:
            operands: x, codes, scales, zero points and bias; the last two may be "".
            y: the result.
            bits: of a code.
            shape: (K, N), of columns of x and of y.
            block: codes that share a scale.
        """
        return helper.make_node(PRODUCT, operands, [y], domain=DOMAIN, bits=bits, block=block)

    def _attention(self, node: NodeProto) -> Iterator[NodeProto]:
        count = len(node.output)  # of the operands with a row per token: a cache for each but the queries
        name = f"{node.output[0]}.qkv"
        if (norms := self._head_norms.get(node.output[0])) is not None:
            yield helper.make_node(
                HEAD_NORMS,
                [norms.x, *norms.gains],
                [name],
                domain=DOMAIN,
                firsts=norms.firsts,
                heads=norms.heads,
                size=norms.size,
                epsilon=norms.epsilon,
                width=norms.width,
            )
            packed = name
        else:
            packed = yield from self._packed(node.input[:count], name)
        yield _renamed(node, ATTENTION, [packed, *node.input[count:]])

    def _recurrence(self, node: NodeProto) -> Iterator[NodeProto]:
        operator, groups = _PACKED[node.op_type]
        operands, at = [], 0
        for count, letters in groups:
            parts = node.input[at : at + count]
            operands.append((yield from self._packed(parts, f"{node.output[0]}.{letters}")) if count > 1 else parts[0])
            at += count
        yield _renamed(node, operator, [*operands, *node.input[at:]])

    def _packed(self, parts: Sequence[str], name: str) -> Generator[NodeProto, None, str]:
        """Values side by side: what was split into them, or a new value of this name."""
        split = self._made_by(parts[0], "Split")
        if split is not None and list(split.output) == list(parts):
            return split.input[0]
        yield helper.make_node("Concat", list(parts), [name], axis=1)
        return name


def _renamed(node: NodeProto, operator: str, operands: Iterable[str]) -> NodeProto:
    """The node of a kernel in the place of another, with the same results and attributes."""
    made = helper.make_node(operator, list(operands), node.output, name=node.name, domain=DOMAIN)
    made.attribute.extend(node.attribute)
    return made


def is_narrow(graph: onnx.GraphProto, node: NodeProto) -> bool:
    """Whether the matrices of heads are codes."""
    return any(node.input[1] == made.output[0] and made.op_type == "DequantizeLinear" for made in graph.node)


def _reinterpreted(tensor: TensorProto, shape: tuple[int, ...]) -> TensorProto:
    """An initializer for the same bytes of the share file, as u8 of another shape."""
    seen = TensorProto()
    seen.CopyFrom(tensor)
    seen.data_type = TensorProto.UINT8
    del seen.dims[:]
    seen.dims.extend(shape)
    return seen


def _without_unused(nodes: list[NodeProto]) -> list[NodeProto]:
    """Drop side-effect-free leftovers (dequantisations, zero points, splits, swishes) whose results nobody reads."""
    kept: list[NodeProto] = []
    read: set[str] = set()
    for node in reversed(nodes):
        leftover = node.op_type in ("DequantizeLinear", "ConstantOfShape", "Split", "QuickGelu")
        if leftover and not any(name in read for name in node.output):
            continue
        kept.append(node)
        read.update(node.input)
    kept.reverse()
    return kept
