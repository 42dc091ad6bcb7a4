"""The rotary tables of prompts, on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import numpy as np

from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.engine import F32, RankGraph
from motley.plugins.known_nodes import rotary_tables

SETS_KEPT = 4
"""How many prompts' tables stay on the device, where prompts have unlike ones."""


@dataclass(frozen=True)
class _Uploaded:
    """Tables on the device.

    Attributes:
        constants: what has them on the host; while it is kept, nothing else has its identity.
        cosines: their address, as is that of the sines; both are one allocation.
    """

    constants: Mapping[str, F32]
    cosines: int
    sines: int


class RotaryTables:
    """The rotary tables of the prompts that steps have asked for most recently, see `RankGraph.constants`."""

    def __init__(self, graph: RankGraph, device: DeviceGraph) -> None:
        self._constants = graph.constants
        self._names = [*chain(*rotary_tables(graph.proto.graph))]
        self._device = device
        self._uploaded: OrderedDict[int, _Uploaded] = OrderedDict()
        """By the identity of what they were on the host, the least recently used first."""

    def of(self, prompts: Sequence[int]) -> list[tuple[int, int]]:
        """Where the cosines and sines of some prompts are, which one step has. Call it between steps: it may forget
        those of earlier ones.

        Args:
            prompts: their lengths, in tokens.

        Returns:
            Their addresses, for each prompt; zeros if this rank attends to nothing.

        Raises:
            CudaError: too little memory.
        """
        if not self._names:
            return [(0, 0)] * len(prompts)
        asked = [self._constants(prompt) for prompt in prompts]
        unlike = {id(constants): constants for constants in asked}
        for identity, constants in unlike.items():
            if identity not in self._uploaded:
                self._forget_all_but(SETS_KEPT - 1, unlike)
                self._uploaded[identity] = self._upload(constants)
            self._uploaded.move_to_end(identity)
        found = (self._uploaded[id(constants)] for constants in asked)
        return [(tables.cosines, tables.sines) for tables in found]

    def close(self) -> None:
        """Free all of them."""
        with ExitStack() as parts:
            for tables in self._uploaded.values():
                parts.callback(self._device.stream.driver.free, tables.cosines)
            self._uploaded.clear()

    def _forget_all_but(self, kept: int, used: Mapping[int, object]) -> None:
        """Have so many left, or as many as are used if these are more."""
        unused = [identity for identity in self._uploaded if identity not in used]
        for identity in unused[: max(0, len(self._uploaded) - kept)]:
            self._device.stream.driver.free(self._uploaded.pop(identity).cosines)

    def _upload(self, constants: Mapping[str, F32]) -> _Uploaded:
        cosines, sines = (np.ascontiguousarray(constants[name], np.float32).reshape(-1) for name in self._names)
        address = self._device.stream.driver.allocate(cosines.nbytes + sines.nbytes)
        try:
            for table, at in ((cosines, address), (sines, address + cosines.nbytes)):
                self._device.send(at, table.view(np.uint8))
        except BaseException:
            self._device.stream.driver.free(address)
            raise
        return _Uploaded(constants, address, address + cosines.nbytes)
