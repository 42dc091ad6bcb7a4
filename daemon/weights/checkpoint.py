"""What is wrong with a checkpoint, told in one error."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PROBLEMS = 8
"""Of a checkpoint that does not fit its config, as many are named."""


class CheckpointError(Exception):
    """A checkpoint is not what it should be; the message names the file, the tensor and the difference."""


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one error for all problems, a line each, at most `MAX_PROBLEMS`.

    Raises:
        CheckpointError: there are any.
    """
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise CheckpointError("\n".join([*problems[:MAX_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])]))
