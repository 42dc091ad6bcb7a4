"""Imports that stay leave Python's search for garbage as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_garbage_is_looked_for_again_if_it_was_before(before: str) -> None:
    asked = (
        f"import gc; gc.{before}(); from motley.daemon.machine.importing import imports_that_stay as stay\n"
        "with stay(): during = gc.isenabled()\n"
        "print(during, gc.isenabled(), gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    on = before == "enable"
    assert done.stdout.split() == ["False", str(on), str(on)]
