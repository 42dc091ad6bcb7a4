"""Which addresses other machines are told, and in which order."""

from __future__ import annotations

from motley.orchestrator.mesh.addresses import Found, likeliest_first, own_addresses
from motley.protocol.address import is_loopback


def test_the_homes_network_is_before_vpns_and_guests_even_where_the_vpn_leads_outside() -> None:
    found = [
        Found("lo", "127.0.0.1"),
        Found("lo", "::1"),
        Found("docker0", "172.17.0.1"),
        Found("tun0", "10.8.0.2", point_to_point=True),
        Found("home-office", "10.9.0.2", point_to_point=True),
        Found("Tailscale", "100.101.102.103"),
        Found("ether5", "100.64.0.9"),
        Found("vEthernet (WSL)", "172.28.0.1"),
        Found("wlan0", "192.168.1.10"),
        Found("wlan0", "fd00::10"),
        Found("wlan0", "fe80::10%wlan0"),
    ]
    told = likeliest_first(found, routed=["10.8.0.2"])
    assert told[:2] == ["192.168.1.10", "fd00::10"]
    assert told[2] == "10.8.0.2"
    assert set(told[3:]) == {"172.17.0.1", "10.9.0.2", "100.101.102.103", "100.64.0.9", "172.28.0.1"}


def test_of_two_networks_the_one_that_leads_outside_is_first_and_a_cable_without_a_server_last() -> None:
    found = [
        Found("eth2", "169.254.3.4"),
        Found("eth0", "192.168.7.1"),
        Found("eth1", "192.168.1.10"),
        Found("eth1", "192.168.1.10"),
        Found("tun0", "10.8.0.2", point_to_point=True),
    ]
    told = likeliest_first(found, routed=["192.168.1.10"])
    assert told == ["192.168.1.10", "192.168.7.1", "10.8.0.2", "169.254.3.4"]


def test_without_a_way_out_the_network_is_told_and_without_a_network_nothing() -> None:
    assert likeliest_first([Found("lo", "127.0.0.1"), Found("eth0", "192.168.1.10")], routed=[]) == ["192.168.1.10"]
    assert likeliest_first([Found("lo", "127.0.0.1"), Found("lo", "::1")], routed=[]) == []


def test_this_machines_own_addresses_can_be_dialled_by_others() -> None:
    assert not [address for address in own_addresses() if is_loopback(address) or address in ("0.0.0.0", "::")]
