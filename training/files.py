"""Files that are there whole or not at all, checkpoints that survive any death, and a full disk told as such."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from motley.protocol.files import sync_folder
from motley.training.errors import TrainingError

_CHECKPOINT = re.compile(r"step-(\d{8})")
_PARTIAL, _BEFORE = ".partial", ".before"
CURVE = "losses.jsonl"
"""A training's losses, in its folder."""
KEPT = 2
"""Checkpoints that stay: the latest one, and the one before it."""


@contextmanager
def written_whole(place: Path) -> Iterator[Path]:
    """Give a path to write a file or a folder to, which takes the place of `place` when all is on the disk: a file at
    once; of a folder, a death between two renames leaves the one before beside it, its name with `.before`.

    Raises:
        TrainingError: the disk is full or cannot be written; what was at `place` is as it was.
    """
    partial, before = (place.with_name(place.name + end) for end in (_PARTIAL, _BEFORE))
    try:
        _remove(partial)
        place.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        for file in [partial, *partial.rglob("*")]:
            if file.is_file():
                with file.open("rb+") as opened:
                    os.fsync(opened.fileno())
        if place.is_dir():  # nothing can be renamed to a folder that has files
            _remove(before)
            os.replace(place, before)
        os.replace(partial, place)
        sync_folder(place.parent)
        _remove(before)
    except OSError as error:
        if before.is_dir() and not place.exists():
            os.replace(before, place)
        shutil.rmtree(partial, ignore_errors=True)
        partial.unlink(missing_ok=True)
        raise cannot_write(place, error) from error


def cannot_write(place: Path, error: OSError) -> TrainingError:
    """The error for a file that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TrainingError(
            f"{place}: the disk is full. What was written before is safe: make room, and give the same command again"
        )
    return TrainingError(f"{place}: cannot be written: {error.strerror or error}")


def _remove(place: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


class Checkpoints:
    """The checkpoints in a training's folder, a folder each, named by the steps that were done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """Keep what was reached after `step` steps, and remove what is older than the `KEPT` latest.

        Args:
            write: fills an empty folder.

        Raises:
            TrainingError: the disk is full or cannot be written; earlier checkpoints are as they were.
        """
        with written_whole(self._folder / f"step-{step:08}") as partial:
            partial.mkdir()
            write(partial)
        for _, old in self._all()[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def latest(self) -> tuple[int, Path] | None:
        """The steps that were done at the latest checkpoint, and its folder; None: there is none."""
        return next(reversed(self._all()), None)

    def _all(self) -> list[tuple[int, Path]]:
        if not self._folder.is_dir():
            return []
        found = [(_CHECKPOINT.fullmatch(place.name), place) for place in self._folder.iterdir()]
        return sorted((int(match[1]), place) for match, place in found if match)


@dataclass(frozen=True)
class Point:
    """What is known after a step.

    Attributes:
        step: how many steps were done, from 1 on; 0: before the first one.
        loss: the mean over the tokens learnt in this step, in nats; None before the first step.
        held_out: the same over the examples that are not learnt, where they were evaluated after this step.
        tokens: that were read in this step.
    """

    step: int
    loss: float | None = None
    rate: float = 0.0
    held_out: float | None = None
    tokens: int = 0


class Curve:
    """The losses of a training, a line of JSON for each step, which grows while it goes on."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> list[Point]:
        """All points so far; a line that was being written when its process died is left out."""
        points = []
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        for line in lines:
            try:
                points.append(Point(**json.loads(line)))
            except (ValueError, TypeError):
                break
        return points

    def go_back_to(self, step: int) -> list[Point]:
        """Forget what came after a step, which will come again; returns what is left.

        Raises:
            TrainingError: the file cannot be written.
        """
        points = [point for point in self.read() if point.step <= step]
        self.write(points)
        return points

    def write(self, points: Sequence[Point]) -> None:
        """Have these points, and no others.

        Raises:
            TrainingError: the file cannot be written.
        """
        with written_whole(self._file) as partial:
            partial.write_text("".join(f"{json.dumps(asdict(point))}\n" for point in points), encoding="utf-8")

    def add(self, point: Point) -> None:
        """Write down a point.

        Raises:
            TrainingError: the disk is full or cannot be written.
        """
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(asdict(point))}\n")
        except OSError as error:
            raise cannot_write(self._file, error) from error
