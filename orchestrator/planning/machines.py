"""Machines that are not there, to plan with: devices that many people have, and what links lead to them. Pure.

What a device reads is by its maker's data, of which `REAL` is seen in practice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from motley.orchestrator.mesh.links import UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY_S
from motley.orchestrator.planning.cutting.shares import Candidate

REAL = 0.8
"""The part of its maker's bandwidth that a device reads weights at."""
FREE = 0.9
"""The part of its memory that a device has for a rank."""
AT_ONCE = {"gtx": 16, "rtx": 16, "rx": 16, "arc": 16, "apple": 8}
"""So many rows of a prompt a device multiplies in the time in which it reads the weights, by the first word of its
name: an estimate, by what llama.cpp's users tell of models of 7B. None of it was measured here."""
OF_PROCESSOR = 4
"""The same of all other devices."""
WIRELESS_S = 2.5e-3
"""Seconds one way by Wi-Fi."""
NAMED = 12
"""Devices that a message names at most."""


@dataclass(frozen=True)
class Device:
    """A processor or a GPU: bytes/s of its memory as its maker tells, and bytes of that."""

    bandwidth: float
    memory: float


def _device(gb_s: float, gb: float) -> Device:
    return Device(gb_s * 1e9, gb * 1e9)


DEVICES = {
    "gtx 1060": _device(192, 6),
    "gtx 1070": _device(256, 8),
    "gtx 1080": _device(320, 8),
    "gtx 1080 ti": _device(484, 11),
    "gtx 1660": _device(192, 6),
    "rtx 2060": _device(336, 6),
    "rtx 2070": _device(448, 8),
    "rtx 2080": _device(448, 8),
    "rtx 2080 ti": _device(616, 11),
    "rtx 3050": _device(224, 8),
    "rtx 3060": _device(360, 12),
    "rtx 3060 ti": _device(448, 8),
    "rtx 3070": _device(448, 8),
    "rtx 3080": _device(760, 10),
    "rtx 3090": _device(936, 24),
    "rtx 4060": _device(272, 8),
    "rtx 4060 ti": _device(288, 8),
    "rtx 4070": _device(504, 12),
    "rtx 4070 ti": _device(504, 12),
    "rtx 4080": _device(717, 16),
    "rtx 4090": _device(1008, 24),
    "rtx 5060": _device(448, 8),
    "rtx 5070": _device(672, 12),
    "rtx 5080": _device(960, 16),
    "rtx 5090": _device(1792, 32),
    "rx 6600": _device(224, 8),
    "rx 6700 xt": _device(384, 12),
    "rx 6800 xt": _device(512, 16),
    "rx 7600": _device(288, 8),
    "rx 7800 xt": _device(624, 16),
    "rx 7900 xtx": _device(960, 24),
    "arc a770": _device(560, 16),
    "arc b580": _device(456, 12),
    "ddr3 pc": _device(25, 16),
    "ddr4 pc": _device(45, 16),
    "ddr5 pc": _device(80, 32),
    "ddr4 laptop": _device(40, 16),
    "ddr5 laptop": _device(75, 16),
    "mini pc n100": _device(20, 16),
    "raspberry pi 5": _device(15, 8),
    "apple m1": _device(68, 16),
    "apple m2": _device(100, 16),
    "apple m2 pro": _device(200, 32),
    "apple m3 max": _device(400, 64),
    "apple m4": _device(120, 16),
    "ryzen ai max": _device(256, 96),
}
"""By name, in lower case."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(gb|gib)$")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?$")
_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|us)$")
_MAKERS = re.compile(r"\b(nvidia|geforce|amd|radeon|intel)\b\s*")


@dataclass(frozen=True)
class Machine:
    """A machine that is not there.

    Attributes:
        offer: what a rank there has.
        latency_s, bandwidth: of its links to all others, one way.
    """

    offer: Candidate
    latency_s: float
    bandwidth: float


def what_if(text: str) -> Machine:
    """Read ``RTX 4070 12GB, 1Gbit``: a device, its memory if it is another than usual, and how it is linked: a rate, a
    delay or ``wifi``; without, by a cable of 1 Gbit/s.

    Raises:
        ValueError: it is no such text; the message says what is wrong.
    """
    device_text, *link = (part.strip().lower() for part in text.split(","))
    size = _SIZE.search(device_text)
    name = " ".join(_MAKERS.sub("", device_text[: size.start()] if size else device_text).split())
    if name not in DEVICES:
        alike = [known for known in DEVICES if known.split()[0] in name.split()] or list(DEVICES)
        more = f" and {len(alike) - NAMED} more" if len(alike) > NAMED else ""
        raise ValueError(f"{name!r} is no device that is known here; these are: {', '.join(alike[:NAMED])}{more}")
    device = DEVICES[name]
    memory = float(size[1]) * (1e9 if size[2] == "gb" else 2**30) if size else device.memory
    if memory <= 0:
        raise ValueError(f"{text!r}: its memory must be above 0")
    latency, bandwidth = UNKNOWN_LATENCY_S, UNKNOWN_BANDWIDTH
    for part in link:
        if rate := _RATE.match(part):
            bandwidth = float(rate[1]) * (1e9 if rate[2] == "g" else 1e6) / 8
        elif delay := _DELAY.match(part):
            latency = float(delay[1]) * (1e-3 if delay[2] == "ms" else 1e-6)
        elif part == "wifi":
            latency, bandwidth = WIRELESS_S, 3e7
        else:
            raise ValueError(f"{part!r} is no link; write 1Gbit, 100Mbit, 2ms or wifi")
    if bandwidth <= 0:
        raise ValueError(f"{text!r}: a link needs a rate above 0")
    speed, rows = REAL * device.bandwidth, AT_ONCE.get(name.split()[0], OF_PROCESSOR)
    return Machine(
        Candidate(text.strip(), speed, int(FREE * memory), row_speed=rows * speed),
        latency,
        bandwidth,
    )
