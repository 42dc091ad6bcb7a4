"""Making the experts that a host shall hold ready to be computed, one after another, in a thread of its own.

The host's own thread goes on computing meanwhile. What a thread can hold up is small: reading, quantising, packing and
the examination of an expert are long calls of libraries that let others run.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from motley.daemon.adapters.cutting import Parts, cut_products
from motley.daemon.experts.factors import Products
from motley.daemon.experts.gate import examine_expert
from motley.daemon.experts.keys import ExpertKey
from motley.daemon.loading.planned import PlannedModel, open_planned
from motley.daemon.models.cutting.tree import fold, subtrees
from motley.daemon.models.cutting.units import Units, units
from motley.daemon.models.graph.expert_graph import build_expert_graph
from motley.daemon.weights.cache import ShareCache
from motley.plugins.engine import F32, EngineOptions
from motley.plugins.expert_engine import AdaptedExpert, Expert, experts_take_adapters, load_expert_engine
from motley.plugins.mixture import Slots
from motley.protocol import mesh_pb2 as pb


class _Abandoned(Exception):
    """Nobody waits for what is being loaded."""


@dataclass(frozen=True)
class HeldExpert:
    """An expert that can be computed, or the slices of it that this worker has.

    Attributes:
        digests: SHA-256 of the weights of each slice, as they are held.
        weight_bytes: what these take.
    """

    digests: tuple[bytes, ...]
    weight_bytes: int
    _slices: Mapping[range, Expert]
    """What computes each slice, by its leaf of the tree of sums."""
    _adapted: Mapping[range, Parts]
    """What adapters may add to in each."""
    _spans: tuple[range, ...]
    _files: contextlib.ExitStack
    adapters: set[int] = field(default_factory=set)
    """The slots that have an adapter."""

    def sums(self, x: F32, slots: Slots | None = None) -> list[F32]:
        """Compute rows f32[N, D]: what the slices make of them, summed for each subtree of the tree of sums that they
        fill, f32[N, D] each. An expert that is whole has one such result. They are valid until the next call.

        Args:
            slots: i32[N], of the rows' adapters, all of which are there; None: they have none.

        Raises:
            EngineError: it cannot be computed.
        """
        if slots is None:
            terms = {leaf: compute(x) for leaf, compute in self._slices.items()}
        else:
            terms = {leaf: compute(x, slots) for leaf, compute in self._with_slots()}
        return [fold(span, terms, lambda _, left, right: left + right) for span in self._spans]

    def load_adapter(self, slot: int, products: Products) -> None:
        """Have what an adapter adds to this expert in a slot, in place of what is there.

        Raises:
            EngineError: it does not fit, or there is no memory for it.
        """
        for leaf, expert in self._with_slots():
            expert.load_adapter(slot, cut_products(products, self._adapted[leaf]))
        self.adapters.add(slot)

    def unload_adapter(self, slot: int) -> None:
        """Forget what is in a slot."""
        self.adapters.discard(slot)
        for _, expert in self._with_slots():
            expert.unload_adapter(slot)

    def _with_slots(self) -> Iterator[tuple[range, AdaptedExpert]]:
        return ((leaf, cast(AdaptedExpert, expert)) for leaf, expert in self._slices.items())

    def close(self) -> None:
        """Free its memory; its share stays in the cache."""
        self._files.close()


@dataclass(frozen=True)
class _Model:
    """The model that experts are loaded from, and how it can be cut."""

    planned: PlannedModel
    cut: Units


def slices_of(assignment: pb.Assignment) -> tuple[range, int]:
    """Which slices of every expert the worker has that got this assignment, and how many slices an expert is cut in.

    A whole expert is one slice.
    """
    group = assignment.group
    if not assignment.HasField("group"):
        count = max(1, assignment.expert_slices)
        return range(count), count
    first = sum(group.slices[: group.member])
    return range(first, first + group.slices[group.member]), assignment.expert_slices


class ExpertLoader:
    """Loads the experts of one assignment. Use as a context; one thread owns it.

    Attributes:
        slots: for adapters, which each of them has.
    """

    def __init__(self, assignment: pb.Assignment, *, models: Path | None, cache: ShareCache, threads: int) -> None:
        """
        Args:
            models: the folder in which model names are looked up, if there is one.
            cache: where shares are kept.
            threads: that one expert is computed with.

        Raises:
            EngineError: the assignment's engine computes no experts.
        """
        self._assignment = assignment
        self._slices, self._all = slices_of(assignment)
        self.slots = assignment.adapters if experts_take_adapters(assignment.engine) else 0
        self._models = models
        self._cache = cache
        self._engine = load_expert_engine(assignment.engine)(
            EngineOptions(threads=threads, exact=assignment.model.exact)
        )
        self._reference = load_expert_engine("reference")(EngineOptions())
        self._files = contextlib.ExitStack()
        self._thread = ThreadPoolExecutor(1, "expert loading")
        self._loading: dict[ExpertKey, Future[HeldExpert]] = {}
        """What is to be loaded, in that order."""
        self._asked = self._loaded = self._each = self._fetched = 0
        self._part = 0.0
        self._abandoned = False
        self._model = self._thread.submit(self._open)

    @property
    def hidden(self) -> int | None:
        """D, the width of a row; None as long as the model is not opened.

        Raises:
            Exception: what `motley.daemon.loading.planned.open_planned` and `units` raise.
        """
        return self._model.result().planned.opened.model.expert_width if self._model.done() else None

    @property
    def busy(self) -> bool:
        """Something is being loaded."""
        return bool(self._loading) or not self._model.done()

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes loaded, and bytes to load, since there was last nothing to do; (bytes fetched, 0) while the model is
        downloaded."""
        if not self._each:
            return self._fetched, 0
        total = self._asked * self._each
        return min(total, int((self._loaded + self._part) * self._each)), total

    def load(self, keys: Collection[ExpertKey]) -> None:
        """Change what is to be loaded to these experts, in order; others that were waiting are not begun any more."""
        if not self._loading:
            self._asked = self._loaded = 0
        for key, future in list(self._loading.items()):
            if key not in keys and future.cancel():
                del self._loading[key]
                self._asked -= 1
        for key in keys:
            if key not in self._loading:
                self._loading[key] = self._thread.submit(self._load, key)
                self._asked += 1

    def finished(self) -> list[tuple[ExpertKey, HeldExpert]]:
        """The experts that have been loaded since the last call; they are the caller's to close.

        Raises:
            LoadError: the model's files differ from those that were planned for, or do not come.
            CheckpointError: they changed, or lack an expert.
            GateError: an expert computes wrongly.
            Exception: what `open_planned`, `build_expert_graph`, `PlannedModel.share` and the engine raise.
        """
        done = takewhile(lambda item: item[1].done(), self._loading.items())
        finished = [(key, future.result()) for key, future in done]
        for key, _ in finished:
            del self._loading[key]
        return finished

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop loading, and free everything; the experts that were taken are closed."""
        self._abandoned = True
        self._thread.shutdown(cancel_futures=True)
        for future in self._loading.values():
            if not future.cancelled() and future.exception() is None:
                future.result().close()
        self._engine.close()
        self._reference.close()
        self._files.close()

    # -- in the loading thread --------------------------------------------------------------------------------------

    def _open(self) -> _Model:
        planned = self._files.enter_context(open_planned(self._assignment, self._models, self._cache, self._on_fetched))
        spec, opened = planned.spec, planned.opened
        cut = units(opened.model, planned.quantisation, spec.block, opened.stored, spec.exact, planned.beside)
        return _Model(planned, cut)

    def _load(self, key: ExpertKey) -> HeldExpert:
        model = self._model.result()
        planned, config = model.planned, model.planned.opened.model
        slices = {
            number: build_expert_graph(config, model.cut, *key, number, self._all, self.slots)
            for number in self._slices
        }
        weight_bytes = self._each = sum(declared.weight_bytes for declared in slices.values())
        self._part = 0.0
        experts: dict[range, Expert] = {}
        digests = []
        with contextlib.ExitStack() as stack:
            for number, declared in slices.items():
                progress = partial(self._on_progress, len(experts))
                name = f"layer {key[0]} expert {key[1]}" + (f" slice {number} of {self._all}" if self._all > 1 else "")
                share = planned.share(self._cache, declared.weights, declared.share_bytes, progress, name)
                share_file = stack.enter_context(share)
                with share_file.open("rb") as file:
                    digests.append(hashlib.file_digest(file, "sha256").digest())
                graph = declared.bind(share_file)
                expert = self._engine.open(graph)
                stack.callback(expert.close)
                examine_expert(expert, graph, self._reference)
                experts[range(number, number + 1)] = expert
            self._loaded, self._part = self._loaded + 1, 0.0
            spans = tuple(subtrees(self._slices, self._all))
            adapted = {range(number, number + 1): declared.adapted for number, declared in slices.items()}
            return HeldExpert(tuple(digests), weight_bytes, experts, adapted, spans, stack.pop_all())

    def _on_fetched(self, done: int, total: int) -> None:
        if self._abandoned:
            raise _Abandoned
        self._fetched = done

    def _on_progress(self, slices: int, done: int, total: int) -> None:
        """Note that so many slices of an expert are loaded, and `done` of `total` bytes of the next."""
        if self._abandoned:
            raise _Abandoned
        self._part = max(self._part, (slices + done / total) / len(self._slices)) if total else 0.0
