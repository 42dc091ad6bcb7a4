from __future__ import annotations

import errno
import re
from pathlib import Path

import numpy as np
import pytest

from motley.protocol.installing import how_to_install
from motley.training.errors import TrainingError, require_extra
from motley.training.files import Checkpoints, Curve, Point, written_whole
from motley.training.settings import Settings, agree, rate_at
from motley.training.tensors import write_tensors
from motley.training.training import config_digest


def test_models_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    digests = set()
    for value in (0.0, 1.0):
        folder = tmp_path / str(value)
        folder.mkdir()
        with pytest.raises(TrainingError, match="no weights"):
            config_digest(folder)
        write_tensors(folder / "model.safetensors", {"weight": np.full((4, 4), value, np.float32)})
        with pytest.raises(TrainingError, match=r"config\.json: cannot be read"):
            config_digest(folder)
        (folder / "config.json").write_text("{}")
        digests.add(config_digest(folder))
    assert len(digests) == 2


def test_the_two_latest_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None
    for step in (5, 10, 100):
        checkpoints.save(step, lambda folder, step=step: (folder / "state").write_text(str(step)))
    assert [place.name for place in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000010", "step-00000100"]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[0] == 100
    assert (latest[1] / "state").read_text() == "100"


def test_a_checkpoint_that_was_being_written_at_a_death_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, lambda folder: (folder / "state").write_text("whole"))
    half = tmp_path / "step-00000010.partial"
    half.mkdir()
    (half / "state").write_text("ha")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[0] == 5
    checkpoints.save(10, lambda folder: (folder / "state").write_text("whole"))
    assert not half.exists()


def test_a_full_disk_leaves_what_was_safe(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, lambda folder: (folder / "state").write_text("whole"))

    def overflow(folder: Path) -> None:
        (folder / "state").write_text("ha")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(TrainingError, match="the disk is full"):
        checkpoints.save(10, overflow)
    assert [place.name for place in tmp_path.iterdir()] == ["step-00000005"]


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("before")

    def die() -> None:
        with written_whole(file) as partial:
            partial.write_text("after")
            raise ValueError("died")

    with pytest.raises(ValueError, match="died"):
        die()
    assert file.read_text() == "before"
    with written_whole(file) as partial:
        partial.write_text("after")
        assert file.read_text() == "before"
    assert file.read_text() == "after"


def test_the_curve_goes_back_to_a_checkpoint_and_forgets_half_a_line(tmp_path: Path) -> None:
    curve = Curve(tmp_path / "losses.jsonl")
    points = [Point(0, held_out=3.0), Point(1, 2.9, 1e-4), Point(2, 2.8, 1e-4), Point(3, 2.7, 1e-4)]
    for point in points:
        curve.add(point)
    with (tmp_path / "losses.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert curve.read() == points
    assert curve.go_back_to(2) == points[:3]
    curve.add(points[3])
    assert curve.read() == points


def test_the_rate_rises_and_falls() -> None:
    settings = Settings(steps=110, warm_up=10, rate=1.0)
    rates = [rate_at(step, settings) for step in range(110)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 1e-3
    assert rate_at(0, Settings(steps=1, warm_up=0, rate=1.0)) == 1.0


def test_a_folder_holds_one_training(tmp_path: Path) -> None:
    agree(tmp_path / "out", Settings(targets=("q_proj",)), {"data": "abc"})
    agree(tmp_path / "out", Settings(targets=("q_proj",)), {"data": "abc"})
    with pytest.raises(TrainingError, match="differs in data, rate;"):
        agree(tmp_path / "out", Settings(targets=("q_proj",), rate=1.0), {"data": "abd"})


def test_what_to_install_is_said() -> None:
    require_extra("json")
    with pytest.raises(TrainingError, match=re.escape(f"needs no_such_package: {how_to_install('train')}")):
        require_extra("json", "no_such_package")
