"""Finding models: folders first, then the hub, of which only the network boundary is replaced."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from motley.daemon.weights.hub import ModelNotFound, find_fetched, find_here, resolve


def model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """Let snapshot_download return or raise what is given; collects its arguments."""
    calls: list[dict[str, Any]] = []

    def replace(answer: Any) -> list[dict[str, Any]]:
        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append({"repo_id": repo_id, **options})
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    replace(AssertionError("a local model must not ask the hub"))
    return replace


@pytest.mark.usefixtures("hub")
def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, models = model(tmp_path / "work" / "owner" / "tiny"), tmp_path / "models"
    named, nested = model(models / "small"), model(models / "owner" / "large")
    monkeypatch.chdir(tmp_path / "work")
    assert resolve(str(here)) == here
    assert resolve("owner/tiny", models) == here
    assert resolve("./owner/tiny") == here
    assert resolve("small", models) == named
    assert resolve("owner/large", models) == nested


@pytest.mark.usefixtures("hub")
def test_names_do_not_lead_out_of_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = tmp_path / "deep" / "models"
    models.mkdir(parents=True)
    model(tmp_path / "deep" / "secret")
    monkeypatch.chdir(models)
    for name in ("x/../../secret", "a/b/../../../secret"):
        with pytest.raises(ModelNotFound, match="no model"):
            resolve(name, models)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("source", ["//server/share", r"\\server\share", r"/\server\share", r"\/server\share"])
def test_no_other_machine_is_logged_in_to(source: str) -> None:
    with pytest.raises(ModelNotFound, match="network path"):
        find_here(source)


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"is not a model: it has no config\.json and no GGUF file"):
        resolve("empty", tmp_path)
    with pytest.raises(ModelNotFound, match=r"no folder or GGUF file .*nowhere or .*nowhere, and it is not a hub id"):
        resolve("nowhere", tmp_path)
    with pytest.raises(ModelNotFound, match="an empty name"):
        resolve("", tmp_path)
    for source in ("./nope", "../nope", "~/nope", "/nope", "a/b/nope", r"C:\nope", "D:/nope", r"models\nope"):
        with pytest.raises(ModelNotFound, match=r"there is no folder or GGUF file \S*nope; give the path"):
            resolve(source)


@pytest.mark.usefixtures("hub")
def test_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    file = folder / "tiny-Q8_0.gguf"
    file.touch()
    monkeypatch.chdir(folder)
    assert resolve("tiny-Q8_0.gguf") == file
    assert resolve("tiny/tiny-Q8_0.gguf", tmp_path / "models") == file
    assert resolve("tiny", tmp_path / "models") == file
    (folder / "README.md").touch()
    with pytest.raises(ModelNotFound, match=r"README\.md is a file, but not a model: give a folder with config\.json"):
        resolve("README.md")
    (folder / "tiny-F16-00001-of-00002.gguf").touch()
    (folder / "tiny-F16-00002-of-00002.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"has several models; give the file: tiny-F16-00001\S+, tiny-Q8_0\.gguf$"):
        resolve("tiny", tmp_path / "models")
    file.unlink()
    assert resolve("tiny", tmp_path / "models") == folder / "tiny-F16-00001-of-00002.gguf"
    model(tmp_path / "models" / "both")
    (tmp_path / "models" / "both" / "also.gguf").touch()
    assert resolve("both", tmp_path / "models") == tmp_path / "models" / "both"


def test_gguf_files_of_the_hub(tmp_path: Path, hub: Any) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("m-Q4_0.gguf", "sub/m-00001-of-00003.gguf"):
        (tmp_path / name).touch()
    calls = hub(tmp_path)
    assert resolve("owner/name:m-Q4_0.gguf") == tmp_path / "m-Q4_0.gguf"
    assert resolve("owner/name@v1.0:sub/m-00001-of-00003.gguf") == tmp_path / "sub" / "m-00001-of-00003.gguf"
    assert [(call["repo_id"], call["revision"], call["allow_patterns"]) for call in calls] == [
        ("owner/name", None, ["m-Q4_0.gguf"]),
        ("owner/name", "v1.0", ["sub/m-*-of-00003.gguf"]),
    ]
    published = ["m-Q4_0.gguf", "sub/m-00001-of-00003.gguf", "sub/m-00002-of-00003.gguf", "sub/m2.gguf"]
    fetched = filter_repo_objects(
        published, allow_patterns=calls[1]["allow_patterns"], ignore_patterns=calls[1]["ignore_patterns"]
    )
    assert list(fetched) == published[1:3]
    with pytest.raises(ModelNotFound, match=r"owner/name has no file other\.gguf"):
        resolve("owner/name:other.gguf")
    for name in ("owner/name:../m.gguf", "owner/name:.gguf", "owner/name:/m.gguf", "owner/name:m.safetensors"):
        with pytest.raises(ModelNotFound, match="not a hub id"):
            resolve(name)


def test_the_hub_is_asked_for_the_needed_files_only(tmp_path: Path, hub: Any) -> None:
    snapshot = model(tmp_path / "snapshot")
    calls = hub(snapshot)
    assert resolve("owner/name", tmp_path) == snapshot
    assert resolve("owner/name@refs/pr/1") == snapshot
    assert [(call["repo_id"], call["revision"]) for call in calls] == [
        ("owner/name", None),
        ("owner/name", "refs/pr/1"),
    ]
    needed = ["config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    others = [
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "original/params.json",
        "onnx/model.safetensors",
        "fp16/config.json",
        "tokenizer.model",
    ]
    chosen = filter_repo_objects(
        needed + others, allow_patterns=calls[0]["allow_patterns"], ignore_patterns=calls[0]["ignore_patterns"]
    )
    assert list(chosen) == needed


class ConnectError(Exception):
    """As of the HTTP library below huggingface_hub, which differs from version to version."""


def refusal(kind: type[errors.HfHubHTTPError]) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(headers={}, request=None)
    return kind("refused", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal(errors.GatedRepoError), r"owner/name@v1 is gated: accept its terms"),
        (refusal(errors.RevisionNotFoundError), "owner/name has no revision 'v1'"),
        (refusal(errors.RepositoryNotFoundError), "neither a folder here nor a model"),
        (refusal(errors.HfHubHTTPError), "fetching owner/name@v1 .* failed"),
        (errors.HFValidationError("bad id"), "nor a valid hub id: bad id"),
        (
            errors.LocalEntryNotFoundError("no"),
            "neither a folder here nor fetched yet, and huggingface.co cannot be reached",
        ),
        (ConnectError("no route"), r"failed \(ConnectError: no route\); try again"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_the_hubs_errors_are_translated(hub: Any, error: Exception, message: str) -> None:
    hub(error)
    with pytest.raises(ModelNotFound, match=message):
        resolve("owner/name@v1")


def test_a_repository_without_a_model(tmp_path: Path, hub: Any) -> None:
    hub(tmp_path)
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        resolve("owner/dataset")


def test_what_has_been_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a model's files, or it counts as absent; the hub is not asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_fetched("owner/name") is None
    assert find_fetched("/owner/name") is None
    own = tmp_path / "models--owner--name"
    folder = model(own / "snapshots" / ("0" * 40))
    (own / "refs").mkdir()
    (own / "refs" / "main").write_text("0" * 40)
    assert find_fetched("owner/name") is None, "configs alone: it is still coming, or another program wanted no more"
    (folder / "model.safetensors").touch()
    assert find_fetched("owner/name") == folder
    (folder / "model.safetensors").unlink()
    parts = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(enumerate(parts))}))
    assert find_fetched("owner/name") is None
    for part in parts:
        (folder / part).touch()
    assert find_fetched("owner/name") == folder
    first = folder / "a-00001-of-00002.gguf"
    first.touch()
    assert find_fetched(f"owner/name:{first.name}") is None
    (folder / "a-00002-of-00002.gguf").touch()
    assert find_fetched(f"owner/name:{first.name}") == first
    assert find_fetched("owner/name:b.gguf") is None
