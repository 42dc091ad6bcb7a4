"""What a model costs, told to the planner: the node that has the files reads their headers, the orchestrator plans.

A process of its own does it, because it may mean a download of many minutes, which Ctrl-C must be able to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from motley.daemon.lending.hub_mirror import HubMirror, open_pulled
from motley.daemon.lending.wire import LendingError
from motley.daemon.loading.fetching import LoadError, found
from motley.daemon.machine.ending import end_process
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.files import load_tokenizer, open_model, open_weights
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe as read_config
from motley.daemon.node.child import end_with_owner, kill_child, start_child
from motley.daemon.text.alike import UnlikeTokenizersError, check_alike
from motley.daemon.text.tokenizer import TokenizerError
from motley.daemon.text.usual_sampling import usual_sampling
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound, find_fetched, find_here
from motley.protocol import mesh_pb2 as pb


class DescribeError(Exception):
    """The model cannot be served; `code` is ``model_missing`` or ``invalid_model`` unless it is our fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def describe(
    model: pb.ModelSpec,
    models: Path | None,
    tokens_of: str = "",
    cache: ShareCache | None = None,
    *,
    in_part: bool = False,
) -> pb.Described:
    """Download a model if need be and read its config, its tokenizer and the headers of its weights; or tell what one
    costs by a config alone.

    Args:
        models: the folder in which model names are looked up, if there is one.
        tokens_of: another model, whose tokenizer it must have; empty: none.
        cache: beside whose shares there is what was pulled of models in part; None: the usual one.
        in_part: download no more of the model than this reads.

    Returns:
        What it costs in each quantisation that the session may hold it in.

    Raises:
        LoadError, LendingError: a download of it brings nothing any more.
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
    kept = cache or ShareCache()
    with (
        found(model.source, models, kept, lambda done, total: None, in_part=in_part) as (folder, pulled),
        open_model(folder, pulled.bring if pulled else None) as opened,
    ):
        profiles = [
            profile(opened.model, each, model.block, opened.stored, model.exact, every, model.cache_format or "fp32")
            for each in every
        ]
        fingerprint = opened.source.fingerprint()
        tokenizer, usual = load_tokenizer(folder), usual_sampling(folder)
    name = _name(model.source, folder, pulled)
    if tokens_of:
        with found(tokens_of, models, kept, lambda done, total: None) as (whole, part):
            check_alike(tokenizer, name, load_tokenizer(whole), _name(tokens_of, whole, part))
    for profiled in profiles:
        profiled.name, profiled.fingerprint, profiled.chats = name, fingerprint, tokenizer.template is not None
        profiled.sampling.CopyFrom(usual)
    return pb.Described(profile=profiles[0], beside=profiles[1:])


def _name(source: str, place: Path, pulled: HubMirror | None) -> str:
    """What a model is called; a mirror's folder has no name of its own."""
    return place.name if pulled is None else source.partition(":")[2] or source.partition("@")[0]


def look(model: pb.ModelSpec, models: Path | None, cache: ShareCache | None = None) -> pb.Described:
    """What this node has of a model, without fetching anything: a profile with no more than the fingerprint of its
    files, or why there is none. Of a model on the hub the files that have been fetched are meant, if all of them have.

    Args:
        models: the folder in which model names are looked up, if there is one.
        cache: as `describe` has it.
    """
    kept = cache or ShareCache()
    try:
        here = find_here(model.source, models)
        pulled = open_pulled(model.source, models, kept.folder, kept.limit)
        place = here or find_fetched(model.source) or (pulled.place if pulled else None)
        if place is None:
            return pb.Described(from_hub=True)
        with pulled or contextlib.nullcontext(), open_weights(place, pulled.bring if pulled else None) as files:
            return pb.Described(profile=pb.ModelProfile(fingerprint=files.fingerprint()), from_hub=here is None)
    except (ModelNotFound, ConfigError, CheckpointError, LendingError) as error:
        return pb.Described(failure=_failure(error))


def _failure(error: Exception) -> pb.Failure:
    codes = {ModelNotFound: "model_missing", LendingError: "model_missing", UnlikeTokenizersError: "unlike_tokenizers"}
    return pb.Failure(code=codes.get(type(error), "invalid_model"), message=str(error))


async def describe_apart(request: pb.Describe, models: Path | None, cache: ShareCache) -> pb.Described:
    """`describe` in a process of its own, killed if this is cancelled.

    Raises:
        DescribeError: the model cannot be served.
    """
    process = await start_child("motley.daemon.node.survey.describe", stdout=asyncio.subprocess.PIPE)
    order = {
        "describe": request.SerializeToString().hex(),
        "models": str(models) if models else None,
        "shares": str(cache.folder),
        "limit": cache.limit,
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
            "internal_error", f"describing {request.model.source!r} ended with status {process.returncode}"
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
        asked = pb.Describe.FromString(bytes.fromhex(order["describe"]))
        models = Path(order["models"]) if order["models"] else None
        cache = ShareCache(Path(order["shares"]), order["limit"])
        told = describe(asked.model, models, asked.tokens_of, cache, in_part=asked.in_part)
        said = {"described": told.SerializeToString().hex()}
    except (
        LoadError,
        LendingError,
        ModelNotFound,
        ConfigError,
        CheckpointError,
        TokenizerError,
        UnlikeTokenizersError,
    ) as error:
        failure = _failure(error)
        said = {"code": failure.code, "message": failure.message}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
    end_process()
