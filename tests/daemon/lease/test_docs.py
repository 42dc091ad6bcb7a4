"""The examples of docs/lease.md do what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.lease import LIMIT_S
from motley.daemon.lease.states import State
from motley.daemon.machine import files

TEXT = (Path(__file__).parents[3] / "docs" / "lease.md").read_text("utf-8")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="they are for Linux")


def example(language: str) -> str:
    (code,) = re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)
    return str(code)


@pytest.mark.parametrize(
    ("command", "holder", "device"),
    [
        (["bash", "-c", example("sh")], "backup", "cpu"),
        ([sys.executable, "-c", example("python").partition("# work")[0]], "render", "gpu:0"),
    ],
    ids=["shell", "python"],
)
def test_it_takes_a_lease_that_ends_with_it(command: list[str], holder: str, device: str, tmp_path: Path) -> None:
    file = LeaseFile(tmp_path / ".local" / "share" / "motley" / "lease.json")
    file.tell(Told("pc", State.LEASED, device, os.getpid(), 0.0, LIMIT_S))
    env = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    lease = file.read()
    assert lease is not None
    assert (lease.holder.name, lease.device) == (holder, device)
    assert lease.over(time.time(), LIMIT_S, began).endswith("has ended")
    assert not lease.over(time.time(), LIMIT_S, lambda _: lease.granted_at - 1)
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1
    assert "somebody has it" in again.stdout + again.stderr


def test_it_says_which_byte_is_locked_on_windows() -> None:
    assert 2 ** int(re.findall(r"on Windows the byte at 2\^(\d+)", TEXT)[0]) == files._BEYOND
