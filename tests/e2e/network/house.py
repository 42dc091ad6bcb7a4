"""Machines of a house, as network namespaces of Linux at one switch, at which each can be cut off for a while.

What is sent by or to a machine that is cut off is lost at the switch: no side is told, as with a cable or a wireless
network that fails beyond the machine's own interface.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

CAN_BE_BUILT = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("bridge") is not None
"""Whether this process may make namespaces, and has the programs for it."""
SHAPE = ("rate", "1gbit", "burst", "128kb", "latency", "20ms")
"""Of each machine's link, in both directions: a home's Ethernet. (Its latency would take netem, which few kernels of
containers have.)"""
FORWARDING, DISABLED = "3", "0"
"""What a port of a switch does with packets: pass them on, or lose them."""


class House:
    """This machine, and others of which each has a name of its own and an address."""

    def __init__(self, tag: str, subnet: str) -> None:
        self.address = f"{subnet}.1"
        """Of this machine, at the switch."""
        self._tag = tag

    def on(self, machine: str) -> list[str]:
        """What to put before a command that is to run on a machine."""
        return ["ip", "netns", "exec", f"{self._tag}-{machine}"]

    def cut_off(self, machine: str) -> None:
        """Lose all packets from and to a machine, until it is back."""
        _do("bridge", "link", "set", "dev", f"{self._tag}{machine}", "state", DISABLED)

    def keep_apart(self, *machines: str) -> None:
        """Lose all packets between any two of these machines, as a wireless network does that isolates its guests."""
        for machine in machines:
            _do("bridge", "link", "set", "dev", f"{self._tag}{machine}", "isolated", "on")

    def bring_back(self, machine: str) -> None:
        _do("bridge", "link", "set", "dev", f"{self._tag}{machine}", "state", FORWARDING)


@contextmanager
def house(*machines: str) -> Iterator[House]:
    """A house with these machines, each named by a few letters, at links of a Gbit/s; it needs the right to make one
    (`CAN_BE_BUILT`)."""
    tag, subnet = f"m{os.getpid()}", f"198.18.{os.getpid() % 254 + 1}"
    built = House(tag, subnet)
    with ExitStack() as stack:
        switch = f"{tag}switch"
        _do("ip", "link", "add", switch, "type", "bridge")
        stack.callback(_do, "ip", "link", "del", switch)
        _do("ip", "address", "add", f"{built.address}/24", "dev", switch)
        _do("ip", "link", "set", switch, "up")
        for number, machine in enumerate(machines, start=2):
            port, within = f"{tag}{machine}", f"{tag}-{machine}"
            _do("ip", "netns", "add", within)
            stack.callback(_do, "ip", "netns", "del", within)
            _do("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", within)
            stack.callback(_do, "ip", "link", "del", port)
            _do("ip", "link", "set", port, "master", switch, "up")
            _do(*built.on(machine), "ip", "address", "add", f"{subnet}.{number}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _do(*built.on(machine), "ip", "link", "set", interface, "up")
            _do("tc", "qdisc", "add", "dev", port, "root", "tbf", *SHAPE)
            _do(*built.on(machine), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *SHAPE)
        yield built


def _do(*command: str) -> None:
    done: subprocess.CompletedProcess[str] = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
