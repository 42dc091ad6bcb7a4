"""The GPU engine: a rank's graph as CUDA kernels on one stream, collectives included, in FP32.

A step is submitted as a whole, node by node, and waited for once: the kernels in ``device``, and between them the
collectives as `motley.transport.cuda` orders them. Products by 4- and 8-bit codes quantise the rows first,
and have the bits that the CPU engine gives them. A table on the device says where each row finds its sequence, so rows
of one step may be of any sequences. Steps that decode, which have one row of each sequence, are captured: those of
equally many rows as one CUDA graph, host steps included, or as a graph between any two of these (`HostStep.SPLIT`).
They are run from it for whichever sequences, where the driver allows that. Activations and sums are float32.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum, auto
from functools import partial
from itertools import chain
from time import perf_counter
from typing import NamedTuple

import numpy as np

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.cuda.adapting import Adapting
from motley.plugins.cuda.cublas import Gemm, open_cublas
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.inputs import StepInputs
from motley.plugins.cuda.kernels import PART, parts_of
from motley.plugins.cuda.known import submitted_nodes
from motley.plugins.cuda.nodes.submission import StepRows
from motley.plugins.cuda.recurrent_states import Lined, RecurrentStates
from motley.plugins.cuda.rotary import RotaryTables
from motley.plugins.cuda.step import FEW_ROWS, submit_nodes
from motley.plugins.cuda.trial import Trial
from motley.plugins.engine import (
    CACHE_FORMATS,
    F32,
    Collectives,
    DeviceSpeed,
    EngineError,
    EngineLostError,
    EngineMemoryError,
    EngineOptions,
    RankGraph,
    Span,
    micro_chunks,
    transport,
)
from motley.plugins.spans import check_step, wanted_rows
from motley.transport.cuda.driver import CudaDriver, Driver, check_gpu
from motley.transport.cuda.errors import CudaError, DeviceLost, OutOfDeviceMemory
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaGraph, CudaStream, measure_host_steps

log = logging.getLogger(__name__)

LAYER_S, HOST_S = 45e-6, 40e-6
"""`DeviceSpeed` of an H200: tokens of TinyLlama's and Mistral-7B's shapes less what their weights take there (41 and 52
us a layer), and a sum without its exchange (20, 38 or 63 us by the form of the host step): bench/LOG.md, 26 and 27
November 2026."""
OFTEN = 2
"""So many times a step with rows of prompts has come before it is captured: most sizes of a prompt's last rows never
come again."""
GRAPHS_KEPT = 96
"""Captured steps; of more, the one that was not used for longest is forgotten."""


class Company(Enum):
    """Whose the rows of a step are: each of another sequence, all of one, or neither. A row alone is the former."""

    APART = auto()
    TOGETHER = auto()
    MIXED = auto()

    @classmethod
    def of(cls, spans: Sequence[int], rows: int) -> Company:
        """`spans`: the rows of each sequence."""
        if len(spans) == rows:
            return cls.APART
        return cls.TOGETHER if len(spans) == 1 else cls.MIXED


class Kind(NamedTuple):
    """What steps have in common that a captured one can stand for.

    Attributes:
        transport: what they are summed through.
        wanted: the rows whose logits are.
        adapted: whether any row has an adapter.
        chooses: whether any row may see fewer positions than there are, those that are chosen.
    """

    transport: Collectives
    rows: int
    wanted: tuple[int, ...]
    halved: bool
    adapted: bool
    company: Company
    chooses: bool


@contextmanager
def _told(where: str = "") -> Iterator[None]:
    """Raise `EngineError` for what goes wrong with the GPU meanwhile; `where` says when that was."""
    try:
        yield
    except OutOfDeviceMemory as error:
        raise EngineMemoryError(f"engine 'cuda'{where}: {error}") from error
    except DeviceLost as error:
        raise EngineLostError(f"engine 'cuda'{where}: {error}") from error
    except CudaError as error:
        raise EngineError(f"engine 'cuda'{where}: {error}") from error
    except TimeoutError as error:
        raise EngineError(f"engine 'cuda'{where}: the GPU hangs ({error}): restart the machine") from error


class CudaEngine:
    """See `motley.plugins.engine.Engine`. ``extra``: ``host_step`` = function, spinning, memory or split; else
    they are tried while tokens are decoded, and the one stays that makes the quickest steps.

    Raises:
        EngineMemoryError: too little memory.
        EngineError: no GPU, an unknown option, or a graph that this engine has no kernels for.
    """

    keeps_fp16 = True
    cache_formats = CACHE_FORMATS
    keeps_windows = True
    on_gpu = True
    takes_adapters = True

    @staticmethod
    def device_speed() -> DeviceSpeed:
        """See `motley.plugins.installed.device_speed`. Nothing is measured: the driver tells how fast the memory is,
        and the rest is an H200's."""
        return DeviceSpeed(layer_s=LAYER_S, host_s=HOST_S)

    @staticmethod
    def check_machine() -> None:
        """See `motley.plugins.installed.lacking`."""
        try:
            check_gpu()
        except CudaError as error:
            raise EngineError(f"engine 'cuda': {error}") from error

    def __init__(
        self,
        graph: RankGraph,
        collectives: Collectives,
        options: EngineOptions,
        driver: Driver | None = None,
        open_gemm: Callable[[CudaStream], Gemm] | None = open_cublas,
    ) -> None:
        """`driver`: None is the first GPU's. `open_gemm`: what multiplies prompts by floats; None: our own kernels."""
        options.check_extra("cuda", "host_step")
        graph.blocks.check_able("cuda", self.cache_formats, keeps_windows=self.keeps_windows)
        if options.exact:
            raise EngineError("engine 'cuda' does not know exact=true; use engine 'onnxruntime'")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._captures = True
        """Whether capturing is worth a try: neither the driver nor the host steps have refused it yet."""
        self._graphs: dict[tuple[Kind, int], CudaGraph] = {}
        """Captured steps, by their kind and the parts of their attention."""
        self._stepped: Counter[Kind] = Counter()
        """How often steps of each kind have run node by node. Such steps can be captured: their memory is allocated and
        their kernels are loaded."""
        self._memory = ExitStack()
        try:
            with _told():
                self._open(options, driver, open_gemm)
        except BaseException:
            with suppress(DeviceLost):
                self._memory.close()
            raise

    def _open(
        self, options: EngineOptions, driver: Driver | None, open_gemm: Callable[[CudaStream], Gemm] | None
    ) -> None:
        if driver is None:
            own = CudaDriver()
            self._memory.callback(own.close)
            driver = own
        self._driver = driver
        form = options.extra.get("host_step")
        if form is not None and form not in set(HostStep):
            raise EngineError(f"engine 'cuda' has no host step {form!r}; it has: {', '.join(HostStep)}")
        self._trial = Trial([HostStep(form)] if form else self._usable_forms(driver))
        nodes = submitted_nodes(self._graph.proto.graph)
        self._stream = CudaStream(driver, self._trial.form, name="compute")
        self._memory.callback(self._stream.close)
        rows = self._max_rows
        multiply = open_gemm if rows > FEW_ROWS else None
        self._on_device = DeviceGraph(self._graph, nodes, self._stream, self._memory, rows, multiply)
        rotary = RotaryTables(self._graph, self._on_device)
        self._memory.callback(rotary.close)
        self._turns = rotary.firsts
        self._states = RecurrentStates(self._graph, self._on_device)
        self._inputs = StepInputs(self._graph, self._on_device, rotary, rows)
        self._on_device.values["hidden"] = self._inputs.rows
        self._adapting = Adapting(self._graph, self._on_device)
        self._memory.callback(self._adapting.close)
        self._open_head(min(FEW_ROWS, rows))
        rotary.of([0])  # those of most prompts
        self._on_device.upload()
        self._on_device.finish()

    # -- the engine's calls ------------------------------------------------------------------------------------------

    @property
    def most_spans(self) -> int:
        return self._max_rows

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        check_step(self._graph, hidden, spans, self._max_rows, self.most_spans)
        wanted = wanted_rows(spans)
        adapted = self._adapting.computes(spans)
        sees = [*chain.from_iterable(range(each.position + 1, each.position + each.rows + 1) for each in spans)]
        with _told(" failed in a step"):
            if len(wanted) > self._on_device.head_rows:
                self._open_head(self._max_rows)
            lined = self._states.line_up(spans)
            self._inputs.send(hidden, spans, lined)
            began = perf_counter()
            decodes = len(sees) == len(spans) == len(wanted) and not lined.takes_guesses
            alike = decodes or not len(lined.spans)  # what recurrent layers do depends on each span
            rows = [span.rows for span in spans]
            if alike and (len(sees) <= FEW_ROWS or self._on_device.gemm is None):
                self._replay(sees, rows, wanted, halved, adapted, lined)
            else:
                self._submit(sees, rows, wanted, halved, adapted, lined, apart=len(rows) == len(sees))
            self._on_device.finish()
            if len(sees) == 1 and self._trial.took(perf_counter() - began):
                self._change_form()
        return self._logits[: len(wanted) * self._graph.vocabulary].reshape(len(wanted), self._graph.vocabulary)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        with _told(" cannot copy recurrent states"):
            self._states.copy(pairs)

    def prepare_adapter(
        self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None = None
    ) -> PreparedAdapter:
        with _told(" cannot have an adapter"):
            return self._adapting.prepare(products, whole)

    def load_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        with _told(" cannot load an adapter"):
            if self._adapting.load(slot, adapter):
                self._forget_graphs()
                self._stepped.clear()

    def unload_adapter(self, slot: int) -> None:
        with _told(" cannot unload an adapter"):
            self._adapting.unload(slot)

    def close(self) -> None:
        with suppress(DeviceLost), ExitStack() as parts:  # of a device that is lost nothing is left to free
            parts.callback(self._memory.close)
            parts.callback(self._stream.close)  # first: nothing is freed that is still read

    # -- work --------------------------------------------------------------------------------------------------------

    def _usable_forms(self, driver: Driver) -> list[HostStep]:
        if self._collectives.size == 1:
            return [HostStep.FUNCTION]  # of which there are none
        asynchronous = [] if sys.platform == "win32" else measure_host_steps(driver)
        return [*asynchronous, HostStep.SPLIT]

    def _change_form(self) -> None:
        told = ", ".join(f"{form} {1e3 * seconds:.2f} ms" for form, seconds in self._trial.least_s.items())
        log.info("the next steps call the host by form %r; the quickest steps so far: %s", str(self._trial.form), told)
        self._forget_graphs()
        self._stream.call_host_by(self._trial.form)
        self._captures = True

    def _open_head(self, rows: int) -> None:
        """Make room for the logits of so many rows. They are wide: at first there is room for decoded tokens only."""
        self._forget_graphs()
        self._stepped.clear()
        self._on_device.head_rows = rows
        self._logits = self._on_device.pinned(4 * rows * self._graph.vocabulary).view(np.float32)

    def _submit(
        self,
        sees: Sequence[int],
        spans: Sequence[int],
        wanted: list[int],
        halved: bool,
        adapted: bool,
        lined: Lined,
        *,
        apart: bool,
    ) -> None:
        """Submit a step whose operands have been sent, up to the staging for logits; see `submit_nodes`."""
        device, count = self._on_device, len(sees)
        step = StepRows(
            places=self._inputs.places(count),
            sees=sees,
            spans=spans,
            apart=apart,
            wanted=wanted,
            chunks=micro_chunks(count, halved),
            turns=self._turns,
            lined_up=self._inputs.lined_up(count, lined),
            states=self._states,
        )
        submit_nodes(device, transport(self._collectives), step, self._adapting if adapted else None)
        if elements := len(wanted) * self._graph.vocabulary:
            source = device.values["logits"].address
            self._driver.copy(self._logits.ctypes.data, source, 4 * elements, self._stream.handle)

    def _replay(
        self, sees: Sequence[int], spans: Sequence[int], wanted: list[int], halved: bool, adapted: bool, lined: Lined
    ) -> None:
        """Submit a step as `_submit` does, at first node by node. A kind of step that comes again is captured, and
        replayed from then on. The parts of its attention are as many as twice the positions might need, so that it is
        seldom captured anew, and rows that are not all of one sequence may be of any.
        """
        count, parts = len(sees), 1 << (parts_of(max(sees)) - 1).bit_length()
        sees_most = [min(parts, parts_of(self._graph.context)) * PART] * count
        company = Company.of(spans, count)
        any_spans, apart = [count] if company is Company.TOGETHER else [1] * count, company is Company.APART
        choosing_from = self._on_device.all_seen
        wants = transport(self._collectives), count, tuple(wanted), halved, adapted, company
        kind = Kind(*wants, min(sees_most[0], self._graph.context) > choosing_from)
        graph = self._graphs.pop((kind, parts), None)
        often = 1 if count == len(wanted) else OFTEN
        if graph is None and self._captures and self._stepped[kind] >= often:
            submit = partial(self._submit, sees_most, any_spans, wanted, halved, adapted, lined, apart=apart)
            graph = self._capture(submit)
        if graph is not None:
            self._graphs[kind, parts] = graph  # the last of them: it was used last
            self._stream.replay(graph)
        else:
            self._submit(sees, spans, wanted, halved, adapted, lined, apart=apart)
            self._stepped[Kind(*wants, max(sees) > choosing_from)] += 1

    def _capture(self, submit: Callable[[], None]) -> CudaGraph | None:
        while len(self._graphs) >= GRAPHS_KEPT:
            self._graphs.pop(next(iter(self._graphs))).close()
        try:
            return self._stream.capture(submit)
        except DeviceLost:
            raise
        except OutOfDeviceMemory as error:
            log.info("steps are submitted node by node from now on, as captured ones take memory: %s", error)
            self._forget_graphs()
            self._captures = False
            return None
        except CudaError as error:
            log.info("steps are submitted node by node, as they cannot be captured: %s", error)
            self._captures = False
            return None

    def _forget_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()
