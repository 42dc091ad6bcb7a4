"""Lowering a rank's graph to the operators that ONNX Runtime is fast at on a CPU.

==============================================  ==============================================================
in the graph                                    in the runtime (domain ``com.microsoft`` where not standard)
==============================================  ==============================================================
``DequantizeLinear`` -> ``Gemm(transB=1)``      ``MatMulNBits`` on the same bytes of the share file
``Split`` -> ``CachedAttention``                ``GroupQueryAttention`` on packed QKV; rotary embedding inside,
                                                cost grows with the valid length, not with the buffer; where
                                                `GROUPED` is set, the heads that share keys as rows of one head
``Add`` -> ``RMSNormalization``                 ``SkipSimplifiedLayerNormalization``
``Swish``                                       ``QuickGelu(alpha=1)``
==============================================  ==============================================================

In exact mode a row must not depend on the rows beside it: only kernels are used that keep to that where the number of
rows is even.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from motley.plugins.engine import DOMAIN, EngineError
from motley.plugins.segments import is_experts

MICROSOFT = "com.microsoft"
SEQLENS = "seqlens_k"
"""Added graph input i32[1]: the last position, ``position + T - 1``."""
TOTAL_LENGTH = "total_sequence_length"
"""Added graph input i32[]: ``seqlens_k + 1``."""

GROUPED = "grouped"
"""Added graph input bool[]: T = 1 and the sequence has `GROUPED_FROM` tokens or more."""
GROUPED_FROM = 128
"""Tokens. The kernel reads the keys and values of a group once for each of its query heads: for 16 heads in 2 groups
and 2000 tokens that takes 370 us, and 156 us if the heads of a group are rows of one. Up to here they are even."""

ACCURACY_INT8 = 4
"""`MatMulNBits` quantises activations to int8 per block and multiplies integers: three times as fast as level 1."""

HEAD_DIM_STEP = 16
"""`GroupQueryAttention` takes heads of a multiple of this; for others the runtime inlines the function's body, whose
cost grows with the buffer."""

EXACT_HEAD_DIM = 128
"""In wider heads the runtime cuts a row's dot products where the number of valid positions says."""

_LEADING_AXIS = "motley.leading_axis"


@dataclass(frozen=True)
class Lowered:
    nodes: list[NodeProto]
    initializers: Mapping[str, TensorProto]


def lower(model: onnx.ModelProto, exact: bool) -> Lowered:
    """Lower the whole graph; collectives stay as they are, and so do Experts nodes around their graphs.

    Args:
        exact: only to what gives a row the same bits whatever stands beside it.

    Raises:
        EngineError: that is not possible.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    initializers[_LEADING_AXIS] = numpy_helper.from_array(np.zeros(1, np.int64), _LEADING_AXIS)
    return Lowered(_Lowering(model.graph.node, initializers, exact).run(), initializers)


class _Lowering:
    def __init__(self, nodes: Iterable[NodeProto], initializers: dict[str, TensorProto], exact: bool) -> None:
        self._exact = exact
        self._nodes = list(nodes)
        self._initializers = initializers
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self._nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)

    def run(self) -> list[NodeProto]:
        return _without_unused([new for node in self._nodes for new in self._lower(node)])

    def _lower(self, node: NodeProto) -> Iterator[NodeProto]:
        if node.domain == DOMAIN and node.op_type.startswith("CachedAttention"):
            yield from self._attention(node)
        elif is_experts(node):
            yield self._experts(node)
        elif node.op_type == "Gemm" and (source := self._made_by(node.input[1], "DequantizeLinear")):
            yield self._quantised_matmul(node, source)
        elif node.op_type == "RMSNormalization" and (source := self._residual_add(node)):
            yield helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [*source.input, node.input[1]],
                [node.output[0], "", "", source.output[0]],
                domain=MICROSOFT,
                epsilon=_attributes(node)["epsilon"],
            )
        elif node.op_type == "Add" and any(
            self._residual_add(reader) is node for reader in self._readers.get(node.output[0], ())
        ):
            return  # made by the normalisation that reads it
        elif node.op_type == "Swish":
            yield helper.make_node("QuickGelu", node.input, node.output, domain=MICROSOFT, alpha=1.0)
        else:
            yield node

    def _experts(self, node: NodeProto) -> NodeProto:
        """The node with its experts lowered."""
        lowered = NodeProto()
        lowered.CopyFrom(node)
        for attribute in lowered.attribute:
            for graph in attribute.graphs:
                nodes = _Lowering(graph.node, self._initializers, self._exact).run()
                del graph.node[:]
                graph.node.extend(nodes)
        return lowered

    def _made_by(self, value: str, op_type: str) -> NodeProto | None:
        node = self._producer.get(value)
        return node if node is not None and node.op_type == op_type and not node.domain else None

    def _residual_add(self, node: NodeProto) -> NodeProto | None:
        """The addition of two activations that `node`, if it is a normalisation, is the first to read."""
        if node.op_type != "RMSNormalization":
            return None
        add = self._made_by(node.input[0], "Add")
        if add is None or any(name in self._initializers for name in add.input):
            return None
        return add if self._readers[add.output[0]][0] is node else None

    def _quantised_matmul(self, gemm: NodeProto, dequantise: NodeProto) -> NodeProto:
        data, scale, zero_point = dequantise.input
        block = _attributes(dequantise)["block_size"]
        rows, columns = self._initializers[scale].dims[0], self._initializers[scale].dims[1] * block
        bits = 4 if self._initializers[data].data_type == TensorProto.UINT4 else 8
        symmetric = self._made_by(zero_point, "ConstantOfShape") is not None
        if not symmetric:  # the operator wants whole bytes per row, which is what the declaration of a weight promises
            assert columns // block * bits % 8 == 0, data
            packed = _reinterpreted(self._initializers[zero_point], (rows, columns // block * bits // 8))
            self._initializers[zero_point] = packed
        blob = block * bits // 8
        self._initializers[data] = _reinterpreted(self._initializers[data], (rows, columns // block, blob))
        bias = gemm.input[2] if len(gemm.input) > 2 else ""
        optional = ["" if symmetric else zero_point, "", bias]
        while optional and not optional[-1]:
            optional.pop()
        return helper.make_node(
            "MatMulNBits",
            [gemm.input[0], data, scale, *optional],
            gemm.output,
            domain=MICROSOFT,
            K=columns,
            N=rows,
            bits=bits,
            block_size=block,
            accuracy_level=ACCURACY_INT8,
        )

    def _attention(self, node: NodeProto) -> Iterator[NodeProto]:
        q, k, v, key_cache, value_cache, position, cos, sin = node.input
        y, key_out, value_out = node.output
        attributes = _attributes(node)
        head_dim = attributes["head_dim"]
        if self._exact and (head_dim % HEAD_DIM_STEP or head_dim > EXACT_HEAD_DIM):
            raise EngineError(
                f"engine 'onnxruntime' cannot keep exact=true with attention heads of {head_dim}: "
                f"a multiple of {HEAD_DIM_STEP} up to {EXACT_HEAD_DIM} is needed"
            )
        if head_dim % HEAD_DIM_STEP:
            yield node
            return
        split = self._made_by(q, "Split")
        packed = split is not None and list(split.output) == [q, k, v]
        operands = [split.input[0]] if split is not None and packed else [q, k, v]
        for name in operands:
            yield helper.make_node("Unsqueeze", [name, _LEADING_AXIS], [f"{y}.{name}"])
        heads = _Heads(
            operands=[f"{y}.{name}" for name in operands],
            caches=[key_cache, value_cache],
            lengths=[SEQLENS, TOTAL_LENGTH],
            rotary=[cos, sin],
            queries=attributes["q_heads"],
            keys=attributes["kv_heads"],
            width=head_dim,
            scale=attributes["scale"],
            window=attributes["window"],
        )
        outputs = [f"{y}.batched", key_out, value_out]
        if heads.group == 1 or heads.window or self._exact:
            yield heads.each(outputs)
        else:
            yield helper.make_node(
                "If",
                [GROUPED],
                outputs,
                then_branch=heads.grouped(f"{y}.grouped", position),
                else_branch=heads.apart(f"{y}.apart"),
            )
        yield helper.make_node("Squeeze", [f"{y}.batched", _LEADING_AXIS], [y])


@dataclass(frozen=True)
class _Heads:
    """Cached attention of this rank's query heads in the runtime's operators. It makes f32[1, T, heads * width] and
    the caches, which are updated in place."""

    operands: list[str]
    """f32[1, T, ...]: Q, K and V side by side, or each for itself."""
    caches: list[str]
    lengths: list[str]
    rotary: list[str]
    queries: int
    keys: int
    width: int
    scale: float
    window: int

    @property
    def group(self) -> int:
        """Query heads that share keys and values."""
        return self.queries // self.keys

    def each(self, outputs: list[str]) -> NodeProto:
        """Every query head reads the keys and values of its group for itself."""
        operands = [*self.operands, "", ""][:3]
        return self._attention(operands, outputs, heads=self.queries, local_window_size=self.window or -1)

    def apart(self, at: str) -> onnx.GraphProto:
        """`each` as a branch."""
        outputs = _branch_outputs(at)
        return helper.make_graph([self.each(outputs)], at, [], [_float(name) for name in outputs])

    def grouped(self, at: str, position: str) -> onnx.GraphProto:
        """One token: the query heads of a group are rows of one head, which reads the keys and values once.

        The token's own are cached first, by an attention that sees nothing else; that of the rows adds none and is
        not causal, as all rows stand at the same position.
        """
        outputs = _branch_outputs(at)
        constants: list[TensorProto] = []

        def integers(*values: int) -> str:
            constants.append(numpy_helper.from_array(np.array(values, np.int64), f"{at}.i64.{len(constants)}"))
            return constants[-1].name

        def node(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
            nodes.append(helper.make_node(op, inputs, [f"{at}.{output}"], **attributes))
            return f"{at}.{output}"

        nodes: list[NodeProto] = []
        width, keys, group = self.width, self.keys, self.group
        if len(self.operands) == 1:
            q, k, v = (f"{at}.{name}" for name in "qkv")
            widths = integers(self.queries * width, keys * width, keys * width)
            nodes.append(helper.make_node("Split", [*self.operands, widths], [q, k, v], axis=2))
        else:
            q, k, v = self.operands
        nodes.append(self._attention([k, k, v], [f"{at}.own", *outputs[1:]], heads=keys, local_window_size=1))

        by_group = node("Reshape", [q, integers(keys, group, width)], "by_group")
        by_row = node("Transpose", [by_group], "by_row", perm=[1, 0, 2])
        rows = node("Reshape", [by_row, integers(1, group, keys * width)], "rows")
        positions = node("Expand", [position, integers(1, group)], "positions")
        nothing = numpy_helper.from_array(np.zeros((1, 0, keys * width), np.float32), f"{at}.nothing")
        constants.append(nothing)
        attended = self._attention([rows, nothing.name, nothing.name], [f"{at}.attended"], heads=keys, causal=0)
        attended.input[3:5] = outputs[1:]
        attended.input.append(positions)
        nodes.append(attended)
        by_row = node("Reshape", [f"{at}.attended", integers(group, keys, width)], "attended_by_row")
        by_group = node("Transpose", [by_row], "attended_by_group", perm=[1, 0, 2])
        nodes.append(helper.make_node("Reshape", [by_group, integers(1, 1, self.queries * width)], outputs[:1]))
        return helper.make_graph(nodes, at, [], [_float(name) for name in outputs], constants)

    def _attention(self, operands: list[str], outputs: list[str], heads: int, **attributes: Any) -> NodeProto:
        return helper.make_node(
            "GroupQueryAttention",
            [*operands, *self.caches, *self.lengths, *self.rotary],
            outputs,
            domain=MICROSOFT,
            num_heads=heads,
            kv_num_heads=self.keys,
            scale=self.scale,
            do_rotary=1,
            **attributes,
        )


def _branch_outputs(at: str) -> list[str]:
    return [f"{at}.{name}" for name in ("y", "key_cache", "value_cache")]


def _float(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _reinterpreted(tensor: TensorProto, shape: tuple[int, ...]) -> TensorProto:
    """The same external bytes, seen as uint8 of another shape."""
    seen = TensorProto()
    seen.CopyFrom(tensor)
    seen.data_type = TensorProto.UINT8
    del seen.dims[:]
    seen.dims.extend(shape)
    return seen


def _without_unused(nodes: list[NodeProto]) -> list[NodeProto]:
    """Drop side-effect-free leftovers (dequantisations, zero points, splits) whose results nobody reads."""
    kept: list[NodeProto] = []
    read: set[str] = set()
    for node in reversed(nodes):
        leftover = node.op_type in ("DequantizeLinear", "ConstantOfShape", "Split")
        if leftover and not any(name in read for name in node.output):
            continue
        kept.append(node)
        read.update(node.input)
    kept.reverse()
    return kept
