"""What to type for an extra depends on how Motley was installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motley.protocol.installing import command, how_to_install, source


@pytest.mark.parametrize(
    ("prefix", "source", "told"),
    [
        ("/home/a/env", ("", False), "pip install 'motley-mesh[gpu]'"),
        ("/home/a/.local/share/pipx/venvs/motley-mesh", ("", False), "pipx install --force 'motley-mesh[gpu]'"),
        ("/home/a/env", ("/home/a/my motley", False), "pip install '/home/a/my motley[gpu]'"),
        ("/home/a/env", ("/home/a/motley", True), "pip install -e '/home/a/motley[gpu]'"),
    ],
)
def test_the_command_depends_on_how_it_was_installed(prefix: str, source: tuple[str, bool], told: str) -> None:
    assert command("gpu", prefix, *source) == told


@pytest.mark.parametrize(("about", "editable"), [({}, False), ({"editable": True}, True)])
def test_the_folder_that_it_was_installed_from_is_found(
    about: dict[str, Any], editable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a build's leavings, which tell of none, are found first."""
    clone = tmp_path / "my clone"
    for name, told in (("a/motley_mesh.egg-info", None), ("b/motley_mesh-1.dist-info", clone)):
        (tmp_path / name).mkdir(parents=True)
        if told:
            (tmp_path / name / "direct_url.json").write_text(json.dumps({"url": told.as_uri(), "dir_info": about}))
    source()  # imports what it needs, which is not there afterwards
    monkeypatch.setattr("sys.path", [str(tmp_path / "a"), str(tmp_path / "b")])
    assert source() == (str(clone), editable)
    assert f"'{clone}[gpu]'" in how_to_install("gpu")


def test_a_package_from_an_index_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "motley_mesh-1.dist-info").mkdir()
    source()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert source() == ("", False)
