"""What is run between collectives, and what goes wrong in it."""

from __future__ import annotations

import pytest

from motley.plugins.engine import EngineError, EngineLostError
from motley.plugins.onnxruntime.sessions import compute
from motley.transport.errors import TransportError


@pytest.mark.parametrize("error", [MemoryError("no room"), TransportError("a holder is lost"), EngineLostError("gone")])
def test_what_tells_its_own_kind_of_trouble_is_told_as_that(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        compute([fail])
    assert caught.value is error


def test_any_other_trouble_is_the_engines() -> None:
    with pytest.raises(EngineError, match="engine 'onnxruntime' failed in a step: integer division"):
        compute([lambda: 1 // 0])
