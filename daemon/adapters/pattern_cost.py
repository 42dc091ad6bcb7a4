"""How long a regular expression may take to match, told from its text: the ways in which it may take a name apart.

The standard library tries one way after the other, and a name that does not match is tried in all of them. An
adapter's patterns are whatever a stranger has written, so they are counted before the first is matched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import prod
from typing import Any

_REPEATS = {"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"}
"""What the standard library's parser calls repetitions."""
_LONGEST = 64
"""Letters of a long name of a module; a repetition may as well have no bound as one that is larger."""
_ENDS = 16
"""Ways that a repetition without a bound counts as: k of them cut a name of n letters in about n ** k / k! ways, which
for the few that are let pass is about so many to the power of k, times a small number."""
_ENDLESS = 10**9
"""What is more is not told apart."""


def ways(pattern: str) -> int:
    """In about how many ways a pattern may be tried on a name, at least 1.

    Raises:
        re.error, RecursionError, OverflowError: it is no regular expression.
    """
    return _ways(re._parser.parse(pattern))  # type: ignore[attr-defined]


def _ways(parsed: Iterable[Any]) -> int:
    return min(_ENDLESS, prod(_ways_of(str(kind), told) for kind, told in parsed))


def _ways_of(kind: str, told: Any) -> int:
    """Those of one part of an expression."""
    if kind in _REPEATS:
        least, most, body = int(told[0]), int(told[1]), told[2]
        once = _ways(body)
        if most < _LONGEST:
            several: int = sum(once**times for times in range(least, most + 1))
            return min(_ENDLESS, several)
        return _ENDS if once == 1 else _ENDLESS  # by themselves, several ways each time are a power of the length
    if kind == "BRANCH":
        return 1 if _excludes_the_others(told[1]) else sum(map(_ways, told[1]))
    return prod(map(_ways, _parts_of(told)))


def _excludes_the_others(branches: Iterable[Iterable[Any]]) -> bool:
    """Whether at most one of some alternatives can match at a place: they are words, none of which begins another."""
    parts = [[(str(kind), told) for kind, told in branch] for branch in branches]
    if any(kind != "LITERAL" for branch in parts for kind, _ in branch):
        return False
    words = sorted([told for _, told in branch] for branch in parts)
    return all(later[: len(word)] != word for word, later in pairwise(words))


def _parts_of(told: object) -> Iterator[Iterable[Any]]:
    """The expressions within a part of a parsed one."""
    if isinstance(told, re._parser.SubPattern):  # type: ignore[attr-defined]
        yield told
    elif isinstance(told, (list, tuple)):
        for each in told:
            yield from _parts_of(each)
