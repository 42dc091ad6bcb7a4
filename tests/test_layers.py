"""Imports point down: the table in ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYTHING = {"bench", "cli", "daemon", "orchestrator", "plugins", "protocol", "transport"}
ALLOWED = {  # by package, what its files may import: whole packages, or single modules of one
    "transport": set[str](),
    "plugins": {"transport"},
    "protocol": set[str](),
    "daemon": {"plugins", "transport", "protocol"},
    "orchestrator": {"protocol", "transport.certificates"},
    "cli": EVERYTHING,
    "bench": EVERYTHING - {"cli"},
}


def imported(file: Path) -> Iterator[str]:
    """The modules of ours (or what is in them) that a file imports, wherever in it, by names as in `ALLOWED`."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("motley."):
                yield name.removeprefix("motley.")


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    upward = {
        f"{file.relative_to(ROOT)} imports motley.{other}"
        for file in files
        for other in imported(file)
        if not any(f"{other}.".startswith(f"{allowed}.") for allowed in ALLOWED[package] | {package})
    }
    assert not upward


def test_every_package_is_in_the_table() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == EVERYTHING
