"""What other ranks send is checked: nothing that they can say ends a rank otherwise than by a typed error."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.executor import Executor
from motley.daemon.rank.steps import Open, StepError, decode
from motley.daemon.sampling.parameters import SamplingError
from motley.transport.stats import Stats


def executor() -> Executor:
    """Of a rank whose engine computes nothing."""
    engine = SimpleNamespace(open_slot=lambda slot, tokens: None, close_slot=lambda slot: None)
    return Executor(cast(Any, engine), lambda ids: np.zeros((len(ids), 4), np.float32), range(64), 8, Stats(0, 1))


def test_sampling_that_is_none_is_an_error_of_the_step() -> None:
    with pytest.raises(StepError, match="the 3 bytes on sampling of an Open are malformed"):
        executor().execute(Open(0, b"\xff\xff\xff", np.zeros(2, np.int32)))


@given(st.integers(0, 3), st.binary(max_size=40), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
def test_whatever_opens_a_sequence_opens_it_or_is_refused(slot: int, sampling: bytes, prompt: list[int]) -> None:
    message = decode(Open(slot, sampling, np.array(prompt, np.int32)).encode())
    with suppress(StepError, SamplingError):
        assert executor().execute(message) is None
