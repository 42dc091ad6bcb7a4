"""What a model costs, told to the planner: the node that has the files reads their headers, the orchestrator plans.

A process of its own does it, because it may mean a download of many minutes, which Ctrl-C must be able to end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from motley.daemon.model_files import load_tokenizer, open_model
from motley.daemon.models.config import ConfigError
from motley.daemon.models.profile import profile
from motley.daemon.text import TokenizerError
from motley.daemon.weights.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound, resolve
from motley.protocol import mesh_pb2 as pb


class DescribeError(Exception):
    """The model cannot be served; `code` is ``invalid_model`` unless it is our fault."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def describe(model: pb.ModelSpec, models: Path | None) -> pb.ModelProfile:
    """Fetch a model if need be and read its config, its tokenizer and the headers of its weights.

    Raises:
        ModelNotFound, ConfigError, CheckpointError, TokenizerError: the model cannot be served.
    """
    folder = resolve(model.source, models)
    with open_model(folder) as opened:
        profiled = profile(opened.config, model.quantisation, model.block, opened.stored, model.exact)
        profiled.fingerprint = opened.source.fingerprint()
    load_tokenizer(folder)
    profiled.name = folder.name
    return profiled


async def describe_apart(model: pb.ModelSpec, models: Path | None) -> pb.ModelProfile:
    """`describe` in a process of its own, killed if this is cancelled.

    Raises:
        DescribeError: the model cannot be served.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "motley.daemon.describe"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    order = {"model": model.SerializeToString().hex(), "models": str(models) if models else None}
    try:
        out, _ = await process.communicate(json.dumps(order).encode())
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    try:
        said = json.loads(out)
    except ValueError:
        raise DescribeError(
            "internal_error", f"describing {model.source!r} ended with status {process.returncode}"
        ) from None
    if "profile" not in said:
        raise DescribeError(said["code"], said["message"])
    return pb.ModelProfile.FromString(bytes.fromhex(said["profile"]))


def main() -> None:
    """One order on stdin, one answer on stdout, both JSON."""
    order = json.load(sys.stdin)
    said: dict[str, str]
    try:
        model = pb.ModelSpec.FromString(bytes.fromhex(order["model"]))
        told = describe(model, Path(order["models"]) if order["models"] else None)
        said = {"profile": told.SerializeToString().hex()}
    except (ModelNotFound, ConfigError, CheckpointError, TokenizerError) as error:
        said = {"code": "invalid_model", "message": str(error)}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
