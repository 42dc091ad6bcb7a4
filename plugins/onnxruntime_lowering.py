"""Lowering a rank's graph to the operators that ONNX Runtime is fast at on a CPU.

==============================================  ==============================================================
in the graph                                    in the runtime (domain ``com.microsoft`` where not standard)
==============================================  ==============================================================
``DequantizeLinear`` -> ``Gemm(transB=1)``      ``MatMulNBits`` on the same bytes of the share file
``Split`` -> ``CachedAttention``                ``GroupQueryAttention`` on packed QKV; rotary embedding inside,
                                                cost grows with the valid length, not with the buffer
``Add`` -> ``RMSNormalization``                 ``SkipSimplifiedLayerNormalization``
``Swish``                                       ``QuickGelu(alpha=1)``
==============================================  ==============================================================

In exact mode a row must not depend on the rows beside it. The attention kernel works on tiles of rows, and uses another
matmul for a tile of a single row; so it is given an even number of rows there, the last one twice if need be. The
twin stands at the next position, which no other row sees and which is written again when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from motley.plugins.engine import DOMAIN, EngineError

MICROSOFT = "com.microsoft"
SEQLENS = "seqlens_k"
"""Added graph input i32[1]: the last position, ``position + T - 1``; in exact mode the twin's if there is one."""
TOTAL_LENGTH = "total_sequence_length"
"""Added graph input i32[]: ``seqlens_k + 1``."""
EVEN_ROWS = "even_rows"
"""Added graph input of exact mode, i64[1, T or T + 1]: the rows for the attention kernel."""
ROW_COUNT = "row_count"
"""Added graph input of exact mode, i64[1]: T."""

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
    """Lower the whole graph; collectives stay as they are.

    Args:
        exact: only to what gives a row the same bits whatever stands beside it.

    Raises:
        EngineError: that is not possible.
    """
    return _Lowering(model.graph, exact).run()


class _Lowering:
    def __init__(self, graph: onnx.GraphProto, exact: bool) -> None:
        self._exact = exact
        self._nodes = list(graph.node)
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._producer = {name: node for node in self._nodes for name in node.output if name}
        self._readers: dict[str, list[NodeProto]] = {}
        for node in self._nodes:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        self._initializers[_LEADING_AXIS] = numpy_helper.from_array(np.zeros(1, np.int64), _LEADING_AXIS)

    def run(self) -> Lowered:
        lowered = [new for node in self._nodes for new in self._lower(node)]
        return Lowered(_without_unused(lowered), self._initializers)

    def _lower(self, node: NodeProto) -> Iterator[NodeProto]:
        if node.domain == DOMAIN and node.op_type.startswith("CachedAttention"):
            yield from self._attention(node)
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
        q, k, v, key_cache, value_cache, _position, cos, sin = node.input
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
            if self._exact:
                yield helper.make_node("Gather", [name, EVEN_ROWS], [f"{y}.{name}"], axis=0)
            else:
                yield helper.make_node("Unsqueeze", [name, _LEADING_AXIS], [f"{y}.{name}"])
        padded = [f"{y}.{name}" for name in operands] + [""] * (3 - len(operands))
        yield helper.make_node(
            "GroupQueryAttention",
            [*padded, key_cache, value_cache, SEQLENS, TOTAL_LENGTH, cos, sin],
            [f"{y}.batched", key_out, value_out],
            domain=MICROSOFT,
            num_heads=attributes["q_heads"],
            kv_num_heads=attributes["kv_heads"],
            scale=attributes["scale"],
            local_window_size=attributes["window"] or -1,
            do_rotary=1,
        )
        rows = f"{y}.even" if self._exact else y
        yield helper.make_node("Squeeze", [f"{y}.batched", _LEADING_AXIS], [rows])
        if self._exact:
            yield helper.make_node("Slice", [rows, _LEADING_AXIS, ROW_COUNT], [y])


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
