"""Where a model's files are: a local folder, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path, PurePath

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)

_NEEDED = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "*.safetensors",
    "model.safetensors.index.json",
]
_DUPLICATES = ["*/*", "consolidated*"]
"""The same weights once more, in another layout (``original/``, ``onnx/``, ``consolidated.safetensors``)."""


class ModelNotFound(Exception):
    """No such model, or it cannot be fetched; the message says what was tried and what to do."""


def resolve(source: str, models_dir: Path | None = None, *, offline: bool = False) -> Path:
    """Find the folder of a model, fetching it (only the files Motley needs) if it is not here yet.

    Args:
        source: a folder (absolute, or relative to the working directory), the name of a folder in `models_dir`, or
            a hub id ``owner/name`` or ``owner/name@revision``; the first that fits, in this order.
        offline: use only what earlier runs have fetched from the hub.

    Raises:
        ModelNotFound: nothing fits, or the hub refuses or cannot be reached.
    """
    tried = [Path(source)] if source else []
    if source and models_dir is not None and _stays_inside(source):
        tried.append(models_dir / source)
    if source.startswith(("//", "\\\\")):
        raise ModelNotFound(f"{source!r} is a network path, which would make this machine log in there; mount it first")
    for folder in tried:
        try:
            if folder.is_dir():
                return _checked(folder.absolute())
        except OSError as error:
            raise ModelNotFound(f"{source[:200]!r} is no path: {error.strerror}") from error
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id:
        return _checked(_from_hub(hub_id["repo"], hub_id["revision"], offline))
    places = " or ".join(str(folder.absolute()) for folder in tried) or "an empty name"
    raise ModelNotFound(
        f"no model {source!r}: there is no folder {places}, and it is not a hub id; "
        "give a folder with config.json and *.safetensors, or owner/name of a model on huggingface.co"
    )


def fetched_bytes(source: str) -> int:
    """Bytes of a hub model that are here, those of a download under way included; 0 if `source` is no hub id."""
    hub_id = _HUB_ID.fullmatch(source)
    if not hub_id:
        return 0
    from huggingface_hub.constants import HF_HUB_CACHE

    blobs = Path(HF_HUB_CACHE) / f"models--{hub_id['repo'].replace('/', '--')}" / "blobs"
    total = 0
    for file in blobs.glob("*"):
        with contextlib.suppress(OSError):  # finished or given up meanwhile
            total += file.stat().st_size
    return total


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} is not a model: it has no config.json")
    return folder


def _stays_inside(name: str) -> bool:
    """Whether a path cannot lead out of the folder it is joined to (symbolic links are the owner's wish)."""
    path = PurePath(name)
    return not path.anchor and not path.drive and ".." not in path.parts


def _from_hub(repo: str, revision: str | None, offline: bool) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    model = f"{repo}@{revision}" if revision else repo
    try:
        folder = snapshot_download(
            repo, revision=revision, allow_patterns=_NEEDED, ignore_patterns=_DUPLICATES, local_files_only=offline
        )
    except hub.GatedRepoError as error:
        raise ModelNotFound(
            f"{model} is gated: accept its terms on https://huggingface.co/{repo}, then run `hf auth login`"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise ModelNotFound(f"{repo} has no revision {revision!r} on huggingface.co") from error
    except hub.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{repo} is neither a folder here nor a model on huggingface.co; "
            "check the name, and if it is private run `hf auth login`"
        ) from error
    except hub.HFValidationError as error:
        raise ModelNotFound(f"{model} is neither a folder here nor a valid hub id: {error}") from error
    except hub.LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{model} has not been fetched yet and "
            + ("the hub may not be used" if offline else "huggingface.co cannot be reached")
            + "; check the connection, or give a folder with the model"
        ) from error
    except Exception as error:  # each version of huggingface_hub lets another HTTP library's errors through
        raise ModelNotFound(
            f"fetching {model} from huggingface.co failed ({type(error).__name__}: {error}); "
            "try again (what has been fetched is kept), or give a folder with the model"
        ) from error
    return Path(folder)
