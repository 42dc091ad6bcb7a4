"""Which expert hosts the ranks of the trunk have been told of, a version for each time that they are told. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.experts.messages import to_message
from motley.orchestrator.planning.placement.terms import ExpertKey
from motley.protocol.mesh_pb2 import Placement


class TrunkView:
    """The placement that the trunk was told last."""

    def __init__(self) -> None:
        self.version = 0
        """0: what the assignment says."""
        self._told: list[tuple[frozenset[ExpertKey], str, bool]] = []
        """Of every host, what the trunk may ask it for, its address, and whether it is alive."""

    def begin(self, hosts: Sequence[ExpertHost]) -> None:
        """The trunk is assigned what these hosts are ordered to hold."""
        self._told = [(frozenset(host.ordered), "", True) for host in hosts]

    def connect(self, hosts: Sequence[ExpertHost]) -> None:
        """The trunk was told the addresses of these hosts."""
        self._told = [(keys, host.address, alive) for (keys, _, alive), host in zip(self._told, hosts, strict=True)]

    def join(self) -> None:
        """There is one more host, of which the trunk knows nothing yet."""
        self._told.append((frozenset(), "", False))

    def update(self, hosts: Sequence[ExpertHost]) -> Placement | None:
        """A new version, if the trunk should know more than it does."""
        now = [
            (frozenset(host.serving), host.address, not host.gone) if host.up or host.gone else told
            for host, told in zip(hosts, self._told, strict=True)
        ]
        if now == self._told:
            return None
        for host, (_, _, alive), (_, _, was_alive) in zip(hosts, now, self._told, strict=True):
            if alive and not was_alive:
                host.since = self.version + 1
        self._told = now
        self.version += 1
        return Placement(
            version=self.version,
            hosts=[to_message(keys) for keys, _, _ in now],
            addresses=[address for _, address, _ in now],
            alive=[alive for _, _, alive in now],
        )
