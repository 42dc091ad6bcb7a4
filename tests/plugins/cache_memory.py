"""A process that says what the caches of an engine take: `python -m tests.plugins.cache_memory ENGINE FORMAT MODEL`.

It opens the engine with few blocks and then with as many as take 96 MiB, if no layer has a window; the second has that
much more of the process's memory. It prints a line of JSON: the bytes that were planned for the blocks, those that the
process has got, those that it has got more after some steps, as if memory had been touched only then, and those that
would have been planned if layers with a window had as many blocks as others.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.orchestrator.planning.caches import Caches, blocks_of, with_blocks
from motley.orchestrator.planning.setup import Setup
from motley.plugins.engine import CacheBlocks, EngineOptions, Span
from motley.plugins.installed import load_engine
from tests.models.cases import whole_share
from tests.models.local_group import LocalGroup

ABOUT = 96 << 20
FEW = 8
TOKENS = 32


def main(engine: str, cache_format: str, model: Path) -> None:
    with open_model(model) as opened, tempfile.TemporaryDirectory() as folder:
        cut = units(opened.model, "int8", 32)
        told = profile(opened.model, "int8", 32, cache_format=cache_format)
        every = told.kv_groups * told.cache_bytes_per_token * TOKENS
        count = ABOUT // every
        planned_blocks = blocks_of(
            Caches(FEW * TOKENS, count * TOKENS), told, [Setup(engine, "int8", on_gpu=False, keeps_windows=True)]
        )
        windowed, window = planned_blocks.windowed, planned_blocks.window
        a_block = told.kv_groups * with_blocks(told, planned_blocks).cache_bytes_per_token * TOKENS
        few = CacheBlocks(FEW, TOKENS, cache_format)
        share = [whole_share(cut)]
        declared = build_rank_graph(opened.model, share, 0, "int8", 32, FEW * TOKENS, opened.stored, blocks=few)
        many = replace(few, count=count, windowed=windowed, window=window)
        counted = replace(declared, blocks=many).cache_bytes
        assert counted <= many.count * a_block < counted * 1.01, "the rank counts as the planner does"
        share_file = Path(folder) / SHARE_FILE
        write_share(opened.source, declared.weights, declared.share_bytes, share_file)
        process, held, engines = psutil.Process(), [], []
        for blocks in (few, few, many):  # the first loads what all use
            graph = replace(declared.bind(share_file), blocks=blocks)
            engines.append(load_engine(engine)(graph, LocalGroup(1).member(0), EngineOptions(max_rows=16)))
            hidden = np.ones((16, graph.hidden), np.float32)
            table = np.arange(FEW, dtype=np.int32)
            engines[-1].step(hidden, [Span(table, 0, 16, wanted=1, windowed=table)])
            held.append(process.memory_info().rss)
        spread = np.arange(many.count - 1, -1, -(many.count // FEW), dtype=np.int32)[:FEW].copy()
        for position in range(0, FEW * TOKENS, 16):
            engines[-1].step(hidden, [Span(spread, position, 16, wanted=1, windowed=table)])
        later = process.memory_info().rss
        got = (held[2] - held[1]) - (held[1] - held[0])
        for each in engines:
            each.close()
    planned, whole = many.count * a_block - few.count * every, (many.count - few.count) * every
    print(json.dumps({"planned": planned, "got": got, "later": later - held[2], "whole": whole}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
