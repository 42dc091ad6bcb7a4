"""An expert host with a fault: ``python -m tests.daemon.experts.faulty_host memory | wrong | breaks``."""

from __future__ import annotations

import sys

from motley.daemon.worker.process import main
from motley.plugins.engine import F32, EngineError
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.onnxruntime.hosted_experts import OnnxRuntimeExpert, OnnxRuntimeExperts

ENOUGH = 1000.0
"""A host that breaks does so at rows that begin with more than this: none of the examination's do."""


def no_room(self: OnnxRuntimeExperts, graph: ExpertGraph) -> OnnxRuntimeExpert:
    raise MemoryError("Failed to allocate memory")


def wrong(self: OnnxRuntimeExpert, x: F32) -> F32:
    y = right(self, x)
    return -y if len(x) > 1 else y


def breaking(self: OnnxRuntimeExpert, x: F32) -> F32:
    if x[0, 0] > ENOUGH:
        raise EngineError("a kernel has failed")
    return right(self, x)


right = OnnxRuntimeExpert.__call__
match sys.argv[1]:
    case "memory":
        OnnxRuntimeExperts.open = no_room  # type: ignore[method-assign]
    case "wrong":
        OnnxRuntimeExpert.__call__ = wrong  # type: ignore[method-assign]
    case "breaks":
        OnnxRuntimeExpert.__call__ = breaking  # type: ignore[method-assign]
sys.exit(main())
