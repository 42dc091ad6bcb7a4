"""Parts of ONNX models: declared values, a graph as a model, and weights as references to a share file."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from motley.daemon.weights.spec import SHARE_FILE, Encoding, Placed
from motley.plugins.engine import DOMAIN

OPSET = 24
IR_VERSION = 11


def declared_value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """A value's name, type and shape; a string is a dimension that is not known beforehand."""
    return helper.make_tensor_value_info(name, kind, shape)


def whole_model(graph: onnx.GraphProto, functions: Sequence[onnx.FunctionProto] = ()) -> onnx.ModelProto:
    """A graph as a model of the operator sets that we use."""
    return helper.make_model(
        graph,
        functions=functions,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        ir_version=IR_VERSION,
        producer_name="motley",
    )


STORED_AS = {
    Encoding.FP32: TensorProto.FLOAT,
    Encoding.FP16: TensorProto.FLOAT16,
    Encoding.INT8: TensorProto.UINT8,
    Encoding.INT4: TensorProto.UINT4,
}
"""The type of a weight's values or codes."""


def stored(place: Placed) -> list[onnx.TensorProto]:
    """The initializers of a weight: references to where they are in the share file."""
    weight = place.weight
    tensors = [_external(weight.name, STORED_AS[weight.encoding], weight.shape, place.data_offset, weight.data_bytes)]
    if weight.scale_shape is not None:
        scale = f"{weight.name}.scale"
        tensors.append(_external(scale, TensorProto.FLOAT, weight.scale_shape, place.scale_offset, weight.scale_bytes))
        if weight.zeros:
            zero, kind = f"{weight.name}.zero", STORED_AS[weight.encoding]
            tensors.append(_external(zero, kind, weight.scale_shape, place.zero_offset, weight.zero_bytes))
    return tensors


def _external(name: str, kind: int, shape: Sequence[int], offset: int, length: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", SHARE_FILE), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor
