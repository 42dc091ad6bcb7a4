"""The certificates with which a session's ranks know each other: an authority that lives for one plan only.

Each rank gets a certificate for the DNS name ``rank-<rank>.<session>``; the authority's key is forgotten at once, so
that there will never be others. A session that may grow has certificates of as many ranks as there may be; what is not
in use is kept by the orchestrator alone, in memory, as long as the session lives.
"""

from __future__ import annotations

from motley.protocol.mesh_pb2 import Credentials
from motley.transport.certificates import Authority


def issue_credentials(session: str, size: int) -> list[Credentials]:
    """A new authority's certificates for all ranks of a session, by rank; `size` is how many ranks there may be."""
    authority = Authority(f"session {session}")
    issued = [authority.issue_rank(rank, session) for rank in range(size)]
    return [Credentials(authority=authority.pem, certificate=each.certificate, key=each.key) for each in issued]
