"""How models write calls of tools."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """How a model marks calls of tools.

    Attributes:
        begin, end: stand around calls; an empty `begin`: the answer is the call; an empty `end`: nothing follows calls.
        arguments: what the key of the arguments is.
        lead, tail: whitespace within the marks, as the model was taught it.
    """

    begin: str
    end: str
    arguments: str = "arguments"
    lead: str = ""
    tail: str = ""


FORMATS = (
    CallFormat("<tool_call>", "</tool_call>", lead="\n", tail="\n"),
    CallFormat("[TOOL_CALLS]", "", lead="[", tail="]"),
)
"""By what stands in a template that knows them, the first that does."""
BARE = CallFormat("", "", "parameters")
"""Of templates with tools and none of these marks."""
TOLD = FORMATS[0]
"""What models are told whose templates know of no tools: most have seen it in what they were trained on."""


def call_format(template: str) -> CallFormat:
    """How a model with this chat template calls tools."""
    if not knows_tools(template):
        return TOLD
    return next((each for each in FORMATS if each.begin in template), BARE)


def knows_tools(template: str) -> bool:
    """Whether a chat template writes the tools itself."""
    return bool(re.search(r"\btools\b", template))
