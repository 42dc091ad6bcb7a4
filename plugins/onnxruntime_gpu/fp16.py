"""Has a graph's products computed in FP16, and the gates between two of them; all else stays FP32.

So what is summed over ranks, residuals, norms, routers, rotation and attention are FP32: a value is cast where a
product begins and where it ends. Matrices are cast too, once: the runtime computes beforehand what constants make.

Whatever products are computed in, keys and values may be kept in FP16: they are cast as they are written.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from onnx import NodeProto, TensorProto, helper

from motley.plugins.engine import EngineError, EngineOptions
from motley.plugins.onnxruntime_gpu.bound import needed
from motley.plugins.onnxruntime_gpu.device import Gpu

ACTIVATIONS = "activations"
"""The option that says what products are computed in, ``fp32`` or ``fp16``."""

_PRODUCTS = {"Gemm", "MatMulNBits"}
_GATES = {"Add", "Clip", "Gelu", "Min", "Mul", "QuickGelu", "Sigmoid", "Split"}
"""Operators that compute in FP16 where a product is made of what they make of another."""


def is_fp16_asked_for(options: EngineOptions, gpu: Gpu) -> bool:
    """Whether products are to be computed in FP16.

    Raises:
        EngineError: the option says neither that nor FP32, or the GPU cannot.
    """
    asked = options.extra.get(ACTIVATIONS, "fp32")
    if asked not in ("fp32", "fp16"):
        raise EngineError(f"engine {gpu.provider.engine!r}: option {ACTIVATIONS} is fp32 or fp16, not {asked!r}")
    if asked == "fp16":
        gpu.check_fp16()
    return asked == "fp16"


def with_products_in_fp16(
    nodes: Sequence[NodeProto], outputs: Collection[str], initializers: Mapping[str, TensorProto]
) -> list[NodeProto]:
    """The nodes of a graph, in order, with its products in FP16; what floats it reads and gives is FP32 as before."""
    return [*_Rewriting(nodes, initializers).run(outputs)]


def with_caches_in_fp16(nodes: Sequence[NodeProto], caches: Collection[str]) -> list[NodeProto]:
    """The nodes of a lowered graph, in order, where the caches of these names are FP16: what goes there is cast."""
    rewritten = []
    for node in nodes:
        if node.op_type == "ScatterND" and node.input[0] in caches:
            cache, slots, written = node.input
            rewritten.append(helper.make_node("Cast", [written], [_half(written)], to=TensorProto.FLOAT16))
            node = helper.make_node("ScatterND", [cache, slots, _half(written)], node.output)
        rewritten.append(node)
    return rewritten


class _Rewriting:
    def __init__(self, nodes: Sequence[NodeProto], initializers: Mapping[str, TensorProto]) -> None:
        self._nodes = nodes
        self._initializers = initializers
        self._in_fp16 = _outputs_in_fp16(nodes)
        self._cast: set[str] = set()
        """Values that there are in both types."""

    def run(self, outputs: Collection[str]) -> Iterator[NodeProto]:
        for node in self._nodes:
            fp16 = node.output[0] in self._in_fp16
            for name in filter(None, node.input):
                yield from self._available(name, fp16)
            made = NodeProto()
            made.CopyFrom(node)
            if fp16:
                made.input[:] = [_half(name) if self._is_float(name) else name for name in node.input]
                made.output[:] = map(_half, node.output)
            yield made
        for name in outputs:
            yield from self._available(name, False)

    def _available(self, name: str, fp16: bool) -> Iterator[NodeProto]:
        """What makes a value available in FP16, or in FP32."""
        if (name in self._in_fp16) != fp16 and name not in self._cast and self._is_float(name):
            self._cast.add(name)
            if fp16:
                yield helper.make_node("Cast", [name], [_half(name)], to=TensorProto.FLOAT16)
            else:
                yield helper.make_node("Cast", [_half(name)], [name], to=TensorProto.FLOAT)

    def _is_float(self, name: str) -> bool:
        """Whether an operand of a product or gate is no whole numbers: only constants are any."""
        return bool(name) and (
            name not in self._initializers or self._initializers[name].data_type == TensorProto.FLOAT
        )


def _half(name: str) -> str:
    """What a value is called in FP16."""
    return f"{name}.fp16"


def _outputs_in_fp16(nodes: Sequence[NodeProto]) -> set[str]:
    """The values that are made in FP16."""
    chosen = [name for node in nodes if node.op_type == "TopK" for name in node.output]
    routers = {node.output[0] for node in needed(nodes, chosen)}
    products = [node for node in nodes if node.op_type in _PRODUCTS and node.output[0] not in routers]
    made = {node.output[0] for node in products}
    gates = [node for node in nodes if node.op_type in _GATES]
    after, before = set(made), {node.input[0] for node in products}
    for node in gates:
        if not after.isdisjoint(node.input):
            after.update(node.output)
    for node in reversed(gates):
        if not before.isdisjoint(node.output):
            before.update(node.input)
    return made.union(
        *(node.output for node in gates if node.output[0] in after and not before.isdisjoint(node.output))
    )
