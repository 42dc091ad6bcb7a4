"""Where the milliseconds of a token go, drawn in a terminal: a stacked bar per rank, and the tokens as a sparkline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rich.text import Text

STYLES = {"compute": "blue", "wire": "red", "wait": "yellow", "lead": "bright_black"}
BLOCKS = {"compute": "█", "wire": "▓", "wait": "▒", "lead": "░"}
"""The character that draws each part, which tells it apart without colours too."""
LEVELS = "▁▂▃▄▅▆▇█"
WIDTH = 60


def stacked_bar(parts: Mapping[str, float], full: float, width: int = WIDTH) -> Text:
    """A bar of the parts of a token, ms, where `full` ms are as long as `width`."""
    bar = Text()
    drawn, so_far = 0, 0.0
    for part, value in parts.items():
        so_far += value
        end = round(width * min(1.0, so_far / full)) if full > 0 else 0
        bar.append(BLOCKS[part] * (end - drawn), STYLES[part])
        drawn = end
    return bar


def legend() -> Text:
    """What the parts of `stacked_bar` mean."""
    return Text("  ").join(Text(f"{BLOCKS[part]} {part}", style) for part, style in STYLES.items())


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values from zero up to the largest; each character stands for the largest of the values it covers."""
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [round(index * len(values) / width) for index in range(width + 1)]
    peaks = [max(values[start:stop]) for start, stop in pairwise(cuts)]
    top = max(peaks)
    return "".join(
        LEVELS[min(len(LEVELS) - 1, int(len(LEVELS) * peak / top))] if top > 0 else LEVELS[0] for peak in peaks
    )
