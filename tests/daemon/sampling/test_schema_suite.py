"""Constraints keep what the official suite of JSON Schema says of the schemas that they do not refuse."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.daemon.sampling.schema_suite import examine

RIGHT = 0.95
"""Of the suite's documents, at least so many are let come if they are valid, and kept from coming if not."""
KEPT = 160
"""Schemas that are not refused, at least, of 368."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """The suite's folder for draft 2020-12, which the source package of `jsonschema` brings."""
    wanted = f"jsonschema=={version('jsonschema')}"
    fetch = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        "jsonschema",
        "--dest",
        str(tmp_path),
        wanted,
    ]
    fetched = subprocess.run([sys.executable, *fetch], capture_output=True, text=True, check=False)
    if fetched.returncode:
        pytest.skip(f"pip could not fetch the sources of {wanted}: {fetched.stderr[-500:]}")
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as sources:
        sources.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.glob("*/json/tests/draft2020-12")
    return folder


@pytest.mark.soak
def test_what_is_kept_of_the_official_suite_is_right(suite: Path) -> None:
    found = examine(suite)
    assert found["kept"] >= KEPT
    assert found["valid right"] + found["invalid right"] >= RIGHT * (found["valid"] + found["invalid"])
    assert found["invalid right"] == found["invalid"], "what must not come never does"
    assert found["drawn right"] == found["drawn"] > 2 * KEPT
