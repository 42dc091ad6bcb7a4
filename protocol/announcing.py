"""Meshes on the local network: an orchestrator announces itself by mDNS, and others look who is there.

What is announced proves nothing: whoever joins checks a fingerprint, or a code.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroconf.asyncio import AsyncZeroconf

SERVICE = "_motley._tcp.local."
LOOK_S = 3.0
"""Whoever has not answered by then is taken not to be there."""
_RESOLVE_MS = 2000
_LIKELY = 100
"""Answers of more orchestrators are not waited for."""


@dataclass(frozen=True)
class Announced:
    """
    Attributes:
        name: of the mesh: the machine that its orchestrator is on.
        addresses: of that, the likeliest to be reached first.
        port: where nodes join.
        fingerprint: the first 16 hex digits of that of the mesh's certificate.
    """

    name: str
    addresses: tuple[str, ...]
    port: int
    fingerprint: str


@asynccontextmanager
async def announced(mesh: Announced, interfaces: Sequence[str] = ()) -> AsyncIterator[None]:
    """Announce a mesh, for as long as the context lasts.

    Args:
        interfaces: addresses of the network interfaces to do so on; none: all.

    Raises:
        OSError: the network cannot do that.
    """
    from zeroconf import ServiceInfo

    info = ServiceInfo(
        SERVICE,
        f"{mesh.fingerprint}.{SERVICE}",  # unique, where two machines may have one name
        port=mesh.port,
        addresses=[ipaddress.ip_address(each).packed for each in mesh.addresses],
        properties={"name": mesh.name, "fingerprint": mesh.fingerprint, "addresses": ",".join(mesh.addresses)},
        server=f"motley-{mesh.fingerprint}.local.",
    )
    async with _network(interfaces) as network:
        await (await network.async_register_service(info, cooperating_responders=True))
        try:
            yield
        finally:
            with contextlib.suppress(Exception):  # the network may have gone before
                await (await network.async_unregister_service(info))


async def meshes_here(seconds: float = LOOK_S, interfaces: Sequence[str] = ()) -> list[Announced]:
    """The meshes that answer within so many seconds, by name.

    Args:
        interfaces: as of `announced`.

    Raises:
        OSError: the network cannot do that.
    """
    from zeroconf import ServiceStateChange
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo

    names: dict[str, None] = {}

    def heard(*, name: str, state_change: ServiceStateChange, **_: object) -> None:
        if state_change is ServiceStateChange.Removed:
            names.pop(name, None)
        elif len(names) < _LIKELY:
            names[name] = None

    async with _network(interfaces) as network:
        browser = AsyncServiceBrowser(network.zeroconf, SERVICE, handlers=[heard])
        try:
            await asyncio.sleep(seconds)
        finally:
            await browser.async_cancel()
        infos = [AsyncServiceInfo(SERVICE, name) for name in names]
        await asyncio.gather(*(info.async_request(network.zeroconf, _RESOLVE_MS) for info in infos))
    found = []
    for info in infos:
        told = {key: value or "" for key, value in info.decoded_properties.items()}
        addresses = tuple(filter(is_address, told.get("addresses", "").split(",")))
        name, fingerprint = told.get("name", ""), told.get("fingerprint", "")
        if info.port and addresses and name.isprintable():
            found.append(Announced(name[:64], addresses[:16], info.port, fingerprint[:16]))
    return sorted(set(found), key=lambda mesh: mesh.name)


@asynccontextmanager
async def _network(interfaces: Sequence[str]) -> AsyncIterator[AsyncZeroconf]:
    from zeroconf import InterfaceChoice
    from zeroconf.asyncio import AsyncZeroconf

    network = AsyncZeroconf(interfaces=list(interfaces) or InterfaceChoice.All)
    try:
        yield network
    finally:
        await network.async_close()


def is_address(text: str) -> bool:
    """Whether a text is an IP address, and no name."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
