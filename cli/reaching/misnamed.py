"""A model's name that nobody knows: what may have been meant is said first, and the rest is short."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from motley.cli.bundled import bundled, bundled_meant
from motley.cli.errors import CliError
from motley.daemon.weights.hub import ModelNotFound, find_here

MISSING = "model_missing"
"""What an orchestrator answers whose nodes do not have a model."""
_ELSE = "Else give a folder or .gguf file that one of the machines has, or owner/name of a model on huggingface.co."


def check_findable(model: str) -> None:
    """Refuse what this machine alone could not load, before anything begins: it is no model here, no short name and no
    hub id.

    Raises:
        CliError: saying what may have been meant.
    """
    from motley.orchestrator.known_models.names import source_of

    try:
        find_here(source_of(bundled(model)))
    except ModelNotFound as error:
        raise misnamed(model, error) from error


def misnamed(model: str, refusal: Exception, served: Sequence[str] = ()) -> CliError:
    """What to say of a model that no node has: the question what was meant, if anything is called nearly so.

    Args:
        refusal: whose words are long, as there may be other reasons for a path or a hub id.
        served: names of models that are.
    """
    from motley.orchestrator.known_models.names import perhaps_meant

    near = get_close_matches(Path(model).name, served, 1)
    asked = f" Did you mean {near[0]!r}, which is served?" if near else bundled_meant(model) or perhaps_meant(model)
    if not asked:
        return CliError(str(refusal))
    return CliError(f"no model {model!r}.{asked}\n  {refusal if '/' in model else _ELSE}")
