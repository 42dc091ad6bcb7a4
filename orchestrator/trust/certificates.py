"""The certificates with which a session's ranks know each other: an authority that lives for one plan only.

Each rank gets a certificate for the DNS name ``rank-<rank>.<session>``. The authority's key is in the orchestrator's
memory alone, as the keys of those certificates are, and no longer than the plan holds.
"""

from __future__ import annotations

from motley.protocol.mesh_pb2 import Credentials
from motley.transport.certificates import Authority


class SessionAuthority:
    """A new authority. It issues a rank's certificate, which takes 0.3 ms of a processor, when that is asked for first:
    a session may grow to many more ranks than it has."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._authority = Authority(f"session {session}")
        self._issued: dict[int, Credentials] = {}

    def of(self, rank: int) -> Credentials:
        """The certificate of a rank, always the same."""
        if rank not in self._issued:
            papers = self._authority.issue_rank(rank, self._session)
            self._issued[rank] = Credentials(
                authority=self._authority.pem, certificate=papers.certificate, key=papers.key
            )
        return self._issued[rank]


def issue_credentials(session: str, size: int) -> list[Credentials]:
    """A new authority's certificates for all ranks of a session, by rank; its key is forgotten."""
    authority = SessionAuthority(session)
    return [authority.of(rank) for rank in range(size)]
