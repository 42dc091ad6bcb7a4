"""Where commands find the mesh: at the address that was given, or where this machine belongs to one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from motley.cli.reaching.home import meshes, unreadable
from motley.daemon.node.joining.membership import Membership, all_kept

USUAL_URL = "http://127.0.0.1:8000"
"""Of an orchestrator on this machine."""
LOOK_S = 1.0
"""A mesh that does not answer within this is not there."""


@dataclass(frozen=True)
class Place:
    """An orchestrator's API.

    Attributes:
        trust: the certificate by which it is known, PEM; "": what this machine trusts anyway.
        name: in its certificate; "": the host in the URL, or none that counts where there is a `trust`.
        joined_as: the name by which this machine has joined the mesh as a node; "": it has not.
        unread: why it cannot be read whether this machine belongs to another mesh; "": it can, or a URL was given.
    """

    url: str
    key: str = ""
    trust: str = ""
    name: str = ""
    joined_as: str = ""
    unread: str = ""

    def tls(self) -> ssl.SSLContext:
        """How the API is verified."""
        if not self.trust:
            return ssl.create_default_context()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = bool(self.name)
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a certificate that was given may be no authority's
        context.load_verify_locations(cadata=self.trust)
        return context


async def find_place(url: str, api_key: str) -> Place:
    """The API at a URL, known by what is kept if it is of a mesh that this machine belongs to, at whatever address. If
    the URL is empty: the first that is there of these meshes, else the usual one; if nobody is there either, that of
    the mesh which it has joined last, for an error to name.

    Args:
        api_key: that was given; "": what is kept for the place is shown.
    """
    belongs_to = all_kept(meshes())
    known = [kept for kept in belongs_to if kept.api_url]
    for kept in known:
        if kept.api_url == url.rstrip("/") or (not url and await _is_there(kept.api_url)):
            return _place(kept, api_key)
    for kept in belongs_to if url.startswith("https://") else ():
        place = _place(replace(kept, api_url=url.rstrip("/")), api_key)
        # A certificate that was given to it may have been signed by an authority that signs strangers' as well.
        if place.trust and place.name and await _is_there(place.url, place):
            return place
    joined = next((kept for kept in known if kept.name), None)
    if joined and not url and not await _is_there(USUAL_URL):
        return _place(joined, api_key)
    return Place((url or USUAL_URL).rstrip("/"), api_key, unread="" if url else unreadable())


def _place(kept: Membership, api_key: str) -> Place:
    # What a node keeps for good is not told to whoever may listen without TLS, where an open API wants none.
    key = kept.key if kept.api_url.startswith("https://") or not kept.name else ""
    return Place(kept.api_url, api_key or key, kept.api_trust, kept.api_name, kept.name)


async def _is_there(url: str, known_as: Place | None = None) -> bool:
    """Whether anybody listens at a URL; if it is to be known as a place, whether it proves by TLS that it is that."""
    with contextlib.suppress(OSError, ValueError, TimeoutError):
        parts = urlsplit(url)
        tls, name = (known_as.tls(), known_as.name) if known_as else (None, None)
        async with asyncio.timeout(LOOK_S):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            _, writer = await asyncio.open_connection(parts.hostname, port, ssl=tls, server_hostname=name)
            writer.close()
            return True
    return False
