"""The rotary tables of prompts, on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain

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
        address: of the first of them; the others follow.
    """

    constants: Mapping[str, F32]
    address: int


class RotaryTables:
    """The rotary tables of the prompts that steps have asked for most recently, see `RankGraph.constants`.

    Attributes:
        firsts: where each of a prompt's tables begins among these, in elements, by the names of the graph's inputs.
    """

    def __init__(self, graph: RankGraph, device: DeviceGraph) -> None:
        self._constants = graph.constants
        self._names = [*chain(*rotary_tables(graph.proto.graph))]
        sizes = [self._constants(0)[name].size for name in self._names]
        self.firsts = dict(zip(self._names, accumulate(sizes, initial=0), strict=False))
        self._device = device
        self._uploaded: OrderedDict[int, _Uploaded] = OrderedDict()
        """By the identity of what they were on the host, the least recently used first."""

    def of(self, prompts: Sequence[int]) -> list[int]:
        """Where the tables of some prompts are, which one step has. Call it between steps: it may forget
        those of earlier ones.

        Args:
            prompts: their lengths, in tokens.

        Returns:
            The address of each prompt's; zeros if this rank attends to nothing.

        Raises:
            CudaError: too little memory.
        """
        if not self._names:
            return [0] * len(prompts)
        asked = [self._constants(prompt) for prompt in prompts]
        unlike = {id(constants): constants for constants in asked}
        for identity, constants in unlike.items():
            if identity not in self._uploaded:
                self._forget_all_but(SETS_KEPT - 1, unlike)
                self._uploaded[identity] = self._upload(constants)
            self._uploaded.move_to_end(identity)
        return [self._uploaded[id(constants)].address for constants in asked]

    def close(self) -> None:
        """Free all of them."""
        with ExitStack() as parts:
            for tables in self._uploaded.values():
                parts.callback(self._device.stream.driver.free, tables.address)
            self._uploaded.clear()

    def _forget_all_but(self, kept: int, used: Mapping[int, object]) -> None:
        """Have so many left, or as many as are used if these are more."""
        unused = [identity for identity in self._uploaded if identity not in used]
        for identity in unused[: max(0, len(self._uploaded) - kept)]:
            self._device.stream.driver.free(self._uploaded.pop(identity).address)

    def _upload(self, constants: Mapping[str, F32]) -> _Uploaded:
        tables = {name: np.ascontiguousarray(constants[name], np.float32).reshape(-1) for name in self._names}
        address = self._device.stream.driver.allocate(sum(table.nbytes for table in tables.values()))
        try:
            for name, table in tables.items():
                self._device.send(address + 4 * self.firsts[name], table.view(np.uint8))
        except BaseException:
            self._device.stream.driver.free(address)
            raise
        return _Uploaded(constants, address)
