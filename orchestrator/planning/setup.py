"""How a node takes part in a session: its engine, whether that is on its GPU, and what it holds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from motley.orchestrator.session_request import CACHE_FORMATS
from motley.protocol import GPU_RESERVE
from motley.protocol.mesh_pb2 import Capabilities, Engine, FormatSpeed, Gpu
from motley.protocol.wording import human_bytes

NONE: Mapping[str, str] = MappingProxyType({})


class SetupError(Exception):
    """A node cannot take part like that; the message says why. `code` is stable, for clients."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Setup:
    """How a rank computes on its node."""

    engine: str
    quantisation: str
    """As the engine holds matrices: ``fp16`` is ``fp32`` for one that would widen it."""
    on_gpu: bool
    """It computes on the node's first GPU, in that GPU's memory."""
    has_whole_caches: bool = False
    """Its engine can only have a sequence's whole cache in one block."""
    keeps_windows: bool = False
    """Its engine can give layers with a window fewer cache blocks than others."""
    on_host_memory: bool = True
    """It computes in memory of the node itself: on the processor, or on a GPU that has none of its own."""
    memory_bandwidth: float = 0.0
    """Bytes/s of weights in its format that its engine has read in the GPU's memory; 0: that was not measured."""
    cache_bandwidth: float = 0.0
    """The same of floats, as caches are; 0: not measured, or as of weights."""
    row_speed: float = 0.0
    """Bytes/s of weights on the GPU, times the rows that they are multiplied by, in a step of many; 0: not measured."""
    layer_s: float = 0.0
    """Seconds that a layer takes its engine on the GPU besides reading weights; 0: nobody knows."""
    host_s: float = 0.0
    """Seconds in which what is summed gets from the GPU to the host and back; 0: nobody knows, or there is no way."""
    chosen: str = ""
    """Why it has this engine, to follow the name of the node, where the request leaves that open and the node has a
    GPU; else empty."""


def setup_of(
    node: str, capabilities: Capabilities, engine: str, quantisation: str, options: Mapping[str, str] = NONE
) -> Setup:
    """How a rank with this engine takes part on a node.

    Args:
        node: its name.
        options: the engine's settings; with ``device=cuda`` it computes on the GPU.

    Raises:
        SetupError: the node has no such engine, or it cannot run there.
    """
    told = next((each for each in capabilities.engines if each.name == engine), None)
    if told is None:
        raise SetupError("unknown_engine", f"node {node!r} has no engine {engine!r}; it has: {_able(capabilities)}")
    on_gpu = told.on_gpu or options.get("device") == "cuda"
    if lacking := _lacking(told, capabilities, on_gpu):
        message = f"node {node!r} cannot run engine {engine!r}: {lacking}; it can run: {_able(capabilities)}"
        raise SetupError("unusable_engine", message)
    widened = quantisation == "fp16" and not told.keeps_fp16
    held = "fp32" if widened else quantisation
    measured = speed_of(told.speeds, held)
    return Setup(
        engine=engine,
        quantisation=held,
        on_gpu=on_gpu,
        has_whole_caches=told.has_whole_caches,
        keeps_windows=told.keeps_windows,
        on_host_memory=not on_gpu or capabilities.gpus[0].kind in ("integrated", "software"),
        memory_bandwidth=measured.bytes_per_s if measured else told.memory_bandwidth,
        cache_bandwidth=told.memory_bandwidth if measured else 0.0,
        row_speed=measured.row_bytes_per_s if measured else 0.0,
        layer_s=told.layer_s,
        host_s=told.host_s,
    )


def speed_of(measured: Iterable[FormatSpeed], held: str) -> FormatSpeed | None:
    """How fast products are in the format that a rank holds; None: that was not measured. Floats of a checkpoint that
    is held as it is stored are int8."""
    return next((each for each in measured if each.format == (held if held != "stored" else "int8")), None)


def can_hold_caches(capabilities: Capabilities) -> bool:
    """Whether a node can keep cache blocks for ranks on others: it computes attention as engines do that ask for it."""
    return any(each.asks_block_holders and not each.lacking for each in capabilities.engines)


class Skill(NamedTuple):
    """What only some engines can do: which they are, and what it is in words."""

    has: Callable[[Engine], bool]
    what: str


SKILLS: Mapping[str, Skill] = {
    "cache_disk_tokens": Skill(lambda engine: engine.reads_far_blocks, "keep KV caches on a disk"),
    "cache_node_tokens": Skill(lambda engine: engine.asks_block_holders, "keep KV caches on another node"),
    "keep_prefixes": Skill(lambda engine: engine.keeps_prefixes, "keep prefixes on a disk between starts"),
    "embeddings": Skill(lambda engine: engine.embeds, "embed texts"),
}
"""What a session's engines must be able to do, by the field of its request that asks for it."""
HANDS = Skill(lambda engine: engine.embeds, "hand a model's own head what it guesses tokens by")
"""What the engines of rank 0 and of that head must be able to do: to give more than logits, as to embed texts."""


def lacking_skill(node: str, capabilities: Capabilities, engine: str, skill: Skill) -> str:
    """Why a rank with this engine, which the node has, cannot do something; empty: it can."""
    able = [each.name for each in capabilities.engines if skill.has(each)]
    if engine in able:
        return ""
    return (
        f"engine {engine!r} of node {node!r} cannot {skill.what}; engines there that can: {', '.join(able) or 'none'}"
    )


def lacking_format(node: str, capabilities: Capabilities, engine: str, cache_format: str) -> str:
    """Why a rank with this engine, which the node has, cannot keep its KV caches in a format; empty: it can."""
    told = next(each for each in capabilities.engines if each.name == engine)
    formats = list(told.cache_formats) or [CACHE_FORMATS[0]]
    if cache_format in formats:
        return ""
    able = (each.name for each in capabilities.engines if cache_format in each.cache_formats)
    return (
        f"engine {engine!r} of node {node!r} cannot keep KV caches as {cache_format!r}; it can as:"
        f" {', '.join(formats)}. Engines there that can as {cache_format!r}: {', '.join(able) or 'none'}"
    )


def _lacking(engine: Engine, capabilities: Capabilities, on_gpu: bool) -> str:
    """Why an engine cannot run on a node; a package that it lacks is of no use where there is no GPU."""
    if on_gpu and not capabilities.gpus:
        return f"it shows no GPU{f' ({capabilities.no_gpu})' if capabilities.no_gpu else ''}"
    return engine.lacking


def _able(capabilities: Capabilities) -> str:
    """The engines that can run on a node, for messages."""
    able = (each.name for each in capabilities.engines if not _lacking(each, capabilities, each.on_gpu))
    return ", ".join(able) or "none"


@dataclass(frozen=True)
class GpuOffer:
    """A GPU's memory, as new ranks may have it.

    Attributes:
        promised: bytes that others are to take, and have not taken yet.
        budget: bytes that all ranks may have of it; 0: what is free.
        reserved: bytes of the budget that others have, or are to have.
    """

    gpu: Gpu
    promised: int = 0
    budget: int = 0
    reserved: int = 0

    @property
    def room(self) -> int:
        """Bytes that a new rank may take."""
        return max(0, min(self._free, self._left))

    def told(self, node: str) -> str:
        """What there is to say of it, for messages: what makes up its `room`."""
        name = f"{node}, {self.gpu.name}"
        if self._left < self._free:
            have = f", of which others have {human_bytes(self.reserved)}" if self.reserved else ""
            return f"{name} (ranks may have {human_bytes(self.budget)} of it{have}; `motley budget` changes that)"
        parts = [f"{human_bytes(self.gpu.free_bytes)} of {human_bytes(self.gpu.memory_bytes)} free"]
        if self.promised:
            parts.append(f"{human_bytes(self.promised)} promised to other ranks")
        parts.append(f"{human_bytes(GPU_RESERVE)} stay free")
        if self.gpu.users:
            users = (f"{user.name or user.pid} ({_held(user.bytes)})" for user in self.gpu.users)
            parts.append("in use by " + ", ".join(users))
        return f"{name} ({'; '.join(parts)})"

    @property
    def _free(self) -> int:
        return self.gpu.free_bytes - self.promised - GPU_RESERVE

    @property
    def _left(self) -> int:
        """Of the budget."""
        return self.budget - self.reserved if self.budget else self._free


def _held(count: int) -> str:
    return human_bytes(count) if count else "not told"
