"""Whole experts for other machines, each a session of ONNX Runtime with its weights in the GPU's memory."""

from __future__ import annotations

from motley.plugins.engine import F32, EngineError, EngineMemoryError, EngineOptions
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.onnxruntime_gpu.device import ErrorsTold, Gpu
from motley.plugins.onnxruntime_gpu.lowering import lowered_for
from motley.plugins.onnxruntime_gpu.providers import WEBGPU


class WebGpuExperts:
    """See `motley.plugins.expert_engine.ExpertEngine`.

    Raises:
        EngineError: an option, as it has none; an exact mode, which it cannot keep; no plugin or GPU.
    """

    def __init__(self, options: EngineOptions) -> None:
        options.check_extra(WEBGPU.engine)
        if options.exact:
            raise EngineError(f"engine {WEBGPU.engine!r} cannot keep exact=true; use engine 'onnxruntime'")
        self._device = Gpu(WEBGPU)

    def open(self, graph: ExpertGraph) -> WebGpuExpert:
        try:
            return WebGpuExpert(graph, self._device)
        except EngineMemoryError as error:
            raise MemoryError(str(error)) from error

    def close(self) -> None:
        pass


class WebGpuExpert:
    """See `motley.plugins.expert_engine.Expert`."""

    def __init__(self, graph: ExpertGraph, device: Gpu) -> None:
        lowered = lowered_for(device.provider, graph.proto)
        whole = graph.proto.graph
        self._x = whole.input[0].name
        self._device = device
        self._session = device.session(
            lowered.nodes, whole.input, whole.output, list(lowered.initializers.values()), str(graph.share_file.parent)
        )

    def __call__(self, x: F32) -> F32:
        with ErrorsTold(WEBGPU.engine):
            (y,) = self._device.run(self._session, {self._x: x})
        return y

    def close(self) -> None:
        del self._session
