"""Imports point down: the table in ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYTHING = {"bench", "cli", "daemon", "orchestrator", "plugins", "protocol", "transport"}
ALLOWED = {
    "transport": set[str](),
    "plugins": {"transport"},
    "protocol": set[str](),
    "daemon": {"plugins", "transport", "protocol"},
    "orchestrator": {"protocol"},
    "cli": EVERYTHING,
    "bench": EVERYTHING - {"cli"},
}


def modules(file: Path) -> Iterator[list[str]]:
    """What a file imports of ours, wherever in it: ``["motley", package, ...]``."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("motley."):
                yield name.split(".")


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    upward = {
        f"{file.relative_to(ROOT)} imports motley.{other}"
        for file in files
        for _, other, *_ in modules(file)
        if other not in ALLOWED[package] | {package}
    }
    assert not upward


ORCHESTRATOR = (
    {"session_request", "nodes", "identity", "certificates"},
    {"planning"},
    {"workers"},
    {"experts"},
    {"assignments", "sessions", "session_table"},
    {"control", "serving"},
    {"api"},
    {"app"},
)
"""Its rooms and files: descriptions, pure decisions and state tables below, shells that carry messages above."""


@pytest.mark.parametrize("floor", range(len(ORCHESTRATOR)))
def test_imports_in_the_orchestrator_point_down(floor: int) -> None:
    below = set[str]().union(*ORCHESTRATOR[: floor + 1])
    rooms = [ROOT / "orchestrator" / name for name in ORCHESTRATOR[floor]]
    files = [file for room in rooms for file in (*room.rglob("*.py"), *room.parent.glob(f"{room.name}.py"))]
    assert len(files) >= len(ORCHESTRATOR[floor])
    upward = {
        f"{file.relative_to(ROOT)} imports motley.orchestrator.{own}"
        for file in files
        for _, package, own, *_ in modules(file)
        if package == "orchestrator" and own not in below
    }
    assert not upward


def test_every_room_of_the_orchestrator_has_a_floor() -> None:
    rooms = {path.stem for path in (ROOT / "orchestrator").glob("*.py")} - {"__init__"}
    rooms |= {path.parent.name for path in (ROOT / "orchestrator").glob("*/__init__.py")}
    assert rooms == set[str]().union(*ORCHESTRATOR)


def test_every_package_is_in_the_table() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == EVERYTHING
