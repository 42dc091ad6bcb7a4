"""Models with recurrent layers on engine cuda: neither steps nor guesses, snapshots or company change a bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import F32, EngineError, EngineFactory, EngineOptions, Span
from motley.plugins.recurrent import MOST_GUESSES
from tests.models.cases import BLOCKS, LocalSession, golden_case, uneven_shares

NAMES = ("qwen3-5", "kimi-linear", "granitemoehybrid-dense", "lfm2", "qwen4-exp")
"""Models with gated DeltaNets whose states decay as a whole and row by row, a state space, short convolutions, and a
dilated one in layers that have another state, each beside attention."""


class Recurring(LocalSession):
    """A model, and what a sequence comes to when its rows are in one step.

    Attributes:
        whole: the logits of the first rows.
    """

    def __init__(self, name: str, factory: EngineFactory, options: EngineOptions, folder: Path, ranks: int = 1) -> None:
        self.case = golden_case(name)
        shares = uneven_shares(units(self.case.model, "fp32", 32), ranks)
        blocks = replace(BLOCKS, snapshots=2)
        super().__init__(self.case.folder, factory, shares, folder, options=options, blocks=blocks)
        self.whole = self.step(self.case.tokens[:20], 0, sequence=99)
        self.sequences.close(99)

    def check_guesses(self) -> None:
        """Wrong ones, and right ones of which the sequence goes on behind all, or some, or none."""
        assert np.array_equal(self._wrong(0, 3, 2), self.whole[:3])
        assert np.array_equal(self._right(3, 6, 4), self.whole[3:9])
        assert np.array_equal(self._right(7), self.whole[7:8])
        assert np.array_equal(self._right(8, 3, 2), self.whole[8:11])
        assert np.array_equal(self._right(11, 3, 3), self.whole[11:14])  # guesses alone, behind guesses
        assert np.array_equal(self._right(12, 4), self.whole[12:16])
        for position in range(16, 20):
            assert np.array_equal(self._right(position), self.whole[position : position + 1])
        assert all(isinstance(engine, CudaEngine) and engine._graphs for engine in self.engines), "from captured steps"

    def check_company(self) -> None:
        """Chunks of prompts beside decoded rows, graphs for any sequences, a slot that another sequence has had."""
        tokens, lengths = self.case.tokens, [0, 0, 0]
        chunks = [{0: 7}, {1: 3, 0: 1}, {2: 9, 0: 2, 1: 1}]
        decoded = [{0: 1, 1: 1, 2: 1}, {1: 1, 2: 1}, {2: 1, 0: 1}, {0: 1, 1: 1}]
        for wave in chunks + decoded:
            spans = [self.sequences.span(sequence, lengths[sequence], rows, rows) for sequence, rows in wave.items()]
            rows_of = [range(span.position, span.position + span.rows) for span in spans]
            got = self.run(spans, [tokens[row] for rows in rows_of for row in rows])
            assert np.array_equal(got, np.concatenate([self.whole[rows.start : rows.stop] for rows in rows_of]))
            for sequence, rows in zip(wave, rows_of, strict=True):
                lengths[sequence] = rows.stop
        self.sequences.close(1)
        assert np.array_equal(self.step(tokens[:6], 0, sequence=3), self.whole[:6])

    def check_snapshots(self) -> None:
        """One goes on as what it was of, whatever becomes of that meanwhile; guesses are not copied."""
        first = BLOCKS.slots
        self._wrong(0, 6, 3)
        self._copy_states([(0, first), (first, first + 1)])
        self._right(6, 8)
        self._copy_states([(first + 1, 5)])
        said = self._refused([self.sequences.span(0, 7, 1, 1)._replace(slot=5)])
        assert "from position 7 on cannot go on" in said
        assert "in slot 5, which stands before 6, with 0 guesses" in said
        assert np.array_equal(self._right(6, 5, slot=5), self.whole[6:11])
        assert np.array_equal(self._right(11, 1, slot=5), self.whole[11:12])

    def check_places(self) -> None:
        """A state that stands before 4, with 3 guesses behind it, knows nothing of a row at 3, nor of one at 8; a step
        that is refused changes nothing."""
        self._right(0, 7, 3)
        for position in (3, 8):
            said = self._refused([self.sequences.span(7, 0, 2), self.sequences.span(0, position, 1, 1)])
            assert f"'cuda': rows from position {position} on cannot go on" in said
            assert "in slot 0, which stands before 4, with 3 guesses" in said
        assert np.array_equal(self._right(7, 3), self.whole[7:10])
        many = self.sequences.span(0, 10, MOST_GUESSES + 2)
        assert f"take {MOST_GUESSES} guesses at most" in self._refused([many._replace(guesses=MOST_GUESSES + 1)])

    def _right(self, position: int, rows: int = 1, guesses: int = 0, slot: int = 0) -> F32:
        """The logits of rows of the sequence, of which the last ones are guesses that are right."""
        span = self.sequences.span(0, position, rows, rows)._replace(guesses=guesses, slot=slot)
        return self.run([span], self.case.tokens[position : position + rows])

    def _wrong(self, position: int, rows: int, guesses: int) -> F32:
        """The logits of rows of the sequence, behind which there are guesses that are wrong."""
        span = self.sequences.span(0, position, rows + guesses, rows + guesses)._replace(guesses=guesses)
        tokens = self.case.tokens[position : position + rows + guesses]
        others = [(token + 1) % self.case.model.vocabulary for token in tokens[rows:]]
        return self.run([span], [*tokens[:rows], *others])[:rows]

    def _refused(self, spans: Sequence[Span]) -> str:
        """What is said of a step that cannot be."""
        (engine,) = self.engines
        with pytest.raises(EngineError) as caught:
            engine.step(self.rows(spans, self.case.tokens[: sum(span.rows for span in spans)]), spans)
        return str(caught.value)

    def _copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        (engine,) = self.engines
        assert isinstance(engine, CudaEngine)
        engine.copy_states(pairs)
