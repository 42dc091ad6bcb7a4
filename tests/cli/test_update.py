"""`motley update`: which machine is to be updated, and by which command; and completion by a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from motley.cli.commands.mesh.update import how_to_update, order


@pytest.mark.parametrize(
    ("prefix", "source", "command"),
    [
        ("/home/a/.local/share/pipx/venvs/motley-mesh", ("", False), "pipx upgrade motley-mesh"),
        ("/home/a/.local/share/uv/tools/motley-mesh", ("", False), "uv tool upgrade motley-mesh"),
        ("/home/a/env", ("", False), "/env/bin/python -m pip install --upgrade motley-mesh"),
        ("/home/a/pipx/.venv", ("/home/a/motley", True), "cd /home/a/motley && git pull && make .venv/installed"),
        ("/home/a/env", ("/home/a/motley", False), "cd /home/a/motley && git pull && /env/bin/python -m pip install ."),
    ],
)
def test_the_command_depends_on_how_it_was_installed(prefix: str, source: tuple[str, bool], command: str) -> None:
    assert how_to_update(prefix, "/env/bin/python", *source) == command


def test_versions_are_in_order() -> None:
    ordered = ["0.1.0", "0.2.0.dev3", "0.2.0rc1", "0.2.0", "0.2.0.post1", "0.9.1", "0.10.0", "1.0"]
    assert sorted(set(ordered), key=order) == ordered
    assert order("1.0") == order("1.0.0") == order("1") == order("1.0.0+local.7")


def test_a_shell_completes_commands() -> None:
    completing = {"_MOTLEY_COMPLETE": "complete_bash", "COMP_WORDS": "motley mod", "COMP_CWORD": "1"}
    command = Path(sys.executable).with_name("motley.exe" if sys.platform == "win32" else "motley")
    said = subprocess.run([command], env={**os.environ, **completing}, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == ["models"], said.stderr
