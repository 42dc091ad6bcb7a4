"""The certificate that the API shows off loopback: issued by the mesh's own authority, or given; it is renewed."""

from __future__ import annotations

import asyncio
import datetime
import logging
import re
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from motley.orchestrator.trust.identity import API_LIFETIME, Identity
from motley.protocol.files import write_private

FILE = "api.pem"
"""In the state folder: the certificate that was issued last, and its key."""
AUTHORITY = "authority.pem"
"""There, too: the certificate of the mesh's authority, for clients to trust. It is no secret."""
LOOK_S = 3600.0
"""How often is looked whether there must be another."""

_BLOCK = re.compile(b"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
"""A certificate in PEM; a file may hold the private key besides, which is nobody else's."""
_log = logging.getLogger(__name__)


class CertificateError(Exception):
    """A certificate that was given cannot be used."""


class ApiCertificate:
    """
    Attributes:
        context: for servers; what is renewed holds for connections from then on.
        given: the certificate that was given, in PEM; empty: the mesh's authority has issued one.
    """

    def __init__(
        self,
        identity: Identity,
        state_dir: Path,
        addresses: Callable[[], Sequence[str]],
        given: tuple[Path, Path] | None = None,
    ) -> None:
        """
        Args:
            addresses: where clients reach the API now.
            given: files of a certificate (with what has signed it) and its key, instead of one that is issued.

        Raises:
            CertificateError: what was given cannot be used.
            OSError: the state folder cannot be written.
        """
        self._identity = identity
        self._file = state_dir / FILE
        self._addresses = addresses
        self._given = given
        self._known: object = None
        self.given = b""
        self._until = datetime.datetime.now(datetime.UTC)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        try:
            self.renew()
        except (OSError, ssl.SSLError) as error:
            if given is None:
                raise
            files = f"{given[0]} and {given[1]}"
            raise CertificateError(f"--certificate, --key: {files} are no certificate with its key: {error}") from error

    @property
    def trusted(self) -> bytes:
        """What clients of the mesh trust, in PEM: the certificate given, or the mesh's authority."""
        return self.given or self._identity.certificate_pem

    def renew(self) -> None:
        """Load a certificate if there must be another: files were changed, or addresses, or it ends in a month. Blocks.

        Raises:
            OSError, ssl.SSLError: it cannot be loaded; the one before goes on.
        """
        if self._given is not None:
            changed = tuple(file.stat().st_mtime_ns for file in self._given)
            if changed != self._known:
                self.context.load_cert_chain(*self._given)
                self.given, self._known = b"\n".join(_BLOCK.findall(self._given[0].read_bytes())) + b"\n", changed
            return
        now, addresses = datetime.datetime.now(datetime.UTC), list(self._addresses())
        if addresses != self._known or now > self._until - API_LIFETIME / 3:
            papers = self._identity.issue_api(addresses)
            write_private(self._file, papers.certificate + papers.key)
            write_private(self._file.with_name(AUTHORITY), self._identity.certificate_pem)
            self.context.load_cert_chain(self._file)
            self._known, self._until = addresses, papers.expires

    async def keep_valid(self) -> None:
        """Renew it when need be, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await asyncio.to_thread(self.renew)
            except (OSError, ssl.SSLError) as error:
                _log.warning("the API's certificate cannot be renewed: %s", error)
