"""Whose the folder for an adapter is: jobs of a machine do not meet in one, and a job that begins anew knows its own.

A file there names the job's own folder, which the daemon removes when the job is over: what is named by then counts no
more.
"""

from __future__ import annotations

from pathlib import Path

from motley.training.errors import TrainingError
from motley.training.files import written_whole
from motley.training.settings import FILE

MARK = "job.txt"
"""In the folder that is claimed."""
ADAPTER = "adapter"


def claim(out: Path, job: Path) -> None:
    """Have `out` for a job, whatever number its worker has; one that has it already may write over what it wrote.

    Args:
        job: the job's own folder on this machine.

    Raises:
        TrainingError: another job has it, there is an adapter or a training of somebody else, or the disk is full.
    """
    if claimed_by(out) == job.resolve():
        return
    check_free(out)
    with written_whole(out / MARK) as partial:
        partial.write_text(str(job.resolve()), encoding="utf-8")


def check_free(out: Path) -> None:
    """
    Raises:
        TrainingError: `out` is a job's that is not over, or there is an adapter or a training.
    """
    if (job := claimed_by(out)) is not None:
        raise TrainingError(f"{out} is for the adapter of job {job.name}: choose another --out, or stop that job")
    if (out / ADAPTER).exists():
        raise TrainingError(f"{out / ADAPTER} exists already: choose another --out")
    if (out / FILE).exists():
        raise TrainingError(f"{out} holds a training of this machine alone: choose another --out")


def unclaim(out: Path) -> None:
    """Forget the latest job that had `out`, which is over."""
    (out / MARK).unlink(missing_ok=True)


def claimed_by(out: Path) -> Path | None:
    """The own folder of the job that has `out`; None: no job, or one that is over."""
    job = last_claimed_by(out)
    return job if job is not None and job.is_dir() else None


def last_claimed_by(out: Path) -> Path | None:
    """As `claimed_by`, also where that job is over."""
    try:
        job = Path((out / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return job if job.is_absolute() else None
