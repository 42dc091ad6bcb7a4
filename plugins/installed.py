"""The engines that are installed: finding one by its name, and what each says that it can do.

An engine says so by attributes of its class, which are told below; what it does not say, it cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, NamedTuple, TypeVar

from motley.plugins.engine import CACHE_FORMATS, DeviceSpeed, EngineError, EngineFactory

T = TypeVar("T")


@dataclass(frozen=True)
class EngineKind(Generic[T]):
    """The engines of one kind: those that are installed in an entry-point group.

    Attributes:
        group: the name of the group.
        what: what one of them is called in messages.
    """

    group: str
    what: str

    def names(self) -> list[str]:
        return sorted(_installed(self.group))

    def load(self, name: str) -> T:
        """Find one by its entry-point name.

        Raises:
            EngineError: no such engine, or it lacks a package it needs.
        """
        if (point := _installed(self.group).get(name)) is None:
            raise EngineError(f"no {self.what} is called {name!r}; installed: {', '.join(self.names()) or 'none'}")
        try:
            factory: T = point.load()
        except ImportError as error:
            raise EngineError(f"{self.what} {name!r} needs a package that is missing: {error}") from error
        return factory


@cache
def _installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group, by name; to find them, the metadata of everything that is installed are read."""
    return {point.name: point for point in reversed([*entry_points(group=group)])}  # of two, the first that is found


ENGINES: EngineKind[EngineFactory] = EngineKind("motley.engines", "engine")
engine_names, load_engine = ENGINES.names, ENGINES.load


class Abilities(NamedTuple):
    """What an engine can: its class has attributes of these names where it can, or has, more than the default."""

    keeps_fp16: bool = False
    """It holds FP16 matrices as they are."""
    has_whole_caches: bool = False
    """It can only have a sequence's whole cache in one block."""
    cache_formats: tuple[str, ...] = CACHE_FORMATS[:1]
    """The formats in which it can keep keys and values."""
    reads_far_blocks: bool = False
    """It can have far cache blocks (`FarBlocks`)."""
    asks_block_holders: bool = False
    """It can have cache blocks on another machine (`motley.plugins.block_holder`)."""
    keeps_windows: bool = False
    """It can give layers with a window fewer cache blocks than others (`CacheBlocks.windowed`)."""
    keeps_prefixes: bool = False
    """Its cache blocks can be read and written between two steps (`blocks_in_memory`), and so be kept on a disk for
    another start."""
    takes_adapters: bool = False
    """It can compute rows with adapters (`motley.plugins.adapted_engine.AdaptedEngine`)."""
    embeds: bool = False
    """It is known to give the results of a graph without a head, f32[R, D], of all rows of a step."""


def abilities(name: str) -> Abilities:
    """What an engine can.

    Raises:
        EngineError: as `load_engine`.
    """
    factory = load_engine(name)
    told: dict[str, Any] = {able: getattr(factory, able) for able in Abilities._fields if hasattr(factory, able)}
    return Abilities(**told)


def on_gpu(name: str, extra: Mapping[str, str] | None = None) -> bool:
    """Whether an engine with these settings (`EngineOptions.extra`) computes on a GPU, in its memory.

    Engines that always do say so: ``on_gpu = True`` in their class. Those that can do either have the setting
    ``device``, with ``cuda`` for the GPU.

    Raises:
        EngineError: as `load_engine`.
    """
    return getattr(load_engine(name), "on_gpu", False) or (extra or {}).get("device") == "cuda"


def device_speed(name: str) -> DeviceSpeed:
    """How fast an engine is on the GPU that it computes on: what it measures, or knows of such devices.

    Engines that can tell have a function ``device_speed`` in their class. It may raise whatever the device does.

    Raises:
        EngineError: as `load_engine`.
    """
    tell: Callable[[], DeviceSpeed] | None = getattr(load_engine(name), "device_speed", None)
    return tell() if tell is not None else DeviceSpeed()


def lacking(name: str) -> str:
    """Why an engine cannot run on this machine; empty: nothing is known to be in its way.

    Engines that need more than their packages find out in a function ``check_machine`` of their class, which raises
    `EngineError`.
    """
    try:
        check: Callable[[], None] | None = getattr(load_engine(name), "check_machine", None)
        if check is not None:
            check()
    except EngineError as error:
        return str(error)
    return ""
