"""What a model costs, told to the planner: the node that has the files reads their headers, the orchestrator plans.

A process of its own does it, because it may mean a download of many minutes, which Ctrl-C must be able to end, and
because libraries that are not ours read what strangers wrote. A model that was read here before needs neither.
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
from motley.daemon.machine.ending import end_process, end_with_owner
from motley.daemon.machine.memory import limit_memory
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.files import load_tokenizer, open_model, open_weights
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe as read_config
from motley.daemon.node.child import kill_child, start_child
from motley.daemon.node.survey.read_before import ReadBefore
from motley.daemon.text.alike import UnlikeTokenizersError, check_alike
from motley.daemon.text.tokenizer import TokenizerError
from motley.daemon.text.usual_sampling import usual_sampling, usual_tokens
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound, find_fetched, find_here
from motley.protocol import mesh_pb2 as pb

MEMORY_BYTES = 8 << 30
"""What reads a model may have so much memory (on Linux)."""


def describe(
    model: pb.ModelSpec,
    models: Path | None,
    tokens_of: str = "",
    cache: ShareCache | None = None,
    *,
    in_part: bool = False,
    chats: bool | None = None,
) -> pb.Described:
    """Download a model if need be and read its config, its tokenizer and the headers of its weights; or tell what one
    costs by a config alone.

    Args:
        models: the folder in which model names are looked up, if there is one.
        tokens_of: another model, whose tokenizer it must have; empty: none.
        cache: beside whose shares there is what was pulled of models in part; None: the usual one.
        in_part: download no more of the model than this reads.
        chats: whether it has a chat template, where its tokenizer need not be read; None: read it.

    Returns:
        What it costs in each quantisation that the session may hold it in.

    Raises:
        LoadError, LendingError: a download of it brings nothing any more.
        ModelNotFound, ConfigError, CheckpointError, TokenizerError: the model cannot be served.
        UnlikeTokenizersError: its tokenizer is not that of the other model.
    """
    every = (model.quantisation, *model.beside)
    if model.config_json:
        alone = read_config(Keys(Path("config.json"), json.loads(model.config_json)), model.ahead)
        profiles = [
            profile(alone, each, model.block, None, model.exact, every, model.cache_format or "fp32") for each in every
        ]
        for profiled in profiles:
            profiled.name = profiled.family
        return pb.Described(profile=profiles[0], beside=profiles[1:])
    kept = cache or ShareCache()
    with (
        found(model.source, models, kept, lambda done, total: None, in_part=in_part) as (folder, pulled),
        open_model(folder, pulled.bring if pulled else None, ahead=model.ahead) as opened,
    ):
        profiles = [
            profile(opened.model, each, model.block, opened.stored, model.exact, every, model.cache_format or "fp32")
            for each in every
        ]
        fingerprint = opened.source.fingerprint()
        tokenizer = load_tokenizer(folder) if chats is None else None
        usual, tokens = usual_sampling(folder), usual_tokens(folder)
    name = _name(model.source, folder, pulled)
    called = f"{name}'s own head" if model.ahead else name
    if tokenizer:
        chats = tokenizer.template is not None
    if tokenizer and tokens_of:
        with found(tokens_of, models, kept, lambda done, total: None) as (whole, part):
            check_alike(tokenizer, name, load_tokenizer(whole), _name(tokens_of, whole, part))
    for profiled in profiles:
        profiled.name, profiled.fingerprint, profiled.chats = called, fingerprint, bool(chats)
        profiled.sampling.CopyFrom(usual)
        profiled.usual_tokens = tokens
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


async def answer(request: pb.Describe, models: Path | None, cache: ShareCache) -> pb.Described:
    """What a node says that is asked to describe a model: `describe`, or why the model cannot be served.

    Args:
        models, cache: as `describe` has them.
    """
    if request.model.config_json:
        return await asyncio.to_thread(_answer, request, models, cache)
    before = await asyncio.to_thread(ReadBefore, request.model.source, models, cache)
    if not request.tokens_of and (chats := before.chats()) is not None:
        return await asyncio.to_thread(_answer, request, models, cache, chats)
    told = await _answer_apart(request, models, cache)
    if not told.HasField("failure"):
        await asyncio.to_thread(before.keep, told.profile.chats)
    return told


def _answer(request: pb.Describe, models: Path | None, cache: ShareCache, chats: bool | None = None) -> pb.Described:
    try:
        return describe(request.model, models, request.tokens_of, cache, in_part=request.in_part, chats=chats)
    except (
        LoadError,
        LendingError,
        ModelNotFound,
        ConfigError,
        CheckpointError,
        TokenizerError,
        UnlikeTokenizersError,
    ) as error:
        return pb.Described(failure=_failure(error))
    except MemoryError:
        message = f"{request.model.source}: to read its config and headers takes too much memory; they may be damaged"
        return pb.Described(failure=pb.Failure(code="load_failed", message=message))


async def _answer_apart(request: pb.Describe, models: Path | None, cache: ShareCache) -> pb.Described:
    """`_answer` of a process of its own, killed if this is cancelled."""
    process = await start_child("motley.daemon.node.survey.describe", stdout=asyncio.subprocess.PIPE)
    order = {
        "describe": request.SerializeToString().hex(),
        "models": str(models) if models else None,
        "shares": str(cache.folder),
        "limit": cache.limit,
        "bytes": MEMORY_BYTES,
    }
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(order).encode() + b"\n")
        out = await process.stdout.read()
        await process.wait()
    finally:
        await kill_child(process)
    if process.returncode:
        message = f"describing {request.model.source!r} ended with status {process.returncode}"
        return pb.Described(failure=pb.Failure(code="internal_error", message=message))
    return pb.Described.FromString(out)


def main() -> None:
    """One order on stdin, in JSON, one `Described` on stdout; the end of stdin ends this, a download under way too."""
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return
    end_with_owner()
    limit_memory(order["bytes"])
    asked = pb.Describe.FromString(bytes.fromhex(order["describe"]))
    models = Path(order["models"]) if order["models"] else None
    told = _answer(asked, models, ShareCache(Path(order["shares"]), order["limit"]))
    sys.stdout.buffer.write(told.SerializeToString())


if __name__ == "__main__":
    main()
    end_process()
