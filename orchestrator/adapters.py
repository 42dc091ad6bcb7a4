"""The adapters that a session's clients may name, as the orchestrator knows them. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from motley.protocol.mesh_pb2 import Adapter


@dataclass(frozen=True)
class NamedAdapter:
    """An adapter that every rank of a session has, or gets when somebody asks for it.

    Attributes:
        name: as requests have it.
        source: the folder where it was found.
        fingerprint: of its files.
        rank: the largest that one of its products has.
        bytes: of its weights, in its file.
        pinned: whether it stays loaded.
    """

    name: str
    source: str
    fingerprint: str
    rank: int
    bytes: int
    pinned: bool = False

    @property
    def message(self) -> Adapter:
        """It, as ranks are told of it."""
        return Adapter(fingerprint=self.fingerprint, source=self.source)


def served_name(model: str, adapter: str) -> str:
    """What clients call a model with an adapter, or, with an empty one, without."""
    return f"{model}:{adapter}" if adapter else model


def listed(adapters: Collection[NamedAdapter]) -> str:
    """Their names, for people."""
    return ", ".join(each.name for each in adapters) or "none"
