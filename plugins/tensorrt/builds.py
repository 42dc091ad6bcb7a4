"""Builds TensorRT engines and keeps them on disk. TensorRT for RTX builds them without a GPU, TensorRT needs one.

A *plan* is a serialized engine with its weights. It holds for one version of one library and, as built here, for one
compute capability; so a kept plan says for what it was built, and one that does not fit is built again.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import secrets
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from onnx import TensorProto

from motley.plugins.engine import EngineError
from motley.plugins.mapped_share import MappedShare
from motley.plugins.tensorrt.lowering import Constant, Part
from motley.protocol.installing import how_to_install

logger = logging.getLogger(__name__)

PACKAGES = ("tensorrt_rtx", "tensorrt")
"""The libraries that can be used, the one that is tried first in front."""
FORMAT = 1
"""Goes into the name of a plan's folder; it is to be raised whenever the same part is built in another way."""

Capability = tuple[int, int]
"""A GPU's compute capability: (8, 9) is 8.9."""
INT4_SINCE = (8, 0)
"""The oldest GPUs that TensorRT has int4 weights for."""


@dataclass(frozen=True)
class Library:
    """TensorRT for RTX or TensorRT, whichever is installed."""

    module: ModuleType
    name: str
    version: str

    @property
    def for_rtx(self) -> bool:
        return self.name == PACKAGES[0]

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@cache
def open_library() -> Library:
    """Import the library and give it a logger; it keeps the first that it is given for as long as the process lives.

    Raises:
        EngineError: none is installed, or it does not load.
    """
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise EngineError(f"engine 'tensorrt': package {package} is there, but not its {error.name}") from error
            continue
        except (ImportError, OSError, RuntimeError) as error:
            raise EngineError(f"engine 'tensorrt': package {package} does not load: {error}") from error
        return Library(module, package, module.__version__)
    raise EngineError(
        f"engine 'tensorrt' needs TensorRT for RTX: {how_to_install('tensorrt')}; or tensorrt for a data-centre GPU;"
        " engine 'onnxruntime' needs neither"
    )


@cache
def messages() -> Any:
    """The library's logger: everything goes to Python's logging, and the last errors are kept for ours."""
    trt = open_library().module
    levels = {
        trt.ILogger.INTERNAL_ERROR: logging.ERROR,
        trt.ILogger.ERROR: logging.ERROR,
        trt.ILogger.WARNING: logging.WARNING,
        trt.ILogger.INFO: logging.DEBUG,
        trt.ILogger.VERBOSE: logging.DEBUG,
    }

    class Messages(trt.ILogger):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self._errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            level = levels[severity]
            if level == logging.ERROR:
                self._errors.append(text)
            logger.log(min(level, logging.INFO), "%s", text)

        def take_errors(self) -> str:
            """The errors since the last call, in one line."""
            text = "; ".join(self._errors)
            self._errors.clear()
            return text or "it says no reason"

    return Messages()


def dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def build(library: Library, part: Part, share: MappedShare, rows: Sequence[int], target: Capability) -> bytes:
    """Build the plan of a part, all of it in memory: the constants, the network and the plan.

    TF32 is off: float32 products are float32's. Strongly typed: every value has the type that the graph gives it.

    Args:
        rows: the most rows T and logits R of each optimisation profile; it is made for these, and takes fewer.
        target: what to build for; TensorRT builds for the GPU that is there.

    Raises:
        EngineError: the target, or something in the graph, is not supported.
    """
    trt = library.module
    log = messages()
    check_target(library, part, target)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    constants = {name: _made(name, each, share) for name, each in part.constants.items()}  # must outlive the parser
    understood = parser.load_model_proto(part.proto.SerializeToString())
    for name, data in constants.items():
        understood = understood and parser.load_initializer(name, data.ctypes.data, data.nbytes)
    if not (understood and parser.parse_model_proto()):
        refused = [parser.get_error(index) for index in range(parser.num_errors)]
        reasons = "; ".join(f"{error.node_operator()} {error.node_name()}: {error.desc()}" for error in refused)
        raise EngineError(f"{library} does not take {part.name}: {reasons or log.take_errors()}")

    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if library.for_rtx:
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{target[0]}{target[1]}"), 0)
    for most in rows:
        profile = builder.create_optimization_profile()
        for value in part.proto.graph.input:
            sizes = value.type.tensor_type.shape.dim
            if any(size.dim_param for size in sizes):
                least, largest = (tuple(size.dim_value or count for size in sizes) for count in (1, most))
                profile.set_shape(value.name, least, largest, largest)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(
            f"{library} cannot build {part.name} for compute capability {dotted(target)}: {log.take_errors()}"
        )
    return bytes(plan)


def check_target(library: Library, part: Part, target: Capability) -> None:
    """Refuse a GPU that a part cannot be built for.

    Raises:
        EngineError: naming what is supported.
    """
    if library.for_rtx:
        names = list(library.module.ComputeCapability.__members__)
        known = [(int(name[2:-1]), int(name[-1])) for name in names if name.startswith("SM")]
        if target not in known:
            raise EngineError(
                f"{library} builds for GPUs of compute capability {', '.join(map(dotted, known))}, not "
                f"{dotted(target)}; install tensorrt for this GPU, or use another engine"
            )
    if target < INT4_SINCE and any(each.kind == TensorProto.INT4 for each in part.constants.values()):
        raise EngineError(
            f"{library} has no int4 for GPUs of compute capability {dotted(target)}, which int4 and int8 weights need "
            f"({dotted(INT4_SINCE)} or newer); hold them as FP16, or use another engine"
        )


class PlanFolder:
    """The plans of a graph's parts on disk, beside the share file that they are built from: they are deleted with it.

    A file has one line that says what it was built with, and the plan. Anything wrong with it means building again; a
    plan that cannot be kept is built again at the next start.
    """

    def __init__(
        self, share_file: Path, library: Library, parts: Sequence[Part], rows: Sequence[int], target: Capability
    ) -> None:
        said = sha256(f"{FORMAT}\n{list(rows)!r}\n".encode())
        for part in parts:
            said.update(part.proto.SerializeToString(deterministic=True))
        self.folder = share_file.parent / f"{library.name}-{dotted(target)}-{said.hexdigest()[:16]}"
        self._library = library
        self._rows = rows
        self._target = target

    def plan(self, part: Part, share: MappedShare) -> bytes:
        """The plan of one of the parts: the kept one, or a new one, which is kept from now on.

        Raises:
            EngineError: see `build`.
        """
        kept = self._kept(part)
        return self.rebuilt(part, share) if kept is None else kept

    def rebuilt(self, part: Part, share: MappedShare) -> bytes:
        """Build a new plan in place of a kept one that turned out not to run."""
        plan = build(self._library, part, share, self._rows, self._target)
        file = self._file(part)
        partial = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        try:
            self.folder.mkdir(exist_ok=True)
            partial.write_bytes(json.dumps(self._line(plan)).encode() + b"\n" + plan)
            os.replace(partial, file)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            told = f"{file} cannot be kept, and takes as long to build at the next start: {error}"
            logger.warning("%s; make room on the disk, or let go of the file", told)
        return plan

    def _kept(self, part: Part) -> bytes | None:
        file = self._file(part)
        try:
            line, _, plan = file.read_bytes().partition(b"\n")
            told = json.loads(line)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be read and is built again: %s", file, error)
            return None
        wanted = self._line(plan)
        if told != wanted:
            logger.warning("%s is built again: it says %s, and should say %s", file, told, wanted)
            return None
        return plan

    def _line(self, plan: bytes) -> dict[str, object]:
        return {"version": self._library.version, "crc32": zlib.crc32(plan)}

    def _file(self, part: Part) -> Path:
        return self.folder / f"{part.name}.plan"


def _made(name: str, constant: Constant, share: MappedShare) -> Any:
    data = constant.make(share)
    assert data.flags.c_contiguous, name
    return data
