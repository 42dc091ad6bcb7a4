"""How the devices of a node are called where somebody takes one back: all of it, its processor, or a GPU by number."""

from __future__ import annotations

ALL, CPU, GPU = "all", "cpu", "gpu:"


def is_device(text: str) -> bool:
    """Whether a text names a device: ``all``, ``cpu``, or ``gpu:0`` to ``gpu:99``."""
    number = text.removeprefix(GPU)
    return text in (ALL, CPU) or (text != number and number.isascii() and number.isdigit() and len(number) < 3)


def covers(device: str, on_gpu: bool) -> bool:
    """Whether a device is, or has, what ranks compute on: a node's first GPU (they use no other), or its processor."""
    return device == ALL or device == (f"{GPU}0" if on_gpu else CPU)


def device_words(device: str) -> str:
    """A device for people."""
    named = {ALL: "the whole machine", CPU: "the processor", f"{GPU}0": "the GPU"}
    return named.get(device, f"GPU {device.removeprefix(GPU)}")
