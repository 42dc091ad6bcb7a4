"""What can be wrong with a training, told in one error, and whether what it needs is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from motley.protocol.installing import how_to_install
from motley.protocol.wording import lines_of


class TrainingError(Exception):
    """A training cannot begin or go on; the message says what is wrong, where, and what to do."""


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one error for all problems, a line each, at most `motley.protocol.wording.MAX_PROBLEMS`.

    Raises:
        TrainingError: there are any.
    """
    if problems:
        raise TrainingError(lines_of(problems))


def require_extra(*packages: str) -> None:
    """Find out whether packages of the extra ``train`` are installed, before anything that needs them is begun.

    Raises:
        TrainingError: one is missing; the message says how to install it.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise TrainingError(f"training needs {', '.join(missing)}: {how_to_install('train')}")


def import_extra(*packages: str) -> None:
    """Import packages of the extra ``train``, before anything else does, which takes seconds.

    Raises:
        TrainingError: one is missing, as `require_extra`, or cannot be imported; the message says why.
    """
    require_extra(*packages)
    for name in packages:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:  # the latter: of a library that it loads
            again = f"{how_to_install('train')} --force-reinstall"
            raise TrainingError(f"{name} is installed, but cannot be imported ({error}): {again}") from error
