"""The command starts without what only some of its commands need: it is typed often, and completed by shells."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("numpy", "onnx", "onnxruntime", "grpc", "aiohttp", "sqlalchemy", "cryptography", "pydantic")


def test_all_commands_are_known_without_heavy_libraries() -> None:
    asked = f"import sys, motley.cli.app; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
