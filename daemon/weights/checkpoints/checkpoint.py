"""What is wrong with a checkpoint, told in one error."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from motley.protocol.wording import lines_of


class CheckpointError(Exception):
    """A checkpoint is not what it should be; the message names the file, the tensor and the difference."""


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one error for all problems, a line each, at most `motley.protocol.wording.MAX_PROBLEMS`.

    Raises:
        CheckpointError: there are any.
    """
    if problems:
        raise CheckpointError(lines_of(problems))


def expect_each(shapes: Mapping[str, tuple[int, ...]], expect: Callable[[str, tuple[int, ...]], None]) -> None:
    """Look at every tensor, and raise one error for all that are not as they should be.

    Args:
        shapes: by the tensors' names.
        expect: raises a `CheckpointError` for a tensor that is absent or of another shape.

    Raises:
        CheckpointError: a line for each, at most `motley.protocol.wording.MAX_PROBLEMS`.
    """
    problems = []
    for name, shape in shapes.items():
        try:
            expect(name, shape)
        except CheckpointError as error:
            problems.append(str(error))
    refuse_all(problems)
