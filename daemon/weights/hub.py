"""Where a model's files are: a local folder or GGUF file, or the Hugging Face hub."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

_HUB_ID = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>([\w-][\w.-]*/)*[\w-][\w.-]*\.gguf))?", re.ASCII
)
_PATH = re.compile(r"[.~/\\]|[A-Za-z]:[/\\]|[^@:]*\\|[^@:/]*/[^@:/]*/")
"""A source that begins like this is a place on a disk, and not meant for the hub."""
_FIRST_PART = "-00001-of-"
"""What is in the name of the first part of a split GGUF file, which stands for all (``name-00001-of-00003.gguf``)."""
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf", re.ASCII)

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
"""The same weights in another layout, where repositories have one: ``original/``, ``onnx/`` and the like."""

_ANSWER_S = 60.0
"""The hub has so many seconds to say something of a file, or to go on with a part of it."""
_AGAIN = 3
"""A part of a file that does not come is asked for again so often."""
_PARTIAL_CONTENT = 206

A_MODEL = (
    "a folder with config.json and *.safetensors, a file.gguf, or owner/name or owner/name:file.gguf of a model on"
    " huggingface.co"
)


class ModelNotFound(Exception):
    """No such model, or it cannot be fetched; the message says what was tried and what to do."""


class PublishedFile(NamedTuple):
    """A file of a hub model: its name, its bytes, and whether it is here."""

    name: str
    size: int
    here: bool


class RemoteFile(NamedTuple):
    """A file of a hub model as `range_of` reads it.

    Attributes:
        etag: another one, another content.
        url: of exactly this content, whatever is published later.
    """

    name: str
    size: int
    etag: str
    url: str


def resolve(source: str, models_dir: Path | None = None) -> Path:
    """Find a model, fetching it (only the files Motley needs) if it is not here yet.

    Args:
        source: a folder or GGUF file (absolute, or relative to the working directory), the name of one in `models_dir`,
            or a hub id ``owner/name``, ``owner/name@revision``, ``owner/name:file.gguf`` or
            ``owner/name@revision:file.gguf``; the first that fits, in this order.

    Returns:
        A folder in Hugging Face's layout, or a GGUF file (the first, if the model is split over several).

    Raises:
        ModelNotFound: nothing fits, or the hub refuses or cannot be reached.
    """
    if place := find_here(source, models_dir):
        return place
    hub_id = _HUB_ID.fullmatch(source)
    assert hub_id is not None
    if hub_id["file"]:
        file = _from_hub(hub_id["repo"], hub_id["revision"], [_all_parts(hub_id["file"])]) / hub_id["file"]
        if not file.is_file():
            raise ModelNotFound(f"{hub_id['repo']} has no file {hub_id['file']}")
        return file
    return _checked(_from_hub(hub_id["repo"], hub_id["revision"], _NEEDED))


def find_here(source: str, models_dir: Path | None = None) -> Path | None:
    """Find a model as `resolve` does, but for the hub: None where that is to be asked.

    Raises:
        ModelNotFound: it is not here, and `source` is no hub id.
    """
    tried = [Path(source)] if source else []
    if source and models_dir is not None and stays_inside(source):
        tried.append(models_dir / source)
    if is_network_path(source):
        raise ModelNotFound(f"{source!r} is a network path, which would make this machine log in there; mount it first")
    for place in tried:
        try:
            if place.is_dir():
                return _checked(place.absolute())
            if place.is_file() and place.suffix == ".gguf":
                return place.absolute()
        except OSError as error:
            what = "cannot be read" if isinstance(error, PermissionError) else "is no path"
            raise ModelNotFound(f"{source[:200]!r} {what}: {error.strerror}") from error
    for place in tried:
        if place.is_file():
            raise ModelNotFound(no_model(place))
    if _PATH.match(source):
        places = " or ".join(str(place.absolute()) for place in tried)
        raise ModelNotFound(
            f"no model {source!r}: there is no folder or GGUF file {places}; give the path of one on any node, or"
            " owner/name of a model on huggingface.co"
        )
    if _HUB_ID.fullmatch(source):
        return None
    places = " or ".join(str(place.absolute()) for place in tried) or "an empty name"
    raise ModelNotFound(
        f"no model {source!r}: there is no folder or GGUF file {places}, and it is not a hub id; give {A_MODEL}"
    )


def is_hub_id(source: str) -> bool:
    """Whether a source may be one on the hub, and is no path."""
    return not _PATH.match(source) and _HUB_ID.fullmatch(source) is not None


def fetch(hub_id: str, files: list[str]) -> Path:
    """Fetch some files from the hub, as far as there are any and they are not here.

    Args:
        hub_id: as `resolve` has it; one that names a GGUF file is that alone.

    Returns:
        The folder with the files, or the GGUF file.

    Raises:
        ModelNotFound: it is no hub id; the hub has no such thing, refuses, or cannot be reached.
    """
    found = _HUB_ID.fullmatch(hub_id)
    if found is None:
        raise ModelNotFound(f"{hub_id!r} is no hub id; give owner/name or owner/name:file.gguf")
    place = _from_hub(found["repo"], found["revision"], [found["file"]] if found["file"] else files)
    return place / (found["file"] or "")


def find_fetched(source: str) -> Path | None:
    """Find a hub model that has been fetched, without asking the hub whether there is a newer one.

    Returns:
        as `resolve`; None: it has not, or not all of it, or `source` is no hub id.
    """
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id["repo"], revision=hub_id["revision"], local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    place = folder / (hub_id["file"] or "")
    if _FIRST_PART in place.name:
        parts = int(place.stem.rpartition("-")[2])
        return place if len(files_of(place)) == parts else None
    if hub_id["file"]:
        return place if place.is_file() else None
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, ModelNotFound):
        place = _checked(folder)
        wanted = {"model.safetensors"} if place == folder else set()
        if (index := folder / "model.safetensors.index.json").is_file():  # it names the weights' files: several
            wanted = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        if all((folder / name).is_file() for name in wanted):
            return place
    return None


def published(source: str) -> list[PublishedFile]:
    """The files of a hub model that would be fetched, without fetching any.

    Raises:
        ModelNotFound: `source` is no hub id, the hub refuses or cannot be reached, or has no such files.
    """
    hub_id = _HUB_ID.fullmatch(source)
    if hub_id is None:
        raise ModelNotFound(f"{source!r} is no model of the hub, which are called owner/name or owner/name:file.gguf")
    repo, revision = hub_id["repo"], hub_id["revision"]
    files = _listed(repo, revision, [_all_parts(hub_id["file"])] if hub_id["file"] else _NEEDED)
    names = {each.name for each in files}
    if hub_id["file"] and not files:
        raise ModelNotFound(f"{repo} has no file {hub_id['file']}")
    if not hub_id["file"] and "config.json" not in names:
        ggufs = _listed(repo, revision, ["*.gguf"])
        choice = [f"{repo}:{each.name}" for each in ggufs if not _LATER_PART.search(each.name)]
        what = f"several models: give one of {', '.join(choice)}" if choice else "no config.json and no GGUF file"
        raise ModelNotFound(f"{repo} has {what}")
    return files


def remote_files(source: str) -> list[RemoteFile]:
    """The files of a hub model that `resolve` would fetch, to be read in part; errors as `published`."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    hub_id = _HUB_ID.fullmatch(source)
    names = [each.name for each in published(source)]
    assert hub_id is not None
    repo, revision, found = hub_id["repo"], hub_id["revision"], []
    with _told(repo, revision):
        for name in names:
            told = get_hf_file_metadata(hf_hub_url(repo, name, revision=revision), timeout=_ANSWER_S)
            if told.size is None or not told.etag or not told.commit_hash:
                raise OSError(f"it does not tell the size, etag and commit of {name}")
            revision = told.commit_hash  # all files are of one, though another may be published meanwhile
            found.append(RemoteFile(name, told.size, told.etag, hf_hub_url(repo, name, revision=revision)))
    return found


def range_of(url: str, offset: int, length: int) -> bytes:
    """Some bytes of a file of the hub.

    Args:
        url: as `remote_files` has it.

    Raises:
        ModelNotFound: the hub refuses, cannot be reached, or answers with something else.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, though not in its __all__
        build_hf_headers,
        hf_raise_for_status,
        http_backoff,
    )

    asked = {**build_hf_headers(), "Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
    try:
        response = http_backoff("GET", url, headers=asked, timeout=_ANSWER_S, max_retries=_AGAIN)
        hf_raise_for_status(response)
    except Exception as error:  # each version of huggingface_hub lets another HTTP library's errors through
        raise ModelNotFound(
            f"{url} cannot be read ({type(error).__name__}: {error}); try again (what has been fetched is kept)"
        ) from error
    if response.status_code != _PARTIAL_CONTENT or len(response.content) != length:
        raise ModelNotFound(
            f"{url} answers with status {response.status_code} and {len(response.content)} bytes where {length} were"
            " asked for: it cannot be read in part; fetch the model whole (`motley models pull --whole`)"
        )
    content: bytes = response.content
    return content


def files_of(place: Path) -> list[Path]:
    """The files of a model that Motley reads, by name: those of its folder, or a GGUF file and its other parts.

    Args:
        place: as `resolve` returns it.
    """
    if place.is_file():
        return sorted(place.parent.glob(_all_parts(place.name))) if _FIRST_PART in place.name else [place]
    return sorted({file for pattern in _NEEDED for file in place.glob(pattern) if file.is_file()})


def no_model(file: Path) -> str:
    """What to say of a file that is not one of a model."""
    return f"{file.absolute()} is a file, but not a model: give {A_MODEL}"


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
    """The folder if it is in Hugging Face's layout, or the only GGUF model in it."""
    if (folder / "config.json").is_file():
        return folder
    files = sorted(file for file in folder.glob("*.gguf") if not _LATER_PART.search(file.name))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelNotFound(f"{folder} has several models; give the file: {names}")
    if not files:
        raise ModelNotFound(f"{folder} is not a model: it has no config.json and no GGUF file")
    return files[0]


def _all_parts(file: str) -> str:
    """The file, or of the first part of a split one a pattern for all of them."""
    return file.replace(_FIRST_PART, "-*-of-")


def is_network_path(source: str) -> bool:
    """Whether Windows takes a path for one of another machine (``\\\\server\\share``), to log in there."""
    return source[:2].replace("/", "\\") == "\\\\"


def stays_inside(name: str) -> bool:
    """Whether a path cannot lead out of the folder it is joined to (symbolic links are the owner's wish)."""
    path = PurePath(name)
    return not path.anchor and not path.drive and ".." not in path.parts


def _from_hub(repo: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with _told(repo, revision):
        ignored = _ignored(patterns)
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))


def _listed(repo: str, revision: str | None, patterns: list[str]) -> list[PublishedFile]:
    """Those files of a repository that would be fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    with _told(repo, revision):
        try:
            found = snapshot_download(
                repo, revision=revision, dry_run=True, allow_patterns=patterns, ignore_patterns=_ignored(patterns)
            )
        except DryRunError as error:  # which hides why
            raise error.__cause__ or error from None
    return sorted(PublishedFile(each.filename, each.file_size or 0, each.is_cached) for each in found)


def _ignored(patterns: list[str]) -> list[str] | None:
    """Which of the files that are asked for by patterns are not fetched."""
    return _DUPLICATES if patterns is _NEEDED else None


@contextlib.contextmanager
def _told(repo: str, revision: str | None) -> Iterator[None]:
    """Turns what the hub's library raises into `ModelNotFound`."""
    from huggingface_hub import errors as hub

    model = f"{repo}@{revision}" if revision else repo
    try:
        yield
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
            f"{model} is neither a folder here nor fetched yet, and huggingface.co cannot be reached; check the name"
            " and the connection, or give a folder with the model"
        ) from error
    except Exception as error:  # each version of huggingface_hub lets another HTTP library's errors through
        raise ModelNotFound(
            f"fetching {model} from huggingface.co failed ({type(error).__name__}: {error}); "
            "try again (what has been fetched is kept), or give a folder with the model"
        ) from error
