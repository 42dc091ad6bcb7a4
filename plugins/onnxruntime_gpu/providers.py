"""The providers of ONNX Runtime by which the GPU engines compute: all in which one differs from another.

Each is a plugin of the ordinary runtime, a package with ``get_library_path`` and ``get_ep_name``. An engine is named
after each, as engines are what nodes offer and plans name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motley.plugins.onnxruntime_gpu.preference import driver_needed, provider_settings
from motley.protocol.installing import how_to_install


@dataclass(frozen=True)
class Provider:
    """A provider.

    Attributes:
        engine: what the engine is called that computes by it.
        module: the plugin's, in Python.
        install: tells how to get that.
        driver: tells what the plugin needs of the machine, in words.
        memory: what the runtime calls the memory of its devices.
        has_products: whether it has the runtime's own product with quantised matrices, ``MatMulNBits``; else it gets
            that as the standard's ``DequantizeLinear`` and ``Gemm``.
        settings: gives those that the GPU is opened with.
        capturing: the setting that, being 1, has a session keep the commands of a run and repeat them; empty: there is
            none, or none that has been tried.
        fp16: what a GPU must have to compute in FP16, as the provider calls it; empty: that has not been tried.
    """

    engine: str
    module: str
    install: Callable[[], str]
    driver: Callable[[], str]
    memory: str
    has_products: bool
    settings: Callable[[], dict[str, str]] = dict
    capturing: str = ""
    fp16: str = ""


WEBGPU = Provider(
    engine="webgpu",
    module="onnxruntime_ep_webgpu",
    install=lambda: how_to_install("webgpu"),
    driver=driver_needed,
    memory="webgpu",
    has_products=True,
    settings=provider_settings,
    capturing="enableGraphCapture",
    fp16="shader-f16",
)
CUDA = Provider(
    engine="onnxruntime-cuda",
    module="onnxruntime_ep_cuda",
    install=lambda: "pip install onnxruntime-ep-cuda13, of the same version as onnxruntime",
    driver=lambda: "NVIDIA's driver, CUDA 13 and cuDNN 9",
    memory="cuda",
    has_products=True,
)
TENSORRT_RTX = Provider(
    engine="onnxruntime-tensorrt-rtx",
    module="onnxruntime_ep_nv_tensorrt_rtx",
    install=lambda: how_to_install("tensorrt-rtx"),
    driver=lambda: "NVIDIA's driver for CUDA 13, and a GPU of the RTX series 30 or later",
    memory="cuda",
    has_products=False,
)
