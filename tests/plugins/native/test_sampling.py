"""What sampling asks of our kernels, against NumPy over all tokens."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.daemon.sampling.noise import gumbel, state_of
from motley.plugins.native.sampling import contenders, masses
from tests.plugins.native.native_levels import LEVELS, at_all_levels, at_the_end, normal, set_level


@pytest.mark.parametrize("level", LEVELS)
@given(
    tokens=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 1.0, 10.0, 300.0]),
    temperature=st.floats(0.01, 100),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 5000),
    offset=st.integers(0, 200_000),
    masked=st.booleans(),
)
@example(tokens=1, spread=0.0, temperature=1e-6, seed=0, step=0, offset=0, masked=False)
def test_all_that_may_win_a_draw_contend_and_few_others(
    level: str, tokens: int, spread: float, temperature: float, seed: int, step: int, offset: int, masked: bool
) -> None:
    set_level(level)
    random = np.random.default_rng(seed)
    logits = normal(random, tokens) * np.float32(spread)
    if masked:
        logits[random.random(tokens) < 0.7] = -np.inf
    noise = gumbel(seed, step, np.arange(tokens) + offset)
    scores = logits / np.float64(temperature) + noise
    least = np.sort(scores)[-random.integers(1, tokens, endpoint=True)]
    if least == -np.inf:
        return
    contending = contenders(logits, temperature, float(least), state_of(seed, step, offset))
    assert (np.diff(contending) > 0).all()
    assert set(np.flatnonzero(scores >= least)) <= set(contending)
    most_noise = -np.log(-np.expm1(-np.exp(-noise)))  # -log(1 - u), as noise is -log(-log(u))
    assert (logits / np.float64(temperature) + most_noise)[contending].min(initial=least) >= least - np.log(2) - 1e-4


@given(
    tokens=st.integers(1, 2000),
    cuts=st.sets(st.integers(1, 1999), max_size=9),
    temperature=st.sampled_from([0.1, 1.0, 7.0]),
    seed=st.integers(0, 999),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_masses_are_those_of_numpy(tokens: int, cuts: set[int], temperature: float, seed: int, masked: float) -> None:
    random = np.random.default_rng(seed)
    logits = normal(random, tokens) * np.float32(9)
    logits[random.random(tokens) < masked] = -np.inf
    starts = np.array([0, *sorted(cut for cut in cuts if cut < tokens)])
    peaks, sums = masses(logits, starts, temperature)
    for number, stretch in enumerate(np.split(logits.astype(np.float64), starts[1:])):
        peak = max(stretch.max(), -1e300) if np.isfinite(stretch).any() else 0
        assert peaks[number] == peak
        np.testing.assert_allclose(sums[number], np.exp((stretch - peak) / temperature).sum(), rtol=1e-14)


def test_masses_have_the_same_bits_at_every_level() -> None:
    random = np.random.default_rng(1)
    logits = normal(random, 5003) * np.float32(20)
    at_all_levels(lambda: masses(logits, np.array([0, 17, 4000]), 0.7)[1].view(np.float32))


@pytest.mark.skipif(sys.platform == "win32", reason="no memory without access")
@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_read_behind_the_logits(level: str) -> None:
    set_level(level)
    for tokens in range(1, 20):
        logits = at_the_end(np.zeros(tokens, np.float32))
        assert masses(logits, np.zeros(1, np.int64), 1.0)[1][0] == tokens
        assert len(contenders(logits, 1.0, -50.0, 0)) == tokens


def test_operands_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="logits must be float32"):
        contenders(np.zeros(5), 1.0, 0.0, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="starts must be int64"):
        masses(np.zeros(5, np.float32), np.zeros(1, np.int32), 1.0)  # type: ignore[arg-type]
    for starts in [], [1], [0, 5], [0, 3, 2]:
        with pytest.raises(ValueError, match="starts must ascend from 0 and be below 5"):
            masses(np.zeros(5, np.float32), np.array(starts, np.int64), 1.0)
