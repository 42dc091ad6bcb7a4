"""The parts that TensorRT gets, run by ONNX Runtime: what the lowering means, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import NodeProto

from motley.plugins.engine import DOMAIN, F32, Collectives, EngineOptions, RankGraph, Span, micro_chunks
from motley.plugins.mapped_share import MappedShare
from motley.plugins.nodes import COLLECTIVE
from motley.plugins.segments import Reduction
from motley.plugins.spans import check_step, wanted_rows
from motley.plugins.tensorrt.lowering import Lowered, Part, lower, segments, whole


def with_data(part: Part, share: MappedShare) -> onnx.ModelProto:
    """The part's model, with its constants in it."""
    model = onnx.ModelProto()
    model.CopyFrom(part.proto)
    for tensor in model.graph.initializer:
        tensor.raw_data = part.constants[tensor.name].make(share).tobytes()
    return model


def for_onnxruntime(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without what ONNX Runtime does not take: an attribute; and collectives, which one rank does not need."""
    for node in model.graph.node:
        if node.op_type == "Attention":
            (mark,) = (attribute for attribute in node.attribute if attribute.name == "TRT_decomposable")
            node.attribute.remove(mark)
        elif node.op_type == "DistCollective":
            node.CopyFrom(NodeProto(op_type="Identity", input=node.input, output=node.output))
    return model


def cut_at_sums(part: Part, hidden: int) -> list[Part]:
    """A whole graph's part as parts between its collectives, which ONNX Runtime has not."""
    nodes = []
    for node in part.proto.graph.node:
        own = NodeProto()
        own.CopyFrom(node)
        own.domain = DOMAIN if node.op_type == COLLECTIVE else node.domain
        nodes.append(own)
    graph, (opset,) = part.proto.graph, part.proto.opset_import
    border = ({value.name: value for value in values} for values in (graph.input, graph.output))
    return segments(Lowered(nodes, part.constants, *border, opset.version, part.proto.ir_version, hidden))


class LoweredEngine:
    """`motley.plugins.engine.Engine` of whole caches. ``extra``: ``cut=whole``, for what gets one engine."""

    most_spans = 1

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        lowered = lower(graph)
        if options.extra.get("cut") != "whole":
            self.parts = segments(lowered)
        elif collectives.size == 1:
            self.parts = [whole(lowered)]
        else:
            self.parts = cut_at_sums(whole(lowered), graph.hidden)
        self._graph = graph
        self._collectives = collectives
        share = MappedShare(graph.share_file)
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = 1
        self._sessions = [
            ort.InferenceSession(for_onnxruntime(with_data(part, share)).SerializeToString(), settings)
            if part.proto.graph.output
            else None
            for part in self.parts
        ]
        share.close()
        assert graph.blocks.tokens == graph.context
        self._caches = [
            {
                f"{kind}_cache.{spec.layer}": np.zeros((1, spec.heads, graph.context, spec.head_dim), np.float32)
                for spec in graph.caches
                for kind in ("key", "value")
            }
            for _ in range(graph.blocks.count)
        ]

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        check_step(self._graph, hidden, spans, len(hidden), self.most_spans)
        (span,) = spans
        caches = self._caches[span.blocks[0]]
        border = {"position": np.array([span.position], np.int64), "rows": np.array(wanted_rows(spans), np.int64)}
        values = {**self._graph.constants(span.prompt), **caches, **border, "hidden": hidden}
        for part, session in zip(self.parts, self._sessions, strict=True):
            if session is not None:
                names = [value.name for value in part.proto.graph.output]
                read = [value.name for value in part.proto.graph.input]
                values.update(zip(names, session.run(names, {name: values[name] for name in read}), strict=True))
            if isinstance(part.segment.then, Reduction):
                summed = values[part.segment.then.partial].copy()
                for chunk in micro_chunks(len(hidden), halved):
                    self._collectives.all_reduce(summed[chunk])
                values[part.segment.then.reduced] = summed
        caches.update((name, values[f"{name}.out"]) for name in caches)
        none: F32 = np.zeros((span.wanted, 0), np.float32)
        return values.get("logits", none)

    def close(self) -> None:
        self._sessions.clear()
