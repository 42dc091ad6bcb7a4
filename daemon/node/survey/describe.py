"""What a model costs, told to the planner: the node that has the files reads their headers, the orchestrator plans.

A process of its own does it, because it may mean a download of many minutes, which Ctrl-C must be able to end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from motley.daemon.loading.fetching import LoadError, fetch
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.files import load_tokenizer, open_model, open_weights
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe as read_config
from motley.daemon.node.child import end_with_owner, kill_child, start_child
from motley.daemon.text.alike import UnlikeTokenizersError, check_alike
from motley.daemon.text.tokenizer import TokenizerError
from motley.daemon.text.usual_sampling import usual_sampling
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound, find_fetched, find_here
from motley.protocol import mesh_pb2 as pb


class DescribeError(Exception):
    """The model cannot be served; `code` is ``model_missing`` or ``invalid_model`` unless it is our fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def describe(model: pb.ModelSpec, models: Path | None, tokens_of: str = "") -> pb.Described:
    """Download a model if need be and read its config, its tokenizer and the headers of its weights; or tell what one
    costs by a config alone.

    Args:
        models: the folder in which model names are looked up, if there is one.
        tokens_of: another model, whose tokenizer it must have; empty: none.

    Returns:
        What it costs in each quantisation that the session may hold it in.

    Raises:
        LoadError: a download of it brings nothing any more.
        ModelNotFound, ConfigError, CheckpointError, TokenizerError: the model cannot be served.
        UnlikeTokenizersError: its tokenizer is not that of the other model.
    """
    every = (model.quantisation, *model.beside)
    if model.config_json:
        alone = read_config(Keys(Path("config.json"), json.loads(model.config_json)))
        profiles = [
            profile(alone, each, model.block, None, model.exact, every, model.cache_format or "fp32") for each in every
        ]
        for profiled in profiles:
            profiled.name = profiled.family
        return pb.Described(profile=profiles[0], beside=profiles[1:])
    folder = fetch(model.source, models, lambda done, total: None)
    with open_model(folder) as opened:
        profiles = [
            profile(opened.model, each, model.block, opened.stored, model.exact, every, model.cache_format or "fp32")
            for each in every
        ]
        fingerprint = opened.source.fingerprint()
    tokenizer = load_tokenizer(folder)
    if tokens_of:
        whole = fetch(tokens_of, models, lambda done, total: None)
        check_alike(tokenizer, folder.name, load_tokenizer(whole), whole.name)
    chats, usual = tokenizer.template is not None, usual_sampling(folder)
    for profiled in profiles:
        profiled.name, profiled.fingerprint, profiled.chats = folder.name, fingerprint, chats
        profiled.sampling.CopyFrom(usual)
    return pb.Described(profile=profiles[0], beside=profiles[1:])


def look(model: pb.ModelSpec, models: Path | None) -> pb.Described:
    """What this node has of a model, without fetching anything: a profile with no more than the fingerprint of its
    files, or why there is none. Of a model on the hub the files that have been fetched are meant, if all of them have.

    Args:
        models: the folder in which model names are looked up, if there is one.
    """
    try:
        here = find_here(model.source, models)
        place = here or find_fetched(model.source)
        if place is None:
            return pb.Described(from_hub=True)
        with open_weights(place) as files:
            return pb.Described(profile=pb.ModelProfile(fingerprint=files.fingerprint()), from_hub=here is None)
    except (ModelNotFound, ConfigError, CheckpointError) as error:
        return pb.Described(failure=_failure(error))


def _failure(error: Exception) -> pb.Failure:
    codes = {ModelNotFound: "model_missing", UnlikeTokenizersError: "unlike_tokenizers"}
    return pb.Failure(code=codes.get(type(error), "invalid_model"), message=str(error))


async def describe_apart(model: pb.ModelSpec, models: Path | None, tokens_of: str = "") -> pb.Described:
    """`describe` in a process of its own, killed if this is cancelled.

    Raises:
        DescribeError: the model cannot be served.
    """
    process = await start_child("motley.daemon.node.survey.describe", stdout=asyncio.subprocess.PIPE)
    order = {
        "model": model.SerializeToString().hex(),
        "models": str(models) if models else None,
        "tokens_of": tokens_of,
    }
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        out = await process.stdout.read()
        await process.wait()
    finally:
        await kill_child(process)
    try:
        said = json.loads(out)
    except ValueError:
        raise DescribeError(
            "internal_error", f"describing {model.source!r} ended with status {process.returncode}"
        ) from None
    if "described" not in said:
        raise DescribeError(said["code"], said["message"])
    return pb.Described.FromString(bytes.fromhex(said["described"]))


def main() -> None:
    """One order on stdin, one answer on stdout, both JSON; the end of stdin ends this, a download under way too."""
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return
    end_with_owner()
    said: dict[str, str]
    try:
        model = pb.ModelSpec.FromString(bytes.fromhex(order["model"]))
        told = describe(model, Path(order["models"]) if order["models"] else None, order["tokens_of"])
        said = {"described": told.SerializeToString().hex()}
    except (LoadError, ModelNotFound, ConfigError, CheckpointError, TokenizerError, UnlikeTokenizersError) as error:
        failure = _failure(error)
        said = {"code": failure.code, "message": failure.message}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
