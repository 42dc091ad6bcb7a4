"""From an assignment to a rank that can execute: resolve, check, declare, find or write the share, open the engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from motley.daemon.executor import Executor
from motley.daemon.gate import Gate, reference_answers
from motley.daemon.model_files import open_model
from motley.daemon.models.config import ModelConfig
from motley.daemon.models.graph import Declared, build_rank_graph
from motley.daemon.models.share import Share
from motley.daemon.models.tensors import EMBEDDING, expected_shapes
from motley.daemon.weights.cache import Label, ShareCache, share_key
from motley.daemon.weights.checkpoint import CheckpointError
from motley.daemon.weights.hub import fetched_bytes, resolve
from motley.daemon.weights.share_file import write_share
from motley.plugins.engine import EngineOptions, load_engine
from motley.protocol import mesh_pb2 as pb
from motley.transport import Communicator

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of the share; (bytes fetched, 0) while the model is being downloaded.

One thread calls it at a time, not always the same."""

PROGRESS_S = 1.0
"""Between two calls of `Progress` where no bytes are counted."""
DOWNLOAD_S = 120.0
"""A download that has brought nothing for so long hangs."""
ENGINE_S = 1800.0
"""An engine that is not made and examined after so long hangs: from then on no sign of life is given."""


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
    cache: ShareCache,
    threads: int,
    progress: Progress,
) -> Iterator[LoadedRank]:
    """Load a rank's share, from the cache if it is there; everything is freed when the context ends.

    Raises:
        LoadError: the model's files differ from those that were planned for, or do not come.
        CheckpointError: they changed while they were read.
        GateError: the engine computes wrongly.
        Exception: what `resolve`, `open_model`, `build_rank_graph`, `ShareCache.hold`, `write_share` and the
            engine raise.
    """
    path = _resolve(assignment.model.source, models, progress)
    model = assignment.model
    shares = [share_from_proto(share) for share in assignment.shares]
    with open_model(path) as opened:
        stamp, fingerprint = opened.source.stamp(), opened.source.fingerprint()
        if fingerprint != assignment.fingerprint:
            raise LoadError(
                f"{path}: these files are not the ones this session was planned for (fingerprint "
                f"{fingerprint[:12]}, planned {assignment.fingerprint[:12]}); give every node the same model"
            )
        declared = build_rank_graph(
            opened.config, shares, rank, model.quantisation, model.block, assignment.context, opened.stored, model.exact
        )

        def write(file: Path) -> None:
            write_share(opened.source, declared.weights, declared.share_bytes, file, progress)
            if opened.source.stamp() != stamp:
                raise CheckpointError(f"{path}: the model changed while it was read; start again")

        key = share_key(fingerprint, stamp, declared.weights, declared.share_bytes)
        label = Label(model.source, model.quantisation, model.block, _fraction(opened.config, declared))
        options = EngineOptions(threads=threads, exact=model.exact)
        loaded = partial(progress, declared.share_bytes, declared.share_bytes)
        with contextlib.ExitStack() as stack:
            share_file = stack.enter_context(cache.hold(key, label, declared.share_bytes, write, progress))
            graph = declared.bind(share_file)
            with _signs_of_life(loaded):
                ask_reference = partial(
                    reference_answers, graph, rank, assignment.size, load_engine("reference"), share_file.parent
                )
                expected = ask_reference()  # before the engine takes its memory
                gate = Gate(graph, communicator)
                engine = load_engine(assignment.engine)(graph, gate, options)
                stack.callback(engine.close)
                gate.open(engine, expected, partial(ask_reference, anew=True))
            held = sum(place.weight.all_bytes for place in declared.weights)
            embed = partial(opened.source.rows, EMBEDDING)
            executor = Executor(engine, embed, declared.words, declared.words_per_unit, communicator.stats)
            yield LoadedRank(executor, held, options.max_rows)


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
    fetched, since = 0, time.monotonic()
    while time.monotonic() - since < DOWNLOAD_S:
        with contextlib.suppress(TimeoutError):
            return resolved.result(PROGRESS_S)
        now = fetched_bytes(source)
        if now != fetched:
            fetched, since = now, time.monotonic()
        progress(fetched, 0)
    raise LoadError(f"nothing of {source} has come for {DOWNLOAD_S:.0f} s; try again (what has been fetched is kept)")


@contextlib.contextmanager
def _signs_of_life(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` now and then while the context lasts, from a thread of its own; what it raises is raised at the end.

    Nobody else may call it meanwhile. A thread, because engines of every make spend minutes in calls of libraries.
    """
    over = threading.Event()

    def work() -> None:
        until = time.monotonic() + ENGINE_S
        while not over.wait(PROGRESS_S) and time.monotonic() < until:
            tell()

    with ThreadPoolExecutor(1, "signs of life") as pool:
        telling = pool.submit(work)
        try:
            yield
        finally:
            over.set()
    telling.result()


def _fraction(config: ModelConfig, declared: Declared) -> float:
    """Of the model's weights, without the embeddings, which no share holds unless they are the head too."""
    shapes = expected_shapes(config)
    whole = sum(prod(shape) for name, shape in shapes.items() if name != EMBEDDING or config.tied)
    return sum(prod(place.weight.shape) for place in declared.weights) / whole
