"""Imports point down, between the parts and between the rooms of the daemon: the tables in ARCHITECTURE.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
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

ROOMS = {
    "machine": set[str](),
    "pipe": set[str](),
    "weights": set[str](),
    "sampling": set[str](),
    "text": {"sampling", "weights"},
    "models": {"text", "weights"},
    "loading": {"models", "weights"},
    "experts": {"loading", "machine", "models", "pipe", "weights"},
    "rank": {"experts", "loading", "machine", "models", "pipe", "sampling", "weights"},
    "worker": {"experts", "loading", "machine", "models", "pipe", "rank", "sampling", "weights"},
    "node": {"loading", "machine", "models", "pipe", "text", "weights"},
}
"""Of the daemon. The node starts worker processes by their module's name."""


def imported(file: Path) -> Iterator[list[str]]:
    """The packages of ours that a file imports, wherever in it, as parts of their names."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("motley."):
                yield name.split(".")[1:]


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    upward = {
        f"{file.relative_to(ROOT)} imports motley.{other}"
        for file in files
        for other, *_ in imported(file)
        if other not in ALLOWED[package] | {package}
    }
    assert not upward


def test_every_package_is_in_the_table() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == EVERYTHING


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_imports_point_down_in_the_daemon(room: str) -> None:
    files = list((ROOT / "daemon" / room).rglob("*.py"))
    assert files
    upward = {
        f"{file.relative_to(ROOT)} imports motley.daemon.{other[1]}"
        for file in files
        for other in imported(file)
        if other[0] == "daemon" and other[1] not in ROOMS[room] | {room}
    }
    assert not upward


def test_every_room_is_in_the_table_and_they_have_an_order() -> None:
    assert {path.parent.name for path in (ROOT / "daemon").glob("*/__init__.py")} == set(ROOMS)
    TopologicalSorter(ROOMS).prepare()  # raises where rooms import each other in a circle
