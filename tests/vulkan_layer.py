"""A Vulkan layer between a process and its driver, for tests: it counts what is asked of the GPU, loses it, and calls
GPUs what a test wants. It works in processes that are started with it, not in this one.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "VK_LAYER_MOTLEY_tests"
LOST = "MOTLEY_TEST_LOST_GPU"
"""An environment variable with the path of a file: from when it is there, the GPU is lost."""
KINDS = "MOTLEY_TEST_GPU_KINDS"
"""One with a digit for each GPU: Vulkan's number for the kind that it passes for."""


class Counts(ctypes.Structure):
    """What a process has asked of its GPU.

    Attributes:
        submits: times that commands were handed over.
        dispatches: kernels.
        copies: from a buffer to another.
        fills: of buffers, with zeros.
        waits: for what was submitted, as somebody wants to read it.
    """

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("submits", "dispatches", "copies", "fills", "waits"))

    def since(self, before: Counts) -> dict[str, int]:
        """How much more than before, by name."""
        return {name: getattr(self, name) - getattr(before, name) for name, _ in self._fields_}


def layer_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that has the layer, which is compiled to a folder."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("compiling a Vulkan layer needs cc on Linux")
    library = folder / "layer.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(library)], check=True, timeout=100)
    about = {
        "name": NAME,
        "type": "GLOBAL",
        "library_path": str(library),
        "api_version": "1.3.0",
        "implementation_version": "1",
        "description": "what Motley's tests see of a GPU",
    }
    (folder / "layer.json").write_text(json.dumps({"file_format_version": "1.1.2", "layer": about}))
    return {"VK_LAYER_PATH": str(folder), "VK_INSTANCE_LAYERS": NAME}


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(Path(os.environ["VK_LAYER_PATH"]) / "layer.so"))


def counted() -> Counts:
    """What this process, which has the layer, has asked of its GPU so far."""
    return Counts.from_buffer_copy(Counts.in_dll(_library(), "counts"))


def opened() -> int:
    """The number of the GPU that this process, which has the layer, has opened last; -1: none."""
    return ctypes.c_int.in_dll(_library(), "opened").value
