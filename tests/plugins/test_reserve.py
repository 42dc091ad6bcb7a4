"""Room for a sequence that is made beforehand: steps need no more memory, and too little of it spoils nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.plugins.engine import EngineError, EngineFactory, EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, golden_cases, whole_share

CASE = next(case for case in golden_cases() if str(case) == "llama-mha")
TOLERANCE = 1e-4
"""Of the largest logit."""
every_engine = pytest.mark.parametrize(
    ("factory", "exact"), [(OnnxRuntimeEngine, False), (OnnxRuntimeEngine, True), (ReferenceEngine, False)]
)


class Memory:
    """What NumPy gets caches from, arrays of four dimensions: `left` of them, then none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        self._zeros = np.zeros
        monkeypatch.setattr(np, "zeros", self._allocate)

    def _allocate(self, shape: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(shape, tuple) and len(shape) == 4:
            if not self.left:
                raise MemoryError("no more caches")
            self.left -= 1
        return self._zeros(shape, *args, **kwargs)


@every_engine
def test_a_sequence_with_room_needs_no_more_and_one_that_got_none_goes_on(
    factory: EngineFactory, exact: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{factory.__module__}.FIRST_CAPACITY", 8)
    tokens, count = CASE.tokens, 20
    shares = [whole_share(units(CASE.model, "fp32", 32, exact=exact))]
    options = EngineOptions(exact=exact)
    with LocalSession(CASE.folder, factory, shares, tmp_path, options=options, exact=exact) as group:
        engine, memory = group.engines[0], Memory(monkeypatch)
        group.open_slot()
        logits = [group.step(tokens[:4], 0), group.decode([0], tokens[4:5], [4])]
        memory.left = 3  # of two for each layer
        with pytest.raises(MemoryError, match="no more caches"):
            engine.reserve(0, count)
        logits.append(group.decode([0], tokens[5:6], [5]))
        logits.append(group.step(tokens[6:7], 6))
        memory.left = 1 << 30
        engine.reserve(0, count)
        memory.left = 0
        engine.reserve(0, 3)
        logits.append(group.step(tokens[7:15], 7))
        logits += [group.decode([0], tokens[each : each + 1], [each]) for each in range(15, count)]
        with pytest.raises(MemoryError):
            group.step(tokens[count : count + 2], count)
    assert np.abs(np.concatenate(logits) - CASE.logits[:count]).max() < TOLERANCE * np.abs(CASE.logits).max()


@every_engine
def test_room_that_cannot_be_is_named(factory: EngineFactory, exact: bool, tmp_path: Path) -> None:
    shares = [whole_share(units(CASE.model, "fp32", 32, exact=exact))]
    options = EngineOptions(exact=exact)
    with LocalSession(CASE.folder, factory, shares, tmp_path, options=options, exact=exact, context=16) as group:
        group.open_slot()
        group.engines[0].reserve(0, 16)
        with pytest.raises(EngineError, match="slot 0 can have at most 16 tokens, not 17"):
            group.engines[0].reserve(0, 17)
        with pytest.raises(EngineError, match="slot 1 is not open"):
            group.engines[0].reserve(1, 5)
