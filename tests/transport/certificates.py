"""Certificates for tests."""

from __future__ import annotations

from motley.transport import Tls, certificates


class Authority(certificates.Authority):
    """An authority that also makes what a rank of its session protects its links with."""

    def __init__(self, name: str = "the mesh") -> None:
        super().__init__(name)

    def tls(self, rank: int, session: str = "test") -> Tls:
        """What rank `rank` of a session gives to `connect_mesh`."""
        return Tls(*self.issue_rank(rank, session), self.pem)
