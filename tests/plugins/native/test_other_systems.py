"""What the C libraries export compiles for other systems. `make wheels` builds all of it, which takes minutes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = [file for room in ("native/kernels", "nccl") for file in sorted((ROOT / "plugins" / room).glob("*.c"))]
EXPORTING = [file for file in SOURCES if "\nEXPORT " in file.read_text("utf-8")]
"""The others are the same kernels for each kind of processor, which take a compiler long."""
FLAGS = ("-O0", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=undefined", "-c")


@pytest.mark.parametrize("target", ["x86_64-windows-gnu", "aarch64-linux-gnu.2.17"])
def test_no_compiler_for_another_system_complains(target: str, tmp_path: Path) -> None:
    for source in EXPORTING:
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", target, *FLAGS]
        subprocess.run([*compiler, str(source), "-o", str(tmp_path / "made.o")], check=True)
