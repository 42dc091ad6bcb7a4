"""From an assignment to a rank that can execute: resolve, check, declare, find or write the share, open the engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from motley.daemon.models.files import OpenModel, open_model
from motley.daemon.models.graph import build_rank_graph
from motley.daemon.models.holding import for_engine, has_floats
from motley.daemon.models.profile import activations
from motley.daemon.models.share import Share
from motley.daemon.models.tensors import EMBEDDING, expected_shapes
from motley.daemon.node.hardware import gpus
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.gate import Gate, reference_answers
from motley.daemon.rank.peers import Peers
from motley.daemon.weights.cache import Label, ShareCache, share_key
from motley.daemon.weights.checkpoint import CheckpointError
from motley.daemon.weights.hub import fetched_bytes, resolve
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Placed
from motley.plugins.engine import EngineOptions, load_engine, on_gpu
from motley.protocol import GPU_RESERVE
from motley.protocol import mesh_pb2 as pb

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


class GpuFull(Exception):
    """A rank's share does not fit the memory that is free on its GPU."""


@dataclass(frozen=True)
class LoadedRank:
    executor: Executor
    share_bytes: int
    max_rows: int
    """The most tokens a step may have."""
    hidden: int
    """D, the width of the residual."""


@contextlib.contextmanager
def load_rank(
    assignment: pb.Assignment,
    rank: int,
    peers: Peers,
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
        GpuFull: its engine computes on a GPU that is too small or too busy.
        GateError: the engine computes wrongly.
        Exception: what `open_planned`, `build_rank_graph`, `PlannedModel.share` and the engine raise.
    """
    model = assignment.model
    shares = [share_from_proto(share) for share in assignment.shares]
    with open_planned(assignment, models, progress, assignment.shares[rank].quantisation) as planned:
        opened = planned.opened
        declared = build_rank_graph(
            opened.config,
            shares,
            rank,
            planned.quantisation,
            model.block,
            assignment.context,
            opened.stored,
            model.exact,
            experts_elsewhere=len(assignment.hosts) > 0,
            beside=planned.beside,
        )
        if on_gpu(assignment.engine, assignment.engine_options):
            check_gpu_room(declared.share_bytes + declared.cache_bytes + 4 * activations(opened.config), gpus())
        floats = has_floats(opened.config, planned.quantisation)
        extra = dict(assignment.engine_options)
        options = EngineOptions(threads=threads, exact=model.exact, floats=floats, extra=extra)
        loaded = partial(progress, declared.share_bytes, declared.share_bytes)
        with contextlib.ExitStack() as stack:
            share_file = stack.enter_context(planned.share(cache, declared.weights, declared.share_bytes, progress))
            graph = declared.bind(share_file)
            with _signs_of_life(loaded):
                ask_reference = partial(
                    reference_answers, graph, rank, assignment.size, load_engine("reference"), share_file.parent
                )
                expected = ask_reference()  # before the engine takes its memory
                gate = Gate(graph, peers)
                engine = load_engine(assignment.engine)(graph, gate, options)
                stack.callback(engine.close)
                gate.open(engine, expected, partial(ask_reference, anew=True))
            share_bytes = sum(place.weight.all_bytes for place in declared.weights)
            embed = partial(opened.source.rows, EMBEDDING)
            executor = Executor(engine, embed, declared.words, declared.words_per_unit, peers)
            yield LoadedRank(executor, share_bytes, options.max_rows, graph.hidden)


@dataclass(frozen=True)
class PlannedModel:
    """The files that a session was planned for."""

    opened: OpenModel
    spec: pb.ModelSpec
    quantisation: str
    """How this rank holds matrices, see `for_engine`."""
    path: Path
    fingerprint: str
    stamp: str
    beside: Collection[str]
    """How other ranks may."""
    elements: int
    """Of the model's weights, without the embeddings, which no share holds unless they are the head too."""

    def share(
        self, cache: ShareCache, weights: Sequence[Placed], size: int, progress: Progress, expert: str = ""
    ) -> AbstractContextManager[Path]:
        """A share file of these weights, `size` bytes in all, for as long as the context lasts: see `ShareCache.hold`.

        Args:
            expert: which one they are, if they are one.

        Raises:
            CheckpointError: the files changed since they were opened.
            Exception: what `ShareCache.hold` and `write_share` raise.
        """

        def write(file: Path) -> None:
            write_share(self.opened.source, weights, size, file, progress)
            if self.opened.source.stamp() != self.stamp:
                raise CheckpointError(f"{self.path}: the model changed while it was read; start again")

        key = share_key(self.fingerprint, self.stamp, weights, size)
        elements = sum(prod(place.weight.shape) for place in weights)
        label = Label(self.spec.source, self.quantisation, self.spec.block, elements / self.elements, expert)
        return cache.hold(key, label, size, write, progress)


@contextlib.contextmanager
def open_planned(
    assignment: pb.Assignment, models: Path | None, progress: Progress, quantisation: str = ""
) -> Iterator[PlannedModel]:
    """Open the model of an assignment, which is fetched if need be.

    Args:
        quantisation: in which it is to be held here; empty: that of the session.

    Raises:
        LoadError: its files differ from those that were planned for, or do not come.
        Exception: what `resolve` and `open_model` raise.
    """
    path = _resolve(assignment.model.source, models, progress)
    with open_model(path) as opened:
        stamp, fingerprint = opened.source.stamp(), opened.source.fingerprint()
        if fingerprint != assignment.fingerprint:
            raise LoadError(
                f"{path}: these files are not the ones this session was planned for (fingerprint "
                f"{fingerprint[:12]}, planned {assignment.fingerprint[:12]}); give every node the same model"
            )
        shapes = expected_shapes(opened.config)
        elements = sum(prod(shape) for name, shape in shapes.items() if name != EMBEDDING or opened.config.tied)
        model = assignment.model
        asked = quantisation or model.quantisation
        held, beside = for_engine(asked, assignment.engine), {model.quantisation, *model.beside} - {asked}
        yield PlannedModel(opened, model, held, path, fingerprint, stamp, beside, elements)


def check_gpu_room(needed: int, found: Sequence[pb.Gpu]) -> None:
    """Make sure that a rank's memory fits what is free on the first GPU, if the driver tells.

    Args:
        needed: bytes of weights, caches and activations.
        found: the GPUs that there are, as they are now.

    Raises:
        GpuFull: it does not.
    """
    if not found or needed + GPU_RESERVE <= found[0].free_bytes:
        return
    gpu = found[0]
    users = ", ".join(f"{user.name or 'a process'} ({user.pid}): {_gigabytes(user.bytes)}" for user in gpu.users)
    raise GpuFull(
        f"{gpu.name} has {_gigabytes(gpu.free_bytes)} of {_gigabytes(gpu.memory_bytes)} free; this rank needs"
        f" {_gigabytes(needed)}, and {_gigabytes(GPU_RESERVE)} must stay free."
        + (f" In use by {users}." if users else "")
        + " Close what uses the GPU, or give this node a smaller share"
    )


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count else "not told"


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
