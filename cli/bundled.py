"""The small models that come with Motley, by name: to try it without fetching anything."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

FOLDER = Path(__file__).with_name("models")
"""Has a folder for each."""
FIRST = "shakespeare-2.6m"
"""The one to begin with."""


def bundled_names() -> list[str]:
    """What these models are called."""
    return sorted(place.parent.name for place in FOLDER.glob("*/config.json"))


def bundled(model: str) -> str:
    """Where a model is that comes with Motley and is named so; any other, as it is named."""
    return str(FOLDER / model) if model in bundled_names() else model


def bundled_meant(model: str) -> str:
    """A question for who has mistyped the name of one, to follow a sentence; "": no such name is near."""
    near = get_close_matches(model.lower(), bundled_names(), 1)
    return f" Did you mean {near[0]!r}, which comes with Motley?" if near else ""
