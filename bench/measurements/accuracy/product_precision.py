"""What products in FP16 cost: how far the next-token distributions of a model move when a GPU of this machine computes
them so (engine `webgpu`). It is held against the same GPU's in FP32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from motley.bench.measurements.accuracy.ways import Moved, Way, foreseen
from motley.daemon.models.files import open_model
from motley.plugins.onnxruntime_gpu.fp16 import ACTIVATIONS
from motley.plugins.onnxruntime_gpu.providers import WEBGPU


def measure_products(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> Moved:
    """Have a model (a folder, or a GGUF file) read a text with products in FP32 and in FP16.

    Args:
        progress: called with the layers done and all of them.

    Raises:
        ConfigError, CheckpointError, TokenizerError, ShareFileError: the model cannot be run.
        EngineError: there is no GPU, or it lacks FP16.
    """
    ways = {kind: Way(engine=WEBGPU.engine, options={ACTIVATIONS: kind}) for kind in ("fp32", "fp16")}
    with open_model(folder) as opened:
        found = foreseen(folder, opened, ways, progress)
    return Moved.between(found["fp32"], found["fp16"])
