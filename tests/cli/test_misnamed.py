"""Models that nothing is called like."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from motley.cli.errors import CliError
from motley.cli.reaching import mesh_of_one, place
from motley.cli.reaching.home import meshes
from motley.cli.reaching.misnamed import check_findable
from motley.daemon.node.joining.membership import Membership


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


@pytest.mark.parametrize("model", ["mychat", "shakespeare-2.6m"])
async def test_the_mesh_that_this_machine_belongs_to_is_told_to_be_away(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the model is one of that mesh, or may be run here alone."""

    @contextlib.asynccontextmanager
    async def alone() -> AsyncIterator[None]:
        yield

    monkeypatch.setenv("MOTLEY_HOME", str(tmp_path))
    monkeypatch.setattr(place, "USUAL_URL", "http://127.0.0.1:2")
    monkeypatch.setattr(mesh_of_one, "mesh_of_one", alone)
    monkeypatch.setattr(mesh_of_one, "console", Console(stderr=True, width=200))
    Membership("laptop", "ab" * 32, "key", "192.0.2.1:7337", "http://127.0.0.1:1", "", "").keep(meshes())
    said = ""
    try:
        async with mesh_of_one.mesh_or_alone("", "", "this machine runs it", model):
            pass
    except CliError as error:
        said = str(error)
    away = "the mesh that this machine has joined as 'laptop' does not answer at http://127.0.0.1:1"
    if model == "mychat":
        assert "no model 'mychat'" in said
        assert said.endswith(f"(A mesh may know it, but {away}.)")
    else:
        assert f"{away}: this machine runs it" in capsys.readouterr().err
