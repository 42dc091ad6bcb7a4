"""The source files that a kernel is compiled from: those of one kind together.

So a rank compiles what it has to do with, side by side, and not all there is, which takes a processor most of a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from motley.plugins.cuda.kernels import CODED
from motley.plugins.engine import CACHE_FORMATS
from motley.transport.cuda.compiler import DEVICE

Module = tuple[Path, ...]
_FOLDER = Path(__file__).with_name("device")


def _files(*names: str) -> Module:
    return (DEVICE, *(_FOLDER / f"{name}.cu" for name in ("common", *names)))


NODES = _files("row_source", "nodes", "caches", "adapting", "recurrent")
"""All that is small."""
FLOATS = _files("floats")
"""Products by matrices of floats."""
CODES = {kind: _files("row_source", "quantised", f"quantised_{kind}") for kind in CODED}
"""Products by codes, and what is quantised for them, by the kind of the matrix."""
TILES = {kind: _files("row_source", "quantised", "tiles", f"tiles_{kind}") for kind in CODES}
"""Products by codes of several tokens."""
ATTENTION = {kept: _files("caches", "attention", f"attention_{kept}") for kept in CACHE_FORMATS}
"""Attention, by what keys and values are kept as."""
CHOOSING = _files("caches", "choosing")
"""What chooses positions."""
MODULES = (NODES, FLOATS, CHOOSING, *CODES.values(), *TILES.values(), *ATTENTION.values())


@cache
def module_of(kernel: str) -> Module:
    """What a kernel is compiled with, by its name."""
    if found := re.fullmatch(r"(?:(?:expert_)?products|quantise)_(int[48])\w*?(_\d+x\d+)?", kernel):
        return (TILES if found[2] else CODES)[found[1]]
    if found := re.fullmatch(r"(?:rotate|attend_(?:\d+|row)|combine)_(\w+)", kernel):
        return ATTENTION[found[1]]
    if kernel == "choose_positions" or kernel.startswith(("score_index_", "pool_index_", "average_index_")):
        return CHOOSING
    return FLOATS if re.match(r"(expert_)?matmul_|widen_", kernel) else NODES


def modules_for(kinds: Iterable[str], kept: str, chooses: bool) -> list[Module]:
    """What a rank compiles that has matrices of such kinds, keeps keys and values so, and perhaps chooses positions."""
    codes = sorted({*kinds} & {*CODES})
    floats = [FLOATS] if {*kinds} - {*CODES} else []
    floats += [CHOOSING] if chooses else []
    return [NODES, ATTENTION[kept], *floats, *(module for kind in codes for module in (CODES[kind], TILES[kind]))]
