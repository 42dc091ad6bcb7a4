"""Under which addresses other machines may reach this one: a home has VPNs, containers, and at times no way out."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Collection, Iterable
from typing import NamedTuple

import psutil

_AROUND = re.compile(
    r"^(tun|tap|wg|utun|ppp|ipsec|zt|docker|podman|cni|flannel|br-|veth|virbr|vmnet|vboxnet|lxc|lxd)"
    r"|vpn|tailscale|zerotier|wireguard|vethernet|virtualbox|vmware|wsl",
    re.IGNORECASE,
)
"""Interfaces, by name, that lead into a VPN or to guests of this machine rather than to the others in the house."""
_CARRIER = ipaddress.ip_network("100.64.0.0/10")
"""Addresses that no home network has of its own: VPNs use them."""
_OUTSIDE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


class Found(NamedTuple):
    """An address of this machine.

    Attributes:
        interface: the name of the interface that has it.
        point_to_point: the interface leads to one other machine only, as that of a VPN does.
    """

    interface: str
    address: str
    point_to_point: bool = False


def own_addresses() -> list[str]:
    """The addresses under which other machines may reach this one, IPv4 and IPv6, the likeliest first."""
    with contextlib.suppress(OSError):
        states = psutil.net_if_stats()
        found = [
            Found(name, each.address, "pointopoint" in states[name].flags.split(","))
            for name, addresses in psutil.net_if_addrs().items()
            for each in addresses
            if each.family in _OUTSIDE and name in states and states[name].isup
        ]
        return likeliest_first(found, _routed())
    return _routed()


def likeliest_first(found: Iterable[Found], routed: Collection[str]) -> list[str]:
    """Sort what may be told to other machines: first what is no VPN's and no guest's, of that IPv4, of that what
    leads outside. Left out is what nobody else can dial.

    Args:
        routed: the addresses from which this machine would send to the outside.
    """

    def unlikeliness(one: Found) -> tuple[bool, bool, bool, bool]:
        address = ipaddress.ip_address(one.address)
        around = one.point_to_point or _AROUND.search(one.interface) is not None
        around = around or (address.version == 4 and address in _CARRIER)
        return address.is_link_local, around, address.version == 6, one.address not in routed

    usable = [one for one in found if _can_be_dialled(one.address)]
    return list(dict.fromkeys(one.address for one in sorted(usable, key=unlikeliness)))


def _can_be_dialled(text: str) -> bool:
    address = ipaddress.ip_address(text)
    scoped = address.version == 6 and address.is_link_local  # means nothing without an interface of who dials
    return not (address.is_loopback or address.is_unspecified or address.is_multicast or scoped)


def _routed() -> list[str]:
    """The addresses from which this machine would send to the outside. Nothing is sent."""
    addresses = []
    for family, outside in _OUTSIDE.items():
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((outside, 9))
            addresses.append(str(probe.getsockname()[0]))
    return [address for address in addresses if _can_be_dialled(address)]
