"""What the parts of an answer make when they are put together."""

from __future__ import annotations

from collections.abc import Sequence

from motley.daemon.text.answer_parts import Part

Taken = tuple[str, str, list[tuple[str, str]]]
"""What was said, what was thought, and calls: names and arguments."""


def put_together(out: Sequence[Part]) -> Taken:
    """The whole of an answer's parts; the first piece of each call must name it, and no other."""
    calls: dict[int, list[str]] = {}
    for call in filter(None, (part.call for part in out)):
        assert bool(call.id) == bool(call.name) == (call.index not in calls), "the first piece names it"
        own = calls.setdefault(call.index, ["", ""])
        own[0] += call.name
        own[1] += call.arguments
    said, thought = ("".join(getattr(part, kind) for part in out) for kind in ("content", "reasoning"))
    return said, thought, [(name, arguments) for name, arguments in calls.values()]
