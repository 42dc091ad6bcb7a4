"""Jobs do not meet in a folder for an adapter, and one that begins anew writes over its own alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.training.errors import TrainingError
from motley.training.mesh.claim import check_free, claim, claimed_by
from motley.training.settings import Settings, agree


def test_a_job_has_its_folder_until_it_is_over(tmp_path: Path) -> None:
    out, job, other = tmp_path / "out", tmp_path / "jobs" / "12345678", tmp_path / "jobs" / "87654321"
    job.mkdir(parents=True)
    other.mkdir()
    claim(out, job)
    claim(out, job)
    with pytest.raises(TrainingError, match="is for the adapter of job 12345678"):
        claim(out, other)  # nothing is written yet
    (out / "adapter").mkdir()
    claim(out, job)  # its last word was lost, and it begins anew, perhaps with a worker of another number
    assert claimed_by(out) == job
    job.rmdir()
    assert claimed_by(out) is None
    with pytest.raises(TrainingError, match="adapter exists already"):
        claim(out, other)
    (out / "adapter").rmdir()
    claim(out, other)  # the first was stopped before it had one
    assert claimed_by(out) == other


def test_a_job_and_a_training_of_one_machine_do_not_meet(tmp_path: Path) -> None:
    agree(tmp_path, Settings(), {})
    with pytest.raises(TrainingError, match="a training of this machine alone"):
        check_free(tmp_path)
    (tmp_path / "job" / "adapter").mkdir(parents=True)
    with pytest.raises(TrainingError, match="holds an adapter of another training"):
        agree(tmp_path / "job", Settings(), {})
