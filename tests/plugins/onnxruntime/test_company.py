"""The CPU engine gives each row of a step the very bits that it has alone, whatever else is in the step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from motley.daemon.models.cutting.units import units
from motley.plugins.engine import F32, CacheBlocks, EngineOptions, micro_chunks
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from tests.models.cases import LocalSession, golden_case, uneven_shares

CASE = golden_case("qwen2-some-windows")
SEQUENCES, LONGEST, MOST_ROWS = 5, 61, 75
TEXTS = np.random.default_rng(0).integers(0, CASE.model.vocabulary, (SEQUENCES, LONGEST)).tolist()
Parts = list[tuple[int, int, int]]
"""Of a step: sequences, how many of their next rows it has, and how many logits of these are wanted."""


class Ranks:
    """Two ranks that hold a model, and the logits that they give each sequence alone, f32[SEQUENCES][LONGEST, V]."""

    def __init__(self, folder: Path, quantisation: str, exact: bool) -> None:
        shares = uneven_shares(units(CASE.model, quantisation, 32, exact=exact), 2)
        options = EngineOptions(max_rows=MOST_ROWS, exact=exact)
        self.exact = exact
        self.session = LocalSession(
            CASE.folder, OnnxRuntimeEngine, shares, folder, quantisation, options=options, exact=exact
        )
        self.expected = [self.session.step(text, 0, sequence=number) for number, text in enumerate(TEXTS)]

    def begin_anew(self) -> None:
        """All sequences go on at their first token; they get blocks that others have had."""
        for number in range(SEQUENCES):
            self.session.sequences.close(number)

    def check(self, parts: Parts, at: list[int], halved: bool = False) -> None:
        """Run a step, and see that its logits are the expected ones; `at` says where each sequence is."""
        span = self.session.sequences.span
        spans = [span(number, at[number], rows, wanted) for number, rows, wanted in parts]
        tokens = [token for number, rows, _ in parts for token in TEXTS[number][at[number] : at[number] + rows]]
        got = self.session.run(spans, tokens, halved)
        for number, rows, _ in parts:
            at[number] += rows
        right: list[F32] = [self.expected[number][at[number] - wanted : at[number]] for number, _, wanted in parts]
        np.testing.assert_array_equal(got.view(np.int32), np.concatenate(right).view(np.int32))


@pytest.fixture(
    scope="module",
    params=[("int8", False), ("int4", False), ("fp32", True), ("int4", True)],
    ids=["int8", "int4", "fp32 exact", "int4 exact"],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"), *request.param)
    with made.session:
        yield made


@st.composite
def steps(draw: st.DrawFn) -> list[Parts]:
    """Steps in which some sequences go on from where they are, in any order."""
    left = [LONGEST] * SEQUENCES
    made = []
    for _ in range(draw(st.integers(1, 6))):
        parts: Parts = []
        room = MOST_ROWS
        for number in draw(st.permutations(range(SEQUENCES)))[: draw(st.integers(1, SEQUENCES))]:
            most = min(room, left[number])
            if most:
                rows = draw(st.one_of(st.just(1), st.integers(1, most)))
                parts.append((number, rows, draw(st.integers(0, rows))))
                left[number] -= rows
                room -= rows
        if parts:
            made.append(parts)
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=steps(), data=st.data())
def test_company_does_not_show(ranks: Ranks, steps: list[Parts], data: st.DataObject) -> None:
    ranks.begin_anew()
    at = [0] * SEQUENCES
    for parts in steps:
        ranks.check(parts, at, halved=not ranks.exact and data.draw(st.booleans()))


def test_a_chunk_a_token_and_a_beginning(ranks: Ranks) -> None:
    """Odd numbers of rows, and of rows that are wanted, in one step; and as many spans as there are rows."""
    ranks.begin_anew()
    at = [0] * SEQUENCES
    ranks.check([(0, 13, 1), (1, 30, 0)], at)
    ranks.check([(0, 7, 3), (1, 1, 1), (2, 9, 1)], at)  # 17 rows, 5 wanted
    ranks.check([(2, 1, 1), (3, 1, 1), (0, 1, 1)], at)
    ranks.check([(4, 1, 0)], at)
    ranks.check([(4, 60, 7), (0, 15, 0)], at)
    assert at == [36, 31, 10, 1, 61]


def test_halves_cut_a_span_in_the_middle(ranks: Ranks) -> None:
    if ranks.exact:
        pytest.skip("exact steps are taken whole")
    ranks.begin_anew()
    at = [0] * SEQUENCES
    ranks.check([(0, 5, 1), (3, 1, 1)], at)
    assert micro_chunks(58, halved=True)[0] == slice(0, 16)
    ranks.check([(0, 1, 1), (1, 40, 33), (2, 17, 4)], at, halved=True)  # the 17th row is one of the second span
    assert micro_chunks(64, halved=True)[0] == slice(0, 32)
    ranks.check([(0, 32, 32), (3, 32, 32)], at, halved=True)  # between two


def test_the_logits_of_all_steps_lie_in_the_same_memory(ranks: Ranks) -> None:
    """Steps that verify guesses want many rows, and of any number: each number with its own would be gigabytes."""
    ranks.begin_anew()
    at = [0] * SEQUENCES
    for rows in (10, 9, 8):
        ranks.check([(0, rows, rows)], at)
    for engine in ranks.session.engines:
        assert isinstance(engine, OnnxRuntimeEngine)
        heads = engine._heads.values()
        assert len(heads) >= 3
        assert len({head.logits.ctypes.data for head in heads}) == 1


def anonymous() -> int:
    """Bytes of this process's memory that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("exact", [False, True])
def test_the_memory_of_blocks_is_there_from_the_beginning(exact: bool, tmp_path: Path) -> None:
    """So no request is refused for want of memory while others run, and none waits for pages."""
    shares = uneven_shares(units(CASE.model, "fp32", 32, exact=exact), 1)
    options = EngineOptions(max_rows=64, exact=exact)
    given: dict[str, Any] = {"options": options, "exact": exact}
    with LocalSession(CASE.folder, OnnxRuntimeEngine, shares, tmp_path / "few", **given) as few:
        few.step(TEXTS[0][:60], 0)  # what the runtime takes once for a process is there
        blocks = CacheBlocks(count=2048, tokens=32)
        with LocalSession(CASE.folder, OnnxRuntimeEngine, shares, tmp_path / "many", blocks=blocks, **given) as many:
            size = sum(2 * spec.heads * spec.head_dim for spec in many.graphs[0].caches) * 4 * 2048 * 32
            assert size > 64 << 20
            opened = anonymous()
            for number in range(0, 1024, 32):
                spans = [many.sequences.span(number + each, 0, 2, wanted=1) for each in range(32)]
                many.run(spans, TEXTS[0][:2] * 32)
            assert many.sequences.free == [*range(1024)]
            assert anonymous() - opened < size / 16
