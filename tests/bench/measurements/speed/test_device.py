"""`motley bench device` on the processor, which every machine has."""

from __future__ import annotations

from pathlib import Path

import motley.cli
from motley.bench.measurements.speed.device import measure_device
from motley.daemon.node.survey.devices import Device

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"


async def test_it_tells_what_goes_on_and_each_token() -> None:
    told: list[str] = []
    device = Device("here", "processor", 1, 1, "", 0.0, False, ["onnxruntime"])
    report = await measure_device(device, "onnxruntime", BUNDLED, ["fp32", "int4"], 2, 1, {}, told.append)
    assert report.ms_per_token.keys() == {"fp32", "int4"}
    for number, quantisation in enumerate(("fp32", "int4"), 1):
        about = f"shakespeare-2.6m in {quantisation} on here ({number} of 2)"
        own = [each.removeprefix(about) for each in told if each.startswith(about)]
        assert own[0] == " loads, and is examined"
        assert [each for each in own if "token" in each] == [f": token {each} of 8" for each in range(1, 9)]
