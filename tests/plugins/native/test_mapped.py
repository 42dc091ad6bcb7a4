"""Mapped files that cannot be read do not end the process."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from motley.plugins.native.mapped import Guard

PAGE = mmap.PAGESIZE
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what could not be read")

WITHOUT = """
import mmap, sys
import numpy as np
from motley.plugins.native.mapped import Guard
with open(sys.argv[1], "r+b") as file:
    guarded, other = (mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) for _ in range(2))
    guard = Guard(guarded)
    if len(sys.argv) > 2:
        del guarded
    file.truncate(0)
    print(np.frombuffer(other, np.uint8)[-1])
"""


def mapped(path: Path) -> mmap.mmap:
    path.write_bytes(b"\1" * 4 * PAGE)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_what_a_file_has_lost_is_zeros_and_told(tmp_path: Path) -> None:
    one, other = mapped(tmp_path / "one"), mapped(tmp_path / "other")
    guards = Guard(one), Guard(other)
    values = np.frombuffer(one, np.uint8)
    assert values.all()
    assert not guards[0].broken
    os.truncate(tmp_path / "one", PAGE)
    assert values[:PAGE].all()
    assert not guards[0].broken, "what is there can be read"
    assert not values[PAGE:].any()
    assert [guard.broken for guard in guards] == [True, False]
    assert np.frombuffer(other, np.uint8).all()


def test_a_file_that_is_no_longer_mapped_is_no_longer_guarded(tmp_path: Path) -> None:
    for _ in range(100):  # more than can be guarded at a time
        one = mapped(tmp_path / "one")
        guard = Guard(one)
        os.truncate(tmp_path / "one", 0)
        assert one[0] == 0
        assert guard.broken
        del one
        assert not guard.broken


@pytest.mark.parametrize("more", [[], ["unmapped"]])
def test_whatever_is_not_guarded_ends_the_process_as_ever(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, str(tmp_path / "file"), *more], capture_output=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, b""), ended.stderr
