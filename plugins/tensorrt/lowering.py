"""Lowers a rank's graph to nodes that TensorRT for RTX parses, with weights in forms that it does not widen in memory.

===================================  =====================================================================
in the graph                         in the engine
===================================  =====================================================================
uint4 ``DequantizeLinear``           signed int4 (``code - 8``), the only type whose unpacking is fused into
                                     the matmul
uint8 ``DequantizeLinear``           two int4 planes side by side along K, ``16 * high + low``: int8 blocks
                                     would be unpacked to FP32 in memory at every call
zero points                          a term of their own, ``(sum of x over a block) * (centre - zero) * scale``:
                                     only zero points of 0 are parsed
``Cast`` of an FP16 matrix           ``x`` as two FP16 numbers in two rows, the products cast to FP32 at once:
                                     a cast of the constant would be folded, and doubled
``CachedAttention``                  its body, with a cache of fixed capacity (nothing else is parsed) and an
                                     ``Attention`` that may be decomposed (in FP32 it is refused otherwise)
``motley.DistCollective``            a cut between two engines, or the parser's own ``DistCollective``
===================================  =====================================================================

Everything here is pure: constants are declared, and made from the share file when an engine is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.inliner
from onnx import NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from motley.plugins.engine import RankGraph
from motley.plugins.known_nodes import check_known
from motley.plugins.mapped_share import Array, MappedShare, nibbles, place_of
from motley.plugins.nodes import attributes_of, is_collective
from motley.plugins.segments import Segment, cut_into_segments

CENTRE: Mapping[int, int] = {TensorProto.UINT4: 8, TensorProto.UINT8: 136}
"""The code that is 0 in the signed form, by the type of the codes: 8, and ``16 * 8 + 8`` for two planes."""
LOW_SCALE = 2048.0
"""2^11: what FP16 has rounded off, times this, is as large as what it has kept."""
RESIDUAL = "residual"
"""An output f32[T, D] that lowering adds for a rank without a vocabulary, whose last collective is else unused."""


@dataclass(frozen=True)
class Constant:
    """An initializer of the lowered graph.

    Attributes:
        kind: its ONNX type.
        make: its bytes, C-contiguous, from the share file; int4 in pairs, the first in the low nibble.
    """

    kind: int
    shape: tuple[int, ...]
    make: Callable[[MappedShare], Array]


@dataclass(frozen=True)
class Part:
    """What one TensorRT engine is built from.

    Attributes:
        proto: its initializers have no data.
        constants: the data, by initializer.
        segment: what the part is of the graph, which can be all of it.
    """

    name: str
    proto: onnx.ModelProto
    constants: Mapping[str, Constant]
    segment: Segment


@dataclass(frozen=True)
class Lowered:
    nodes: list[NodeProto]
    constants: Mapping[str, Constant]
    inputs: Mapping[str, ValueInfoProto]
    outputs: Mapping[str, ValueInfoProto]
    opset: int
    ir_version: int
    hidden: int


def lower(graph: RankGraph) -> Lowered:
    """Lower all but the collectives, which stay as they are.

    Raises:
        EngineError: a node that this engine does not know.
    """
    check_known("tensorrt", graph.proto.graph)
    return _Lowering(graph).run()


def segments(lowered: Lowered) -> list[Part]:
    """One part per segment between two collectives (see `motley.plugins.segments`), in order.

    A part without outputs has nothing to compute and is not to be built.
    """
    cut = cut_into_segments(lowered.nodes, lowered.constants, lowered.outputs)
    return [_part(lowered, f"segment-{index:03}", segment) for index, segment in enumerate(cut)]


def whole(lowered: Lowered) -> Part:
    """The whole graph in one part, its collectives done by TensorRT over a communicator."""
    nodes = []
    for node in lowered.nodes:
        standard = NodeProto()
        standard.CopyFrom(node)
        if is_collective(node):
            standard.domain = ""
        nodes.append(standard)
    outputs = list(lowered.outputs)
    if "logits" not in lowered.outputs:
        nodes.append(helper.make_node("Identity", [lowered.nodes[-1].output[0]], [RESIDUAL]))
        outputs.append(RESIDUAL)
    read = {name for node in nodes for name in node.input}
    inputs = tuple(name for name in lowered.inputs if name in read)
    return _part(lowered, "whole", Segment(tuple(nodes), inputs, tuple(outputs)))


def _part(lowered: Lowered, name: str, segment: Segment) -> Part:
    """Make a part of a segment.

    Values that are neither inputs nor outputs of the graph are f32[T, D]: residuals, operands and results of sums.
    """

    def declared(names: Sequence[str], border: Mapping[str, ValueInfoProto]) -> list[ValueInfoProto]:
        return [
            border.get(name) or helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", lowered.hidden])
            for name in names
        ]

    read = dict.fromkeys(name for node in segment.nodes for name in node.input)
    constants = {name: lowered.constants[name] for name in read if name in lowered.constants}
    proto = helper.make_model(
        helper.make_graph(
            segment.nodes,
            name,
            declared(segment.inputs, lowered.inputs),
            declared(segment.outputs, lowered.outputs),
            [TensorProto(name=name, data_type=each.kind, dims=each.shape) for name, each in constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", lowered.opset)],
        ir_version=lowered.ir_version,
    )
    return Part(name, proto, constants, segment)


class _Lowering:
    def __init__(self, graph: RankGraph) -> None:
        model = onnx.inliner.inline_local_functions(graph.proto)
        self._graph = graph
        self._model = model
        self._stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producer = {name: node for node in model.graph.node for name in node.output if name}
        self._constants: dict[str, Constant] = {}

    def run(self) -> Lowered:
        proto = self._model.graph
        lowered = [new for node in proto.node for new in self._lower(node)]
        read = {name for node in lowered for name in node.input}
        for name, tensor in self._stored.items():
            if name in read and name not in self._constants:
                self._constants[name] = _as_stored(tensor)
        return Lowered(
            nodes=lowered,
            constants=self._constants,
            inputs={value.name: self._with_capacity(value) for value in proto.input},
            outputs={value.name: self._with_capacity(value) for value in proto.output},
            opset=next(entry.version for entry in self._model.opset_import if not entry.domain),
            ir_version=self._model.ir_version,
            hidden=self._graph.hidden,
        )

    def _lower(self, node: NodeProto) -> Iterator[NodeProto]:
        if node.op_type == "Gemm":
            yield from self._matmul(node)
        elif node.op_type in ("Cast", "DequantizeLinear") or self._is_zero_point(node):
            return  # made again by the matmul that reads it
        elif node.op_type == "Attention":
            decomposable = NodeProto()
            decomposable.CopyFrom(node)
            decomposable.attribute.append(helper.make_attribute("TRT_decomposable", 1))
            yield decomposable
        else:
            yield node

    def _is_zero_point(self, node: NodeProto) -> bool:
        return any(
            attribute.name == "value" and attribute.t.data_type in CENTRE
            for attribute in node.attribute
            if node.op_type == "ConstantOfShape"
        )

    def _matmul(self, gemm: NodeProto) -> Iterator[NodeProto]:
        matrix = gemm.input[1]
        source = self._producer.get(matrix)
        if source is not None and source.op_type == "DequantizeLinear":
            yield from self._quantised(gemm, source)
        elif source is not None:
            yield from self._halves(gemm, source.input[0])
        else:
            yield gemm

    def _quantised(self, gemm: NodeProto, dequantise: NodeProto) -> Iterator[NodeProto]:
        """f32[T, K] -> f32[T, N] by ``x @ ((code - zero) * scale).T``, a scale and a zero for each block along K."""
        data, scale, zero = dequantise.input
        codes, scales = self._stored[data], self._stored[scale]
        block = attributes_of(dequantise)["block_size"]
        rows, blocks = scales.dims
        centre = CENTRE[codes.data_type]
        planes = codes.data_type == TensorProto.UINT8
        x, y = gemm.input[0], gemm.output[0]

        def split_codes(share: MappedShare) -> Array:
            stored = share.view(_as_bytes(codes))
            return _planes(stored.reshape(rows, -1)) if planes else stored ^ 0x88

        def widened(share: MappedShare) -> Array:
            values = share.view(scales)
            return np.concatenate([16 * values, values], axis=1) if planes else values

        operand = x
        if planes:
            operand = f"{y}.x.twice"
            yield helper.make_node("Concat", [x, x], [operand], axis=1)
        width = blocks * block * (1 + planes)
        signed, wide, matrix = f"{data}.int4", f"{data}.int4.scale", f"{data}.fp32"
        self._constants[signed] = Constant(TensorProto.INT4, (rows, width), split_codes)
        self._constants[wide] = Constant(TensorProto.FLOAT, (rows, blocks * (1 + planes)), widened)
        yield helper.make_node("DequantizeLinear", [signed, wide], [matrix], axis=1, block_size=block)

        per_block = self._stored.get(zero)
        if per_block is None and not planes:
            yield helper.make_node("Gemm", [operand, matrix, *gemm.input[2:]], [y], transB=1)
            return

        def offsets(share: MappedShare) -> Array:
            zeros: Array | int = CENTRE[TensorProto.UINT8] - 8
            if per_block is not None:
                packed = share.view(_as_bytes(per_block))
                zeros = (packed if planes else nibbles(packed)).reshape(rows, blocks)
            return (np.float32(centre) - np.asarray(zeros, np.float32)) * share.view(scales)

        shape, axis, offset = f"{y}.blocks", "motley.block_axis", f"{data}.offset"
        self._constants[offset] = Constant(TensorProto.FLOAT, (rows, blocks), offsets)
        self._constants[shape] = _literal(np.array([-1, blocks, block], np.int64))
        self._constants[axis] = _literal(np.array([2], np.int64))
        yield helper.make_node("Gemm", [operand, matrix, *gemm.input[2:]], [f"{y}.centred"], transB=1)
        yield helper.make_node("Reshape", [x, shape], [f"{y}.x.blocks"])
        yield helper.make_node("ReduceSum", [f"{y}.x.blocks", axis], [f"{y}.x.sums"], keepdims=0)
        yield helper.make_node("Gemm", [f"{y}.x.sums", offset], [f"{y}.offset"], transB=1)
        yield helper.make_node("Add", [f"{y}.centred", f"{y}.offset"], [y])

    def _halves(self, gemm: NodeProto, matrix: str) -> Iterator[NodeProto]:
        """f32[T, K] -> f32[T, N] with the matrix in FP16: ``x = high + low``, 22 bits, in 2 T rows of one matmul."""
        x, y = gemm.input[0], gemm.output[0]
        self._constants["motley.up"] = _literal(np.float32(LOW_SCALE))
        self._constants["motley.down"] = _literal(np.float32(1 / LOW_SCALE))
        half, single = TensorProto.FLOAT16, TensorProto.FLOAT
        yield helper.make_node("Cast", [x], [f"{y}.x.high"], to=half)
        yield helper.make_node("Cast", [f"{y}.x.high"], [f"{y}.x.rounded"], to=single)
        yield helper.make_node("Sub", [x, f"{y}.x.rounded"], [f"{y}.x.rest"])
        yield helper.make_node("Mul", [f"{y}.x.rest", "motley.up"], [f"{y}.x.scaled"])
        yield helper.make_node("Cast", [f"{y}.x.scaled"], [f"{y}.x.low"], to=half)
        yield helper.make_node("Concat", [f"{y}.x.high", f"{y}.x.low"], [f"{y}.x.halves"], axis=0)
        yield helper.make_node("Gemm", [f"{y}.x.halves", matrix], [f"{y}.products.fp16"], transB=1)
        yield helper.make_node("Cast", [f"{y}.products.fp16"], [f"{y}.products"], to=single)
        yield helper.make_node("Split", [f"{y}.products"], [f"{y}.high", f"{y}.low.scaled"], axis=0, num_outputs=2)
        yield helper.make_node("Mul", [f"{y}.low.scaled", "motley.down"], [f"{y}.low"])
        bias = gemm.input[2:]
        total = f"{y}.sum" if bias else y
        yield helper.make_node("Add", [f"{y}.high", f"{y}.low"], [total])
        if bias:
            yield helper.make_node("Add", [total, *bias], [y])

    def _with_capacity(self, value: ValueInfoProto) -> ValueInfoProto:
        """How a graph input or output is declared: caches are as long as the context, as TensorRT wants them static."""
        fixed = ValueInfoProto()
        fixed.CopyFrom(value)
        for dimension in fixed.type.tensor_type.shape.dim:
            if dimension.dim_param == "C":
                dimension.dim_value = self._graph.context
        return fixed


def _as_stored(tensor: TensorProto) -> Constant:
    if tensor.data_location == TensorProto.EXTERNAL:
        return Constant(tensor.data_type, tuple(tensor.dims), lambda share: share.view(tensor))
    return _literal(numpy_helper.to_array(tensor))


def _literal(value: Array | np.generic) -> Constant:
    array = np.asarray(value)
    return Constant(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, lambda share: array)


def _as_bytes(tensor: TensorProto) -> TensorProto:
    """An initializer for the same bytes of the share file, as u8[length]."""
    seen = TensorProto(name=tensor.name, data_type=TensorProto.UINT8, data_location=TensorProto.EXTERNAL)
    seen.external_data.extend(tensor.external_data)
    seen.dims.append(place_of(tensor)[1])
    return seen


def _planes(codes: Array) -> Array:
    """u8[N, K] -> packed int4 of [N, 2 K]: the signed high nibbles of a row, then its signed low ones."""
    nibbles = np.concatenate([codes >> 4, codes & 15], axis=1) ^ 8
    return nibbles[:, ::2] | nibbles[:, 1::2] << 4
