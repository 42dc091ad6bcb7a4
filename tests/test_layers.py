"""Imports point down: between the parts, and between the rooms of a part. ARCHITECTURE.md shows them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EVERYTHING = {"bench", "cli", "daemon", "orchestrator", "plugins", "protocol", "training", "transport"}
ALLOWED = {  # by package, what its files may import: whole packages, or single modules of one
    "transport": {"protocol.clock", "protocol.installing"},
    "plugins": {"protocol.installing", "transport"},
    "protocol": set[str](),
    "daemon": {"plugins", "transport", "protocol"},
    "orchestrator": {"protocol", "transport.certificates", "transport.schedules"},
    "training": {"transport", "protocol", "daemon.weights"},
    "cli": EVERYTHING,
    "bench": EVERYTHING - {"cli"},
}

DAEMON = {
    "machine": set[str](),
    "pipe": set[str](),
    "weights": {"machine"},
    "sampling": set[str](),
    "text": {"sampling", "weights"},
    "models": {"text", "weights"},
    "adapters": {"models", "weights"},
    "lending": {"machine", "weights"},
    "loading": {"lending", "models", "weights"},
    "experts": {"adapters", "loading", "machine", "models", "pipe", "weights"},
    "caches": {"pipe"},
    "rank": {"adapters", "caches", "experts", "loading", "machine", "models", "pipe", "sampling", "weights"},
    "worker": {"caches", "experts", "lending", "loading", "machine", "models", "pipe", "rank", "sampling", "weights"},
    "lease": {"machine"},
    "node": {"lease", "lending", "loading", "machine", "models", "pipe", "text", "weights"},
}
"""The node starts worker processes by their module's name."""

TEXT = {
    "calls": set[str](),
    "responses": {"calls"},
}

MODELS = {
    "description": set[str](),
    "blocks": {"description"},
    "families": {"blocks", "description"},
    "gguf": {"blocks", "description", "families"},
    "cutting": {"description"},
    "graph": {"cutting", "description"},
}

BLOCKS = {
    "attending": set[str](),
    "residuals": set[str](),
    "recurrent": {"attending"},
}

FAMILIES = {
    "dense": set[str](),
    "experts": {"dense"},
    "latent": {"experts"},
    "recurrent": {"experts"},
}

BENCH = {
    "random_models": set[str](),
    "meshes": set[str](),
    "measurements": {"meshes", "random_models"},
    "reports": {"measurements", "meshes", "random_models"},
}

MEASUREMENTS = {
    "accuracy": set[str](),
    "serving": set[str](),
    "speed": set[str](),
    "training": set[str](),
    "gpu": {"speed"},
}

ROOMS = {
    "daemon": DAEMON,
    "daemon/text": TEXT,
    "daemon/models": MODELS,
    "daemon/models/blocks": BLOCKS,
    "daemon/models/families": FAMILIES,
    "bench": BENCH,
    "bench/measurements": MEASUREMENTS,
}
"""By folder and by room, which other rooms of the folder it may import, beside the files on top of them."""

ORCHESTRATOR = (
    {"docstrings"},
    {"session_request", "mesh", "trust", "store", "adapters", "traces", "usual_sampling", "known_models"},
    {"planning"},
    {"workers"},
    {"experts"},
    {"sessions"},
    {"control", "serving", "jobs"},
    {"api"},
    {"app"},
)
"""Rooms and files by floor: descriptions, pure decisions and state tables below, shells that carry messages above."""


def imported(file: Path) -> Iterator[str]:
    """What a file imports of ours, wherever in it: modules or what is in them, by names as in `ALLOWED`."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.startswith("motley."):
                yield name.removeprefix("motley.")


def outside(files: list[Path], allowed: set[str]) -> set[str]:
    """The imports of some files that are not among what is allowed: packages, rooms or modules."""
    assert files
    return {
        f"{file.relative_to(ROOT)} imports motley.{name}"
        for file in files
        for name in imported(file)
        if not any(f"{name}.".startswith(f"{own}.") for own in allowed)
    }


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package: str) -> None:
    assert not outside(list((ROOT / package).rglob("*.py")), ALLOWED[package] | {package})


@pytest.mark.parametrize(("folder", "room"), [(folder, room) for folder, rooms in ROOMS.items() for room in rooms])
def test_imports_point_down_between_rooms(folder: str, room: str) -> None:
    package, top = folder.replace("/", "."), ROOT / folder
    shared = {file.stem for file in top.glob("*.py")}
    others = {each.parent.name for each in top.glob("*/__init__.py")} - ROOMS[folder][room] - {room} - shared
    files = list((top / room).rglob("*.py"))
    assert files
    assert not {
        f"{file.relative_to(ROOT)} imports motley.{name}"
        for file in files
        for name in imported(file)
        if any(f"{name}.".startswith(f"{package}.{other}.") for other in others)
    }


@pytest.mark.parametrize("floor", range(len(ORCHESTRATOR)))
def test_imports_point_down_in_the_orchestrator(floor: int) -> None:
    below = {f"orchestrator.{own}" for own in set[str]().union(*ORCHESTRATOR[: floor + 1])}
    rooms = [ROOT / "orchestrator" / name for name in ORCHESTRATOR[floor]]
    files = [file for room in rooms for file in (*room.rglob("*.py"), *room.parent.glob(f"{room.name}.py"))]
    assert len(files) >= len(rooms)
    assert not outside(files, below | EVERYTHING - {"orchestrator"})


def test_every_package_and_every_room_is_in_the_tables() -> None:
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == EVERYTHING
    assert {path.name for path in (ROOT / "bench").glob("*.py")} == {"__init__.py"}
    for folder, rooms in ROOMS.items():
        assert {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")} == set(rooms)
        TopologicalSorter(rooms).prepare()  # raises where rooms import each other in a circle
    floors = {path.stem for path in (ROOT / "orchestrator").glob("*.py")} - {"__init__"}
    floors |= {path.parent.name for path in (ROOT / "orchestrator").glob("*/__init__.py")}
    assert floors == set[str]().union(*ORCHESTRATOR)
