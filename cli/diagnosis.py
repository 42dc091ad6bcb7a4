"""What may be wrong with a machine or a mesh, and what to do: facts in, findings out. Pure.

Every finding says it in words, and what to do on Windows and on Linux, where that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from typing import Any

from motley.cli.shown.show import set_aside
from motley.protocol.wording import short_bytes

ROOM_BYTES = 20e9
"""A disk with less room may not hold the shares of a model of everyday size."""
LEAST_BYTES = 1e9
"""A disk with less room holds the share of hardly any model."""
SKEW_S = 60.0
"""Clocks that differ by more make tokens expire at other times than people think, and logs hard to read."""
DAY_S = 86400.0
"""Certificates are valid from a day before they are made: clocks that differ by more refuse them."""


class Level(StrEnum):
    """How bad something is."""

    GOOD = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        about: what was looked at, in a word or two.
        what: what was found, in words.
        remedy: what to do; "": nothing.
    """

    level: Level
    about: str
    what: str
    remedy: str = ""


def addresses(found: Sequence[str]) -> Finding:
    """About the addresses under which others may reach this machine."""
    if not found:
        why = "this machine has no address in a network"
        return Finding(Level.BAD, "addresses", why, "plug in the cable, or join the wireless network")
    others = f"; also {', '.join(found[1:])}" if found[1:] else ""
    advice = "if others should use another one: --advertise ADDRESS with `motley up` or `motley join`" if others else ""
    return Finding(Level.GOOD, "addresses", f"others are told {found[0]}{others}", advice)


def disk(folder: str, free: float, trouble: str = "", nodes: Sequence[str] = (), kept: float = 0) -> Finding:
    """About a folder for shares.

    Args:
        trouble: why nothing can be written there.
        nodes: that run on this machine and keep their shares there; none: the next one would.
        kept: bytes of shares that are there.
    """
    if trouble:
        return Finding(Level.BAD, "disk", trouble, "choose another folder: --cache, or MOTLEY_CACHE")
    who = f"{' and '.join(nodes)}, running here, {'keep' if len(nodes) > 1 else 'keeps'} shares"
    told = f"{short_bytes(free)} are free in {folder}, where {who if nodes else 'shares are kept'}"
    if free < ROOM_BYTES:
        level = Level.BAD if free < LEAST_BYTES else Level.NOTE
        room = f"`motley cache rm` removes shares, {short_bytes(kept)} now; " if kept else "free some; "
        return Finding(level, "disk", told, f"{room}--cache chooses another disk")
    return Finding(Level.GOOD, "disk", told)


def home(folder: str, trouble: str) -> Finding:
    """About the folder with what this user's Motley keeps, which cannot be read, and why."""
    remedy = "give this user the folder and what is in it, or set MOTLEY_HOME to another one"
    told = f"what Motley keeps in {folder} cannot be read, such as which mesh this machine belongs to: {trouble}"
    return Finding(Level.BAD, "home", told, remedy)


def ports(wanted: tuple[int, int], taken: Sequence[int], firewall: str, platform: str) -> Finding:
    """About the ports on which other nodes are to reach this one's ranks.

    Args:
        wanted: the first and the last; (0, 0): any.
        taken: those of them on which nothing can listen.
        firewall: what lets only some ports in here; "": none is known to.
    """
    first, last = wanted
    told = f"ports {first} to {last}" if first else "any free port"
    remedy = allow(wanted, platform)
    if first and len(taken) > last - first:
        why = f"ranks can listen on none of the {told}: others use them"
        return Finding(Level.BAD, "ports", why, "choose others: --data-ports FIRST-LAST")
    used = f", of which {len(taken)} are in use" if taken else ""
    if firewall:
        what = f"ranks would listen on {told}{used}, and {firewall} decides who reaches them"
        return Finding(Level.NOTE, "ports", what, remedy)
    return Finding(Level.GOOD, "ports", f"ranks would listen on {told}{used}; no firewall was noticed")


def allow(wanted: tuple[int, int], platform: str) -> str:
    """How a machine's firewall lets ranks' ports in; ports (0, 0): any, so it has to be decided on some first."""
    first, last = wanted if wanted[0] else (7340, 7359)
    begin = "" if wanted[0] else f"start the node with --data-ports {first}-{last}, and "
    if platform == "win32":
        rule = f"New-NetFirewallRule -DisplayName Motley -Direction Inbound -Protocol TCP -LocalPort {first}-{last}"
        return f"{begin}let them in, in a PowerShell of an administrator: {rule} -Action Allow"
    return (
        f"{begin}let them in: sudo ufw allow {first}:{last}/tcp (Ubuntu), or"
        f" sudo firewall-cmd --permanent --add-port={first}-{last}/tcp && sudo firewall-cmd --reload (Fedora)"
    )


def clock(ahead_s: float) -> Finding:
    """About this machine's clock, which is ahead of the orchestrator's by so many seconds."""
    way = "ahead of" if ahead_s > 0 else "behind"
    told = f"this machine's clock is {abs(ahead_s):.0f} s {way} the orchestrator's"
    remedy = "Windows: w32tm /resync, as an administrator. Linux: sudo timedatectl set-ntp true"
    if abs(ahead_s) > DAY_S:
        return Finding(Level.BAD, "clocks", f"{told}: certificates are refused", remedy)
    if abs(ahead_s) > SKEW_S:
        return Finding(Level.NOTE, "clocks", told, remedy)
    return Finding(Level.GOOD, "clocks", "this machine's clock and the orchestrator's agree")


def versions(own: str, orchestrator: str, nodes: Sequence[Mapping[str, Any]]) -> Finding:
    """About the versions of Motley on all machines."""
    there = {"this machine": own, "the orchestrator": orchestrator}
    there |= {node["name"]: node["version"] for node in nodes if node["state"] == "alive"}
    if len(set(there.values())) == 1:
        return Finding(Level.GOOD, "versions", f"all machines have Motley {own}")
    told = ", ".join(f"{name} has {version}" for name, version in there.items())
    return Finding(Level.NOTE, "versions", told, "install the newest on all of them")


def links(nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """About the ways between every two nodes that are there, as they have measured them.

    Args:
        nodes: as the API tells them.
    """
    alive = {node["name"]: node for node in nodes if node["state"] == "alive"}
    found, good, unknown = [], 0, []
    for dialler, listener in permutations(alive.values(), 2):
        way = next((link for link in dialler["links"] if link["to"] == listener["name"]), None)
        if way is None:
            unknown.append(f"from {dialler['name']} to {listener['name']}")
        elif way["failure"] is None:
            good += 1
        else:
            found.append(_broken(dialler, listener, alive, way["failure"]))
    if unknown:
        told = f"not measured yet: {', '.join(unknown)}"
        found.append(Finding(Level.NOTE, "links", told, "ask again in a moment; nodes that compute are not disturbed"))
    if good:
        found.append(Finding(Level.GOOD, "links", f"{good} of {len(alive) * (len(alive) - 1)} ways between nodes work"))
    return found


def _broken(
    dialler: Mapping[str, Any], listener: Mapping[str, Any], alive: Mapping[str, Mapping[str, Any]], failure: str
) -> Finding:
    """About a way that does not work: whose fault that most likely is follows from the others."""
    name, address = listener["name"], listener["address"]
    others = [node for node in alive.values() if node["name"] not in (name, dialler["name"])]
    reached = [node["name"] for node in others if any(w["to"] == name and w["failure"] is None for w in node["links"])]
    told = f"{dialler['name']} cannot reach {name} ({address}): {failure}"
    if reached:
        why = f"{', '.join(reached)} can, so {name} lets some in"
        hint = (
            f"on {dialler['name']}, is there a VPN or another network? Try there: {_try(address, dialler['platform'])}"
        )
        return Finding(Level.BAD, "links", f"{told}; {why}", hint)
    let_in = allow((0, 0), listener["platform"])
    hint = f"on {name}: {let_in}. Or {address} is not its address in this network: --advertise"
    return Finding(Level.BAD, "links", told, hint)


def _try(address: str, platform: str) -> str:
    return f"Test-NetConnection {address}" if platform == "win32" else f"ping -c 3 {address}"


def unsteady(nodes: Sequence[dict[str, Any]]) -> list[Finding]:
    """About nodes that come and go, which plans leave out for a while."""
    remedy = "is its cable loose, its wireless weak, or its memory used up? The log of `motley join` there may say"
    return [Finding(Level.NOTE, "nodes", told, remedy) for told in set_aside(nodes)]


def absent(nodes: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """About nodes that are lost."""
    return [
        Finding(
            Level.NOTE, "nodes", f"{node['name']} is lost: {node['lost']}", "is it on, and `motley join` running there?"
        )
        for node in nodes
        if node["state"] == "lost"
    ]
