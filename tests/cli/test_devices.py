"""What is said of a device that was typed and cannot be had speaks of that device, not of engines."""

from __future__ import annotations

from typing import Any

from motley.cli.typed.devices import no_device
from motley.cli.typed.options import Device


def node(name: str, *gpus: str, lacking: str | None = None) -> dict[str, Any]:
    engines = [{"name": "cuda", "on_gpu": True, "lacking": lacking}]
    return {"name": name, "gpus": [*gpus], "no_gpu": None if gpus else "no driver", "engines": engines}


def test_no_machine_has_it() -> None:
    told = str(no_device(Device.CUDA, [node("a"), node("b", "RTX", lacking="install motley-mesh[gpu]"), node("c")]))
    assert told == (
        "--device cuda: no machine that would take part has an NVIDIA graphics card that can be used:"
        " leave out --device"
        "\n  a, c: no driver\n  b: install motley-mesh[gpu]"
    )


def test_those_that_have_it_are_named() -> None:
    told = str(no_device(Device.CUDA, [node("a"), node("b", "RTX")]))
    assert told == (
        "--device cuda: not every machine that would take part has an NVIDIA graphics card that can be used:"
        " leave out --device, or have only those that do take part: --nodes b\n  a: no driver"
    )
