"""What `motley doctor` says of what it finds."""

from __future__ import annotations

from typing import Any

import pytest

from motley.cli.diagnosis import Level, absent, addresses, allow, clock, disk, links, ports, versions


def node(name: str, platform: str = "linux", version: str = "1", **ways: str) -> dict[str, Any]:
    """A node as the API tells it; `ways`: by the name of another, why that cannot be reached, "" if it can."""
    told = [{"to": other, "failure": failure or None} for other, failure in ways.items()]
    return {
        "name": name,
        "state": "alive",
        "lost": None,
        "version": version,
        "platform": platform,
        "address": f"192.168.1.{ord(name[0])}",
        "links": told,
    }


def test_a_node_that_nobody_reaches_has_a_firewall() -> None:
    nodes = [node("a", b="", c="no answer"), node("b", a="", c="no answer"), node("c", "win32", a="", b="")]
    found = links(nodes)
    bad = [each for each in found if each.level is Level.BAD]
    assert [each.what for each in bad] == [
        "a cannot reach c (192.168.1.99): no answer",
        "b cannot reach c (192.168.1.99): no answer",
    ]
    assert all("on c: start the node with --data-ports" in each.remedy for each in bad)
    assert all("New-NetFirewallRule" in each.remedy for each in bad), "c is a Windows machine"
    assert found[-1].what == "4 of 6 ways between nodes work"


def test_a_node_that_another_reaches_is_not_to_blame() -> None:
    nodes = [node("a", "win32", b="", c="no route"), node("b", a="", c=""), node("c", a="", b="")]
    bad = [each for each in links(nodes) if each.level is Level.BAD]
    assert [each.what for each in bad] == ["a cannot reach c (192.168.1.99): no route; b can, so c lets some in"]
    assert "on a, is there a VPN" in bad[0].remedy
    assert "Test-NetConnection 192.168.1.99" in bad[0].remedy


def test_what_was_not_measured_is_not_called_good() -> None:
    assert [(each.level, each.what) for each in links([node("a", b=""), node("b")])] == [
        (Level.NOTE, "not measured yet: from b to a"),
        (Level.GOOD, "1 of 2 ways between nodes work"),
    ]
    assert links([node("a")]) == []


@pytest.mark.parametrize(
    ("ahead", "level"), [(0.5, Level.GOOD), (-90.0, Level.NOTE), (90.0, Level.NOTE), (2 * 86400.0, Level.BAD)]
)
def test_clocks(ahead: float, level: Level) -> None:
    assert clock(ahead).level is level
    assert ("behind" in clock(ahead).what) == (ahead < 0)


def test_ports_and_firewalls() -> None:
    assert ports((0, 0), [], "", "linux").level is Level.GOOD
    assert ports((7340, 7341), [7340], "", "linux").level is Level.GOOD
    assert ports((7340, 7341), [7340, 7341], "", "linux").level is Level.BAD
    guarded = ports((7340, 7341), [], "ufw", "linux")
    assert guarded.level is Level.NOTE
    assert "sudo ufw allow 7340:7341/tcp" in guarded.remedy
    assert "-LocalPort 7340-7341" in allow((7340, 7341), "win32")


def test_the_rest() -> None:
    assert addresses([]).level is Level.BAD
    assert "also fd00::1" in addresses(["192.168.1.2", "fd00::1"]).what
    assert [disk("/d", free).level for free in (1e6, 1e9, 1e12)] == [Level.BAD, Level.NOTE, Level.GOOD]
    assert disk("/d", 1e6).remedy == "free some; --cache chooses another disk"
    assert disk("/d", 1e6, kept=2e9).remedy.startswith("`motley cache rm` removes shares, 2 GB now; ")
    assert disk("/d", 0, "cannot write").level is Level.BAD
    assert versions("1", "1", [node("a")]).level is Level.GOOD
    assert "a has 2" in versions("1", "1", [node("a", version="2")]).what
    lost = {**node("a"), "state": "lost", "lost": "its connection ended"}
    assert [each.what for each in absent([lost, node("b")])] == ["a is lost: its connection ended"]
