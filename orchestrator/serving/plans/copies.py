"""The copies of a model that nodes have: who has none, and whose is another than the others'. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from motley.orchestrator.known_models.names import perhaps_meant
from motley.orchestrator.serving.errors import refusal
from motley.protocol.mesh_pb2 import Described

MISSING = "model_missing"
"""The code of a node's failure to find a model."""

Copies = Mapping[str, Described]
"""By the name of a node that has answered, what it says of its copy: a fingerprint or a failure, or nothing where it
would have to fetch the model."""


def is_missing(copies: Copies, name: str, fingerprint: str) -> bool:
    """Whether a node has said that it has no files of a model, or that it would have to fetch these from the hub."""
    if name not in copies:
        return False
    own = copies[name]
    return own.failure.code == MISSING or (own.from_hub and own.profile.fingerprint != fingerprint)


def has_files(copies: Copies, name: str, fingerprint: str) -> bool:
    """Whether a node has said that it has exactly these files of a model."""
    return name in copies and copies[name].profile.fingerprint == fingerprint


def check_copies(model: str, copies: Copies, nodes: Iterable[str]) -> None:
    """Make sure that nodes have a model, and the same files.

    Args:
        model: what it was asked for by.
        nodes: names of those that take part.

    Raises:
        ServingError: all nodes that lack it are named, or those whose files are others than most have.
    """
    said = {name: copies[name] for name in nodes if name in copies}
    failures = {name: own.failure for name, own in said.items() if own.HasField("failure")}
    by_files: defaultdict[str, list[str]] = defaultdict(list)
    for name, own in said.items():
        if own.profile.fingerprint and not own.from_hub:  # else it fetches the same as the others
            by_files[own.profile.fingerprint].append(name)
    having = [name for names in by_files.values() for name in names]
    lacking = [name for name, failure in failures.items() if failure.code == MISSING]
    if lacking and len(said) > 1:
        verb = "has" if len(lacking) == 1 else "have"
        by_words: defaultdict[str, list[str]] = defaultdict(list)
        for name in lacking:
            by_words[failures[name].message].append(name)
        told = "".join(f"\n  {', '.join(names)}: {words}" for words, names in by_words.items())
        only = f" Or use only nodes that have it: `--nodes {','.join(having)}`." if having else ""
        raise refusal(
            MISSING,
            f"{_nodes(lacking)} {verb} no model {model!r}.{perhaps_meant(model)} Put it there, at this path or in the"
            f" folder that `motley join --models FOLDER` is told there.{only}{told}",
            "model",
        )
    for name, failure in failures.items():
        meant = perhaps_meant(model) if failure.code == MISSING else ""
        told = f"node {name!r}: {failure.message}" + (f".{meant}" if meant else "")
        raise refusal(failure.code or "unsupported_model", told, "model")
    if len(by_files) > 1:
        most, *others = sorted(by_files.values(), key=len, reverse=True)
        if len(most) > len(others[0]):
            odd = [name for names in others for name in names]
            verb, rest = "has" if len(odd) == 1 else "have", _nodes(most)
            what = f"{_nodes(odd)} {verb} other files of {model!r} than {rest}"
        else:
            what = f"{' and '.join(_nodes(names) for names in by_files.values())} have different files of {model!r}"
        told = "".join(f"\n  {', '.join(names)}: {files[:12]}" for files, names in by_files.items())
        raise refusal("models_differ", f"{what}; give every node the same. Their fingerprints:{told}", "model")


def _nodes(names: Sequence[str]) -> str:
    *first, last = map(repr, names)
    return f"nodes {', '.join(first)} and {last}" if first else f"node {last}"
