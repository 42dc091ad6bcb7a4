"""Machines that are not there, as people describe them."""

from __future__ import annotations

import pytest

from motley.orchestrator.mesh.links import UNKNOWN_BANDWIDTH, UNKNOWN_LATENCY_S
from motley.orchestrator.planning.machines import DEVICES, FREE, REAL, WIRELESS_S, what_if


@pytest.mark.parametrize(
    ("text", "gb_s", "gb", "latency", "bandwidth"),
    [
        ("RTX 4070 12GB, 1Gbit", 504, 12, UNKNOWN_LATENCY_S, 1.25e8),
        ("NVIDIA GeForce RTX 3060", 360, 12, UNKNOWN_LATENCY_S, UNKNOWN_BANDWIDTH),
        ("rtx 4060 ti 16 GB,100Mbit,0.5ms", 288, 16, 5e-4, 1.25e7),
        ("DDR4 laptop 8GiB, wifi", 40, 8 * 2**30 / 1e9, WIRELESS_S, 3e7),
        ("Raspberry Pi 5, 200us", 15, 8, 2e-4, UNKNOWN_BANDWIDTH),
    ],
)
def test_a_machine_is_read(text: str, gb_s: float, gb: float, latency: float, bandwidth: float) -> None:
    machine = what_if(text)
    assert machine.offer.name == text
    assert machine.offer.speed == pytest.approx(REAL * gb_s * 1e9)
    assert machine.offer.memory == pytest.approx(FREE * gb * 1e9, rel=1e-6)
    assert machine.latency_s == pytest.approx(latency)
    assert machine.bandwidth == pytest.approx(bandwidth)


@pytest.mark.parametrize(("text", "at_once"), [("RTX 4070", 16), ("Apple M1", 8), ("DDR4 PC", 4)])
def test_a_prompt_s_rows_are_multiplied_only_so_fast(text: str, at_once: int) -> None:
    """Else the first token of a model that fits a GPU would come at once."""
    offer = what_if(text).offer
    assert offer.row_speed == at_once * offer.speed


@pytest.mark.parametrize("text", ["", "RTX", "4070", "RTX 4070, ", "RTX 4070 0GB", "RTX 4070, 0Gbit", "RTX 4070, x"])
def test_what_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"known|link|above 0"):
        what_if(text)


def test_every_device_is_found_by_its_name() -> None:
    assert all(what_if(name).offer.memory == int(FREE * device.memory) for name, device in DEVICES.items())
