"""Processes of their own for what is to be shown another GPU, or has a Vulkan layer: a process opens one GPU, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from motley.plugins.onnxruntime_gpu.preference import SOFTWARE
from tests.software_gpu import fp16_driver


def said_by_process(module: str, function: str, *arguments: Any, **environment: str) -> Any:
    """What a function returns in a new process, as JSON has it."""
    asked = ", ".join(map(repr, arguments))
    code = f"import json; import {module} as here; print(json.dumps(here.{function}({asked})))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, SOFTWARE: "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout.splitlines()[-1])


def said_in_fp16(module: str, function: str, *arguments: Any) -> Any:
    """The same of a process whose GPU has FP16. Where no driver has, the test is skipped; in CI it fails."""
    driver = fp16_driver()
    if isinstance(driver, str):
        if "CI" in os.environ and sys.platform == "linux":
            pytest.fail(driver)
        pytest.skip(driver)
    return said_by_process(module, function, *arguments, **driver)
