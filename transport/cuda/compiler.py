"""CUDA C++ to machine code, by NVRTC: no driver, no GPU, no compiler of the host and no header is needed."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from motley.protocol.installing import how_to_install

from .errors import CudaError
from .kept_kernels import kept_or_compiled

DEVICE = Path(__file__).with_name("device.cuh")
"""What kernels need of the device that is not plain C++: the first of their source files."""
OLDEST = (7, 5)
"""Turing, the oldest architecture that NVRTC 13 compiles for."""


class Capability(NamedTuple):
    """The compute capability of a GPU, for example (8, 6) for sm_86."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


def check_capability(capability: Capability) -> int:
    """The architecture that code for such a GPU is compiled for, as 86: its own or the next older one of its kind.

    Raises:
        CudaError: no NVRTC, or a GPU that it does not know.
    """
    if capability < OLDEST:
        raise CudaError(
            f"a GPU of compute capability {capability} is too old: {Capability(*OLDEST)} (Turing) or newer is needed; "
            "use engine 'onnxruntime' on this machine"
        )
    nvrtc = _nvrtc()
    own = 10 * capability.major + capability.minor
    known: list[int] = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    fitting = [each for each in known if each // 10 == capability.major and each <= own]
    if not fitting:
        raise CudaError(
            f"NVRTC does not know GPUs of compute capability {capability}: install a newer one (pip install --upgrade "
            "nvidia-cuda-nvrtc), or use engine 'onnxruntime' on this machine"
        )
    return max(fitting)


@cache
def compile_kernels(sources: tuple[Path, ...], capability: Capability) -> bytes:
    """The cubin of some source files, one after the other: kept from an earlier process, or compiled in a few seconds.

    Numbers are rounded operation by operation: nothing is fused, flushed or approximated unless the source says so.

    Raises:
        CudaError: no NVRTC, an architecture that it does not know, or an error in the source.
    """
    architecture = check_capability(capability)
    nvrtc = _nvrtc()
    name = "+".join(source.name for source in sources).encode()
    text = "\n".join(source.read_text("utf-8") for source in sources).encode()
    options = [f"-arch=sm_{architecture}".encode(), b"-std=c++17", b"-fmad=false"]
    version = "{}.{}".format(*_checked(nvrtc, nvrtc.nvrtcVersion())).encode()
    return kept_or_compiled((version, name, text, *options), lambda: _compile(nvrtc, name, text, options))


def _compile(nvrtc: Any, name: bytes, text: bytes, options: list[bytes]) -> bytes:
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(text, name, 0, None, None))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_checked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            said = log.strip(b"\0 \n").decode(errors="replace")
            raise CudaError(f"NVRTC cannot compile {name.decode()} with {options[0].decode()}: {said}")
        cubin = bytearray(_checked(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc, nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        _checked(nvrtc, nvrtc.nvrtcVersion())
    except Exception as error:  # the library is looked for at the first call, and its absence has a type of its own
        raise CudaError(
            f"kernels for a GPU are compiled by NVRTC, which is missing ({error}): {how_to_install('gpu')}"
        ) from error
    return nvrtc


def _checked(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """What an NVRTC function returns beside its result, if that is success; several values as a list."""
    result, *values = answer
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaError(f"NVRTC failed: {result.name}")
    return values[0] if len(values) == 1 else values
