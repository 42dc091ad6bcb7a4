"""Whether all who hold an expert hold the same weights: replicas of it must answer with the same bits. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from motley.orchestrator.experts.hosts import ExpertHost, Holder
from motley.orchestrator.experts.messages import from_message
from motley.orchestrator.planning.placement.terms import ExpertKey, expert_name
from motley.protocol.mesh_pb2 import HostedExperts


class HostedError(Exception):
    """What a host says it holds cannot be right; the message says why."""


class Checksums:
    """What the digest of every slice of an expert must be, and which worker said so first."""

    def __init__(self, keys: Iterable[ExpertKey]) -> None:
        """
        Args:
            keys: all experts of the model.
        """
        self._keys = set(keys)
        self._digests: dict[tuple[ExpertKey, int], tuple[bytes, Holder]] = {}
        """By expert and number of the slice."""

    def check(
        self, worker: Holder, hosted: HostedExperts, hosts: Iterable[ExpertHost]
    ) -> dict[ExpertKey, tuple[bytes, ...]]:
        """What a worker says it holds: by expert, the digests of the worker's slices of it.

        Args:
            hosts: all of the session, by which others are measured if this worker is refused.

        Raises:
            HostedError: that is not of this model, or another worker holds an expert with other weights.
        """
        keys, each = from_message(hosted), len(worker.slices)
        if len(hosted.digests) != len(keys) * each or not set(keys) <= self._keys:
            raise HostedError(f"{worker} names {len(keys)} experts with {len(hosted.digests)} digests, or unknown ones")
        held = {key: tuple(hosted.digests[each * at : each * (at + 1)]) for at, key in enumerate(keys)}
        for (key, number), digest in _numbered(worker, held):
            known, other = self._digests.get((key, number), (digest, worker))
            if digest != known:
                self._forget(worker.host, hosts)
                raise HostedError(
                    f"{worker} has {expert_name(key)} with checksum {digest.hex()[:12]}, {other} with"
                    f" {known.hex()[:12]}: their files or caches differ; give both the same model, and clear the cache"
                    " of the wrong one (`motley cache rm --all`)"
                )
        for slice_, digest in _numbered(worker, held):
            self._digests.setdefault(slice_, (digest, worker))
        return held

    def _forget(self, refused: ExpertHost, hosts: Iterable[ExpertHost]) -> None:
        """Measure nobody by what the refused host alone has said."""
        self._digests = {key: own for key, own in self._digests.items() if own[1].host is not refused}
        for host in hosts:
            if host is not refused and not host.gone:
                for worker in host.group:
                    for slice_, digest in _numbered(worker, worker.held):
                        self._digests.setdefault(slice_, (digest, worker))


def _numbered(
    worker: Holder, held: Mapping[ExpertKey, Sequence[bytes]]
) -> Iterator[tuple[tuple[ExpertKey, int], bytes]]:
    """The digests of what a worker holds, by expert and number of the slice."""
    for key, digests in held.items():
        yield from (((key, number), digest) for number, digest in zip(worker.slices, digests, strict=True))
