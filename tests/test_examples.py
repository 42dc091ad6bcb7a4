"""The examples of README, of docs/ and of `--help` leave a checkout clean."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"motley\s+bench\s[^`\"\n|]*(?:\n[^`\"\n|]+)*")
WRITTEN = re.compile(r"--(?:out|plot|csv)\s+([\w./-]+)|Save this as `([\w.]+)`")


def written() -> set[str]:
    """What those who try the examples in a checkout have there afterwards."""
    pages = [page.read_text("utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    helps = [file.read_text("utf-8") for file in (ROOT / "cli" / "commands").rglob("*.py")]
    commands = [found for page in pages for found in re.findall(r"Save this as `[\w.]+`", page)]
    commands += [command for text in (*pages, *helps) for command in COMMAND.findall(text)]
    return {name.lstrip("./") for command in commands for found in WRITTEN.findall(command) for name in found if name}


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="this is no checkout")
def test_what_examples_write_is_ignored_by_git() -> None:
    names = written()
    assert {"tinyllama", "where.png", "drift.png", "ranks.py"} <= names
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *(f"{name}/" if "." not in name else name for name in names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ignored.returncode in (0, 1), ignored.stderr
    assert {line.rstrip("/") for line in ignored.stdout.splitlines()} == names
