"""From an assignment to a rank that can execute: resolve, check, declare, find or write the share, open the engine."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
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
from motley.daemon.weights.hub import fetched_bytes, resolve
from motley.daemon.weights.share_file import write_share
from motley.plugins.engine import EngineOptions, load_engine
from motley.protocol import mesh_pb2 as pb
from motley.transport import Communicator

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) of the share; (bytes fetched, 0) while the model is being downloaded."""

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
    cache: ShareCache,
    threads: int,
    progress: Progress,
) -> Iterator[LoadedRank]:
    """Load a rank's share, from the cache if it is there; everything is freed when the context ends.

    Raises:
        LoadError: the model's files differ from those that were planned for.
        GateError: the engine computes wrongly.
        Exception: what `resolve`, `open_model`, `build_rank_graph`, `ShareCache.hold`, `write_share` and the
            engine raise.
    """
    path = _resolve(assignment.model.source, models, progress)
    model = assignment.model
    shares = [share_from_proto(share) for share in assignment.shares]
    with open_model(path) as opened:
        fingerprint = opened.source.fingerprint()
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

        key = share_key(fingerprint, opened.source.stamp(), declared.weights, declared.share_bytes)
        label = Label(model.source, model.quantisation, model.block, _fraction(opened.config, declared))
        options = EngineOptions(threads=threads, exact=model.exact)
        with cache.hold(key, label, declared.share_bytes, write, progress) as share_file:
            graph = declared.bind(share_file)
            ask_reference = partial(
                reference_answers, graph, rank, assignment.size, load_engine("reference"), share_file.parent
            )
            expected = ask_reference()  # before the engine takes its memory
            gate = Gate(graph, communicator)
            engine = load_engine(assignment.engine)(graph, gate, options)
            try:
                gate.open(engine, expected, partial(ask_reference, anew=True))
                held = sum(place.weight.all_bytes for place in declared.weights)
                embed = partial(opened.source.rows, EMBEDDING)
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


def _fraction(config: ModelConfig, declared: Declared) -> float:
    """Of the model's weights, without the embeddings, which no share holds unless they are the head too."""
    shapes = expected_shapes(config)
    whole = sum(prod(shape) for name, shape in shapes.items() if name != EMBEDDING or config.tied)
    return sum(prod(place.weight.shape) for place in declared.weights) / whole
