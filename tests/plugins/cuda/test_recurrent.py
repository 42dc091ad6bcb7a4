"""Recurrent layers of the engine for NVIDIA's GPUs: neither steps nor guesses, snapshots or company change a bit.

Kernels are compiled for the host; that they compute the golden models is tested in test_engine.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.cuda.kernels import SOURCES, THREADS, WARP
from motley.plugins.engine import F32, EngineError, Span
from motley.plugins.recurrent import MOST_GUESSES
from tests.models.cases import BLOCKS, Case, LocalSession, golden_case, uneven_shares
from tests.plugins.cuda.test_engine import on_host, pointer
from tests.transport.cuda.host_kernels import launch

NAMES = ("qwen3-5", "granitemoehybrid-dense", "lfm2")
"""Models with a gated DeltaNet, a state space and short convolutions, each beside attention."""


class Recurring(LocalSession):
    """A model on the stand-in, and what one sequence comes to when all its rows are in one step."""

    def __init__(self, name: str, folder: Path, ranks: int = 1) -> None:
        self.case: Case = golden_case(name)
        shares = uneven_shares(units(self.case.model, "fp32", 32), ranks)
        super().__init__(self.case.folder, on_host, shares, folder, blocks=replace(BLOCKS, snapshots=2))
        self.whole = self.step(self.case.tokens[:24], 0, sequence=99)
        self.sequences.close(99)

    def take(
        self, position: int, rows: int, right: int | None = None, sequence: int = 0, slot: int | None = None
    ) -> F32:
        """The logits of some rows, of which those behind the first ones, if `right` says how many, are guesses that are
        other tokens."""
        tokens = self.case.tokens[position : position + rows]
        sure = rows if right is None else right
        wrong = [(token + 1) % self.case.model.vocabulary for token in tokens[sure:]]
        span = self.sequences.span(sequence, position, rows, rows)._replace(guesses=rows - sure)
        return self.run([span if slot is None else span._replace(slot=slot)], [*tokens[:sure], *wrong])[:sure]

    def guess(self, position: int, rows: int, guesses: int) -> F32:
        """The logits of some rows, of which the last ones are guesses that are right."""
        span = self.sequences.span(0, position, rows, rows)._replace(guesses=guesses)
        return self.run([span], self.case.tokens[position : position + rows])

    def refused(self, spans: Sequence[Span]) -> str:
        """What is said of a step that cannot be."""
        (engine,) = self.engines
        with pytest.raises(EngineError) as caught:
            engine.step(self.rows(spans, self.case.tokens[: sum(span.rows for span in spans)]), spans)
        return str(caught.value)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        for engine in self.engines:
            assert isinstance(engine, CudaEngine)
            engine.copy_states(pairs)


@pytest.mark.parametrize("name", NAMES)
def test_guesses_right_and_wrong_change_no_bit(name: str, tmp_path: Path) -> None:
    with Recurring(name, tmp_path, 2) as ranks:
        assert np.array_equal(ranks.take(0, 5, right=3), ranks.whole[:3])
        assert np.array_equal(ranks.guess(3, 6, 4), ranks.whole[3:9])
        assert np.array_equal(ranks.take(7, 1), ranks.whole[7:8])  # two of the guesses were right
        assert np.array_equal(ranks.guess(8, 3, 2), ranks.whole[8:11])
        assert np.array_equal(ranks.guess(11, 3, 3), ranks.whole[11:14])  # guesses behind guesses that were right
        assert np.array_equal(ranks.guess(12, 4, 0), ranks.whole[12:16])
        for position in range(16, 20):
            assert np.array_equal(ranks.take(position, 1), ranks.whole[position : position + 1])
        (engine, _) = ranks.engines
        assert isinstance(engine, CudaEngine)
        assert engine._graphs, "decoded from a captured step"


@pytest.mark.parametrize("name", NAMES)
def test_sequences_are_apart_and_begin_anew(name: str, tmp_path: Path) -> None:
    """Chunks of prompts beside decoded rows, a slot that another sequence has had, graphs for any sequences."""
    with Recurring(name, tmp_path) as ranks:
        tokens, lengths = ranks.case.tokens, {0: 0, 1: 0, 2: 0}
        for wave in (
            {0: 7},
            {1: 3, 0: 1},
            {2: 9, 0: 2, 1: 1},
            {0: 1, 1: 1, 2: 1},
            {1: 1, 2: 1},
            {2: 1, 0: 1},
            {0: 1, 1: 1},
        ):
            spans = [ranks.sequences.span(sequence, lengths[sequence], rows, rows) for sequence, rows in wave.items()]
            rows_of = [range(span.position, span.position + span.rows) for span in spans]
            got = ranks.run(spans, [tokens[row] for rows in rows_of for row in rows])
            assert np.array_equal(got, np.concatenate([ranks.whole[rows.start : rows.stop] for rows in rows_of]))
            lengths |= {sequence: rows.stop for sequence, rows in zip(wave, rows_of, strict=True)}
        ranks.sequences.close(1)
        assert np.array_equal(ranks.step(tokens[:6], 0, sequence=3), ranks.whole[:6])


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_goes_on_as_what_it_was_of(name: str, tmp_path: Path) -> None:
    """Whatever becomes of that meanwhile; guesses are not copied, and a slot is a snapshot's again."""
    slots = BLOCKS.slots
    with Recurring(name, tmp_path) as ranks:
        ranks.take(0, 9, right=6)
        ranks.copy_states([(0, slots), (slots, slots + 1)])
        ranks.take(6, 8)
        ranks.copy_states([(slots + 1, 5)])
        said = ranks.refused([ranks.sequences.span(0, 7, 1, 1)._replace(slot=5)])
        assert "from position 7 on cannot go on" in said
        assert "in slot 5, which stands before 6, with 0 guesses" in said
        assert np.array_equal(ranks.take(6, 5, slot=5), ranks.whole[6:11])
        assert np.array_equal(ranks.take(11, 1, slot=5), ranks.whole[11:12])


def test_a_state_is_used_at_its_own_position_alone(tmp_path: Path) -> None:
    """A state that stands before 4, with 3 guesses behind it, knows nothing of a row at 3, nor of one at 8; a step that
    is refused changes nothing."""
    with Recurring("lfm2", tmp_path) as ranks:
        ranks.guess(0, 7, 3)
        for position in (3, 8):
            said = ranks.refused([ranks.sequences.span(7, 0, 2), ranks.sequences.span(0, position, 1, 1)])
            assert f"'cuda': rows from position {position} on cannot go on" in said
            assert "in slot 0, which stands before 4, with 3 guesses" in said
        assert np.array_equal(ranks.take(7, 3), ranks.whole[7:10])
        many = ranks.sequences.span(0, 10, MOST_GUESSES + 2)
        assert f"take {MOST_GUESSES} guesses at most" in ranks.refused([many._replace(guesses=MOST_GUESSES + 1)])


def test_heads_that_are_wider_than_a_warp() -> None:
    """Of real models: those of the golden ones are narrow."""
    rng, rows, heads, width = np.random.default_rng(0), 3, 4, 70
    x = rng.standard_normal((rows, heads * width)).astype(np.float32)
    z, gain = (
        rng.standard_normal((rows, heads * width)).astype(np.float32),
        rng.standard_normal(width).astype(np.float32),
    )
    y, units_ = np.full_like(x, np.nan), x.copy()
    blocks, sizes = -(-rows * heads * WARP // THREADS), [*map(ctypes.c_int, (rows, heads, width))]
    stride = ctypes.c_int(heads * width)
    launch(SOURCES, "unit_heads", blocks, THREADS, [pointer(units_), stride, *sizes])
    given = [pointer(x), pointer(gain), pointer(z), stride, pointer(y), *sizes, ctypes.c_float(1e-6)]
    launch(SOURCES, "norm_and_gate", blocks, THREADS, given)
    apart, gates = (each.astype(float).reshape(rows, heads, width) for each in (x, z))
    lengths = np.sqrt(np.square(apart).sum(axis=-1, keepdims=True) + 1e-6)
    shorter = np.array([width**-0.5] * 2 + [1] * 2)[:, None]
    assert np.abs(units_.reshape(apart.shape) - apart / lengths * shorter).max() < 1e-6
    normed = apart / np.sqrt(np.square(apart).mean(axis=-1, keepdims=True) + 1e-6) * gain
    assert np.abs(y.reshape(apart.shape) - normed * gates / (1 + np.exp(-gates))).max() < 1e-5
