"""Lowers a rank's graph to operators that ONNX Runtime's providers for GPUs have.

===========================================  =========================================================
in the graph                                 in the runtime
===========================================  =========================================================
``DequantizeLinear`` -> ``Gemm(transB=1)``   ``MatMulNBits`` of domain ``com.microsoft``, if the provider has it
``Split`` -> ``CachedAttention``             what turns rows and writes their keys and values, and
                                             `motley.plugins.segments.ATTEND`, see
                                             `motley.plugins.onnxruntime_gpu.attention`
``Add`` -> ``RMSNormalization`` of rows      ``SkipSimplifiedLayerNormalization``: one kernel for two
``Swish``                                    ``QuickGelu``, the same: the runtime makes four kernels of it
===========================================  =========================================================

All else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx
from onnx import NodeProto, helper

from motley.plugins.nodes import attributes_of
from motley.plugins.onnxruntime.lowering import MICROSOFT, Lowered, Lowering
from motley.plugins.onnxruntime_gpu.attention import Constants, with_writing
from motley.plugins.onnxruntime_gpu.providers import Provider
from motley.plugins.segments import ATTENTION

BY_CODES = 4
"""The level of accuracy by which the runtime makes 8-bit codes of what it multiplies codes with, as the engines for
CPUs and CUDA do: a GPU adds the products of four of them at once. An H200 took a 25th of the time for 64 rows."""


def lowered_for(provider: Provider, model: onnx.ModelProto) -> Lowered:
    """Lower a whole graph; collectives stay as they are, and so do Experts nodes around their graphs."""
    kind = _DeviceLowering if provider.has_products else _StandardLowering
    return kind.lower(model)


def product_node(inputs: Sequence[str], y: str, bits: int, shape: tuple[int, int], block: int) -> NodeProto:
    """The runtime's own product with a quantised matrix.

    Args:
        inputs: x, codes, scales, zeros, an order, a bias; what is not there is empty or left out.
        shape: columns of x and of y.
    """
    named = list(inputs)
    while not named[-1]:
        named.pop()
    columns, rows = shape
    sizes: dict[str, Any] = {"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": BY_CODES}
    return helper.make_node("MatMulNBits", named, [y], domain=MICROSOFT, **sizes)


class _DeviceLowering(Lowering):
    """Lowers nodes for a GPU: the runtime has a kernel for each."""

    fuses = False

    def product(self, operands: list[str], y: str, bits: int, shape: tuple[int, int], block: int) -> NodeProto:
        """A product with a quantised matrix, by the runtime's own operator; see `Lowering.product`."""
        x, codes, scales, zeros, bias = operands
        return product_node([x, codes, scales, zeros, "", bias], y, bits, shape, block)

    def _lower(self, node: NodeProto) -> Iterator[NodeProto]:
        if not self.fuses_products:
            yield from super()._lower(node)
        elif node.op_type == "Swish":
            alpha = attributes_of(node).get("alpha", 1.0)
            yield helper.make_node("QuickGelu", node.input, node.output, domain=MICROSOFT, alpha=alpha)
        elif node.op_type == "RMSNormalization" and (add := self._residual_add(node)):
            yield helper.make_node(
                "SkipSimplifiedLayerNormalization",
                [*add.input, node.input[1]],
                [node.output[0], "", "", add.output[0]],
                domain=MICROSOFT,
                epsilon=attributes_of(node)["epsilon"],
            )
        elif not self._is_made_by_norm(node):
            yield from super()._lower(node)

    def _residual_add(self, node: NodeProto) -> NodeProto | None:
        return super()._residual_add(node) if node.op_type == "RMSNormalization" else None

    def _attention(self, node: NodeProto) -> Iterator[NodeProto]:
        for made in super()._attention(node):
            if made.op_type == ATTENTION:
                yield from with_writing(made, Constants(self._initializers))
            else:
                yield made


class _StandardLowering(_DeviceLowering):
    """Lowers nodes for a GPU whose provider has the standard's operators alone."""

    fuses_products = False
