"""From an assignment to a rank that can execute: resolve, check, declare, write the share file, open the engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from motley.daemon.executor import Executor
from motley.daemon.models.config import read_config
from motley.daemon.models.graph import SHARE_FILE, build_rank_graph
from motley.daemon.models.share import Share
from motley.daemon.models.tensors import EMBEDDING, expected_shapes
from motley.daemon.weights.checkpoint import Checkpoint
from motley.daemon.weights.hub import fetched_bytes, resolve
from motley.daemon.weights.share_file import write_share
from motley.plugins.engine import EngineOptions, load_engine
from motley.protocol import mesh_pb2 as pb
from motley.transport import Communicator

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of the share; (bytes fetched, 0) while the model is being downloaded."""

SCRATCH_PREFIX = "rank-"
PROGRESS_S = 1.0


class LoadError(Exception):
    """The files on this node are not the ones that were planned for."""


@dataclass(frozen=True)
class LoadedRank:
    executor: Executor
    share_bytes: int
    max_rows: int
    """The most tokens a step may have."""


@contextlib.contextmanager
def load_rank(
    assignment: pb.Assignment,
    rank: int,
    communicator: Communicator,
    *,
    models: Path | None,
    scratch: Path,
    threads: int,
    progress: Progress,
) -> Iterator[LoadedRank]:
    """Load a rank's share; everything is freed when the context ends.

    Raises:
        LoadError: the model's files differ from those that were planned for.
        Exception: what `resolve`, `read_config`, `build_rank_graph`, `write_share` and the engine raise.
    """
    folder = _resolve(assignment.model.source, models, progress)
    config = read_config(folder)
    model = assignment.model
    shares = [share_from_proto(share) for share in assignment.shares]
    declared = build_rank_graph(config, shares, rank, model.quantisation, model.block, assignment.context, model.exact)
    with Checkpoint(folder) as checkpoint, _scratch_folder(scratch) as place:
        checkpoint.expect(expected_shapes(config))
        fingerprint = checkpoint.fingerprint()
        if fingerprint != assignment.fingerprint:
            raise LoadError(
                f"{folder}: these files are not the ones this session was planned for (fingerprint "
                f"{fingerprint[:12]}, planned {assignment.fingerprint[:12]}); give every node the same model"
            )
        share_file = place / SHARE_FILE
        write_share(checkpoint, declared.weights, declared.share_bytes, share_file, progress)
        options = EngineOptions(threads=threads, exact=model.exact)
        open_engine = load_engine(assignment.engine)
        engine = open_engine(declared.bind(share_file), communicator, options)
        if os.name == "posix":
            shutil.rmtree(place)  # it stays mapped, and nothing is left behind even if this process is killed
        try:
            held = sum(place.weight.data_bytes + place.weight.scale_bytes for place in declared.weights)
            embed = partial(checkpoint.rows, EMBEDDING)
            executor = Executor(engine, embed, declared.words, declared.words_per_unit, communicator.stats)
            yield LoadedRank(executor, held, options.max_rows)
        finally:
            engine.close()


def share_from_proto(share: pb.Share) -> Share:
    """The daemon's form of a share on the control plane."""

    def units(stretch: pb.Range) -> range:
        return range(stretch.start, stretch.stop)

    return Share(share.attention_split, units(share.attention), units(share.mlp), units(share.vocabulary))


def _resolve(source: str, models: Path | None, progress: Progress) -> Path:
    """`resolve`, with a sign of progress now and then while it downloads."""
    resolved: Future[Path] = Future()

    def work() -> None:
        try:
            resolved.set_result(resolve(source, models))
        except BaseException as error:
            resolved.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while True:
        with contextlib.suppress(TimeoutError):
            return resolved.result(PROGRESS_S)
        progress(fetched_bytes(source), 0)


def sweep_scratch(scratch: Path) -> None:
    """Remove what workers that were killed have left behind.

    Where a mapped file can be unlinked nothing is left but by a worker killed while loading.
    """
    for left in scratch.glob(f"{SCRATCH_PREFIX}*"):
        owner = left.name.split("-")[1]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _scratch_folder(scratch: Path) -> Iterator[Path]:
    scratch.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-", dir=scratch))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
