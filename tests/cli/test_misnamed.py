"""Models that nothing is called like."""

from __future__ import annotations

from typing import NoReturn

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching import mesh_of_one
from motley.cli.reaching.misnamed import check_findable


@pytest.mark.parametrize("model", ["shakespeare-2.6m", "qwen3-0.6b", "owner/name"])
def test_what_may_be_found_is_looked_for(model: str) -> None:
    check_findable(model)


async def test_nothing_is_started_for_a_model_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def started() -> NoReturn:
        raise AssertionError("that takes seconds")

    monkeypatch.setattr(mesh_of_one, "mesh_of_one", started)
    with pytest.raises(CliError, match=r"Did you mean 'shakespeare-2\.6m', which comes with Motley"):
        async with mesh_of_one.mesh_or_alone("http://127.0.0.1:1", "", "this machine runs it", "shakespear-2.6m"):
            pass
