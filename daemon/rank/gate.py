"""The start-up gate: before a rank serves, its engine must compute what the reference computes from the same share.

A rank is examined alone. In place of the transport its engine gets a `Proctor`: it takes a *fingerprint* of every
partial sum that the rank hands in, and hands back noise as the sum over all ranks; and noise too as what experts
elsewhere make of their rows. The residual that enters a layer is then known beforehand, whatever the layers before it
computed, so the reference has to run a few layers only, and an error is found where it arises: the first and the last
layer of each *kind* (those of a kind have the same operators, windows, shapes and types of weights), and one in the
middle. That other layers' weights are what was written, the share's checksum tells.

The exam is a few tokens at the beginning of a sequence and a few far inside it, as prompts and as single tokens, and a
longer prompt: these are different kernels, shapes and rotary positions.

A whole expert that a host holds is examined too: each of them, on a few rows of noise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import onnx

from motley.plugins.engine import F32, Collectives, Engine, EngineFactory, EngineOptions, Pending, RankGraph
from motley.plugins.expert_engine import Expert, ExpertEngine, ExpertGraph
from motley.plugins.mixture import Compute, Sent
from motley.plugins.nodes import is_collective

F64 = npt.NDArray[np.float64]
Answers = Mapping[str, F64]
"""Fingerprints, by what they are of."""

FORMAT = 2
"""Of kept answers; to be raised whenever other questions are asked, or answers taken otherwise."""

PROJECTIONS = 8
"""Random directions that a row is measured along: a wrong row stays undetected only if it is wrong across all."""
FAR = 4000
"""Where in a sequence the far tokens are, or at the end of the context."""
LONG = 48
"""Tokens of the longer prompt."""
EXPERT_ROWS = (1, 5)
"""An expert is given so many rows: these are different kernels."""
LIMIT = 0.1
"""Of the fingerprint's norm. Activations quantised to int8 per block make 0.02, a misread weight by 1."""
LOGITS = "logits"
"""What their fingerprints' names begin with."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_COLLECTIVE = re.compile(r"layers\.(?P<layer>\d+)\.(?P<part>attention|mlp)\.(?P<squares>squares)?")
_CACHE = re.compile(r"(?:key|value)_cache\.(\d+)")


class GateError(Exception):
    """This rank computes wrongly; the message says where, and by how much."""


@dataclass(frozen=True)
class _Question:
    """Some tokens of a sequence; logits of the last are wanted."""

    slot: int
    position: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens from position {self.position}"


def _questions(context: int) -> list[_Question]:
    far = min(FAR, context - 4)
    asked = [_Question(0, 0, 5), _Question(0, 5, 1), _Question(1, 0, 2), _Question(2, 0, LONG)]
    if far >= 2:
        asked += [_Question(1, far, 3), _Question(1, far + 3, 1)]
    return [each for each in asked if each.position + each.tokens <= context] or [_Question(0, 0, context)]


@dataclass(frozen=True)
class _Call:
    """A collective of a layer; `squares`: of sums of squares, by which queries and keys are scaled."""

    layer: int
    part: str
    squares: bool

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part}{' squares' if self.squares else ''}"


def _calls(graph: RankGraph) -> list[_Call]:
    names = [_COLLECTIVE.match(node.name) for node in graph.proto.graph.node if is_collective(node)]
    return [_Call(int(name["layer"]), name["part"], name["squares"] is not None) for name in names if name]


class Proctor:
    """Collectives of a rank that is being examined; see `motley.plugins.engine.Collectives`.

    Attributes:
        answers: fingerprints f64[T, PROJECTIONS] of what was handed in at the examined layers, by what it was.
    """

    def __init__(self, rank: int, size: int, calls: Sequence[_Call], examined: Sequence[int]) -> None:
        """`calls` are those that the engine will make in each step, in order; `examined` are layers."""
        self.rank = rank
        self.size = size
        self.answers: dict[str, F64] = {}
        self._calls = calls
        self._examined = set(examined)
        self._question = _Question(0, 0, 0)
        self._made = 0

    def ask(self, question: _Question) -> None:
        self._question, self._made = question, 0

    def all_reduce(self, buffer: F32) -> None:
        self._exchange(buffer, [buffer])

    def all_reduce_start(self, buffer: F32) -> Pending:
        self.all_reduce(buffer)
        return _Finished()

    def all_gather(self, local: F32, out: Sequence[F32]) -> None:
        self._exchange(local, out)

    def experts(self, layer: int) -> Compute:
        return partial(self._compute, layer)

    def _compute(self, layer: int, x: F32, sent: Sequence[Sent]) -> list[F32]:
        """Keep the rows that experts elsewhere would get, f32[T, D], and make noise of them."""
        examined, tokens = layer in self._examined, self._question.tokens
        if examined:
            self.keep(f"layer {layer} experts", x[:tokens])
        shape = (tokens, x.shape[1])
        results = []
        for own in sent:
            what = f"layer {layer} expert {own.expert} {self._question}"
            noise = _noise(what, shape) if examined else np.zeros(shape, np.float32)
            results.append(noise[np.minimum(own.rows, tokens - 1)])
        return results

    def _exchange(self, local: F32, results: Sequence[F32]) -> None:
        """Keep what the rank hands in, f32[..., T, D], and fill the results.

        An engine may run more rows than it was asked for; these do not count.
        """
        call, tokens = self._calls[self._made], self._question.tokens
        self._made += 1
        examined = call.layer in self._examined
        if examined and local.size:
            self.keep(str(call), local[..., :tokens, :].reshape(-1, local.shape[-1]))
        if call.squares:
            # They scale queries and keys, so their size must be right: as if all ranks had the like. Either of the two
            # may be counted by another rank; their sum is not zero.
            rows = local.reshape(-1, *local.shape[-2:]).sum(axis=(0, 2))[:, None]
            terms = sum(len(result) if result.ndim > 2 else 1 for result in results)
            for result in results:
                result[...] = self.size * rows / terms
            return
        for number, result in enumerate(results):
            asked = result[..., :tokens, :]
            asked[...] = _noise(f"{call} {number} {self._question}", asked.shape) if examined else 0
            result[..., tokens:, :] = asked[..., -1:, :]

    def keep(self, what: str, values: F32) -> None:
        """Take the fingerprint of f32[T, N]."""
        self.answers[f"{what} of {self._question}"] = _fingerprint(values)


class _Finished:
    """Nothing is left to wait for."""

    def finish(self) -> None:
        pass


def reference_answers(
    graph: RankGraph, rank: int, size: int, build: EngineFactory, folder: Path | None = None, *, anew: bool = False
) -> Answers:
    """What the engine of `build`, the reference, answers for a rank's share; it computes the examined layers only.

    Args:
        folder: where the answers are kept for the next time, with the share they are about.
        anew: although they are kept.
    """
    return _kept(graph.proto, lambda: _computed_answers(graph, rank, size, build), folder, anew)


def _kept(proto: onnx.ModelProto, compute: Callable[[], Answers], folder: Path | None, anew: bool) -> Answers:
    """The answers of a graph that are kept in `folder`, if they are; otherwise they are computed, and kept."""
    if folder is None:
        return compute()
    digest = sha256(f"{FORMAT}\n".encode() + proto.SerializeToString(deterministic=True)).hexdigest()
    kept = folder / f"answers-{digest[:16]}.npz"
    if anew:
        kept.unlink(missing_ok=True)
    with suppress(OSError, ValueError, EOFError, BadZipFile), kept.open("rb") as file, np.load(file) as stored:
        return dict(stored)
    answers = compute()
    partial = kept.with_suffix(f".{os.getpid()}.partial.npz")
    with suppress(OSError):  # without room for them they are computed again
        np.savez(partial, **answers)  # type: ignore[arg-type]
        os.replace(partial, kept)
    return answers


def _computed_answers(graph: RankGraph, rank: int, size: int, build: EngineFactory) -> Answers:
    examined = _examined(graph)
    part = _only(graph, examined)
    proctor = Proctor(rank, size, _calls(part), examined)
    engine = build(part, proctor, EngineOptions())
    try:
        _ask_all(engine, proctor, graph)
    finally:
        engine.close()
    return proctor.answers


class Gate:
    """Collectives of an engine: a `Proctor`'s until the exam is passed, the session's from then on."""

    def __init__(self, graph: RankGraph, session: Collectives) -> None:
        self.rank = session.rank
        self.size = session.size
        self._graph = graph
        self._session = session
        self._proctor = Proctor(self.rank, self.size, _calls(graph), _examined(graph))
        self.now: Collectives = self._proctor
        """See `motley.plugins.engine.transport`."""

    def all_reduce(self, buffer: F32) -> None:
        self.now.all_reduce(buffer)

    def all_reduce_start(self, buffer: F32) -> Pending:
        return self.now.all_reduce_start(buffer)

    def all_gather(self, local: F32, out: Sequence[F32]) -> None:
        self.now.all_gather(local, out)

    def experts(self, layer: int) -> Compute:
        def compute(x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
            return self.now.experts(layer)(x, sent)

        return compute

    def open(self, engine: Engine, expected: Answers, anew: Callable[[], Answers] | None = None) -> None:
        """Examine the engine that was built with these collectives; let it through to the session.

        Args:
            expected: answers of the reference; if they have been kept...
            anew: ...they may be to other questions, or by another reference: this asks it again.

        Raises:
            GateError: an answer is not the reference's.
        """
        _ask_all(engine, self._proctor, self._graph)
        wrong = _difference(self._proctor.answers, expected)
        if wrong and anew is not None:
            wrong = _difference(self._proctor.answers, anew())
        if wrong:
            raise GateError(wrong)
        self.now = self._session


def _difference(answers: Answers, expected: Answers) -> str:
    """What is wrong with the answers, if anything is."""
    if answers.keys() != expected.keys():
        return f"this rank answers other questions than the reference: {sorted(answers.keys() ^ expected.keys())[0]}"
    usual = _usual_logits(expected)
    for what, right in expected.items():
        error = _error(answers[what], right, usual if what.startswith(LOGITS) else 0.0)
        if not error <= LIMIT:  # a NaN is not
            return (
                f"this rank computes wrongly: {what} differs from the reference by {error:.3g} of its norm (at most"
                f" {LIMIT:g} is rounding). Leave this node out, or have it use another engine or driver; if none is"
                " right, its memory may be faulty"
            )
    return ""


def examine_expert(expert: Expert, graph: ExpertGraph, reference: ExpertEngine) -> None:
    """Make sure that an expert, opened from `graph`, computes what the reference makes of it.

    The reference's answers are kept beside the share file, as a rank's are.

    Raises:
        GateError: it does not.
    """

    def ask_reference(anew: bool) -> Answers:
        return _kept(graph.proto, lambda: _reference_expert_answers(graph, reference), graph.share_file.parent, anew)

    answers = _expert_answers(expert, graph)
    wrong = _difference(answers, ask_reference(False))
    if wrong:
        wrong = _difference(answers, ask_reference(True))
    if wrong:
        raise GateError(wrong)


def _reference_expert_answers(graph: ExpertGraph, reference: ExpertEngine) -> Answers:
    with closing(reference.open(graph)) as expert:
        return _expert_answers(expert, graph)


def _expert_answers(expert: Expert, graph: ExpertGraph) -> Answers:
    name = graph.proto.graph.name
    return {
        f"{name} of {rows} rows": _fingerprint(expert(_noise(f"{name} {rows}", (rows, graph.hidden))))
        for rows in EXPERT_ROWS
    }


def _fingerprint(values: F32) -> F64:
    """f64[T, PROJECTIONS] of f32[T, N]."""
    width = values.shape[1]
    directions = np.sign(_noise(f"{width} directions", (width, PROJECTIONS)))
    return values.astype(np.float64) @ directions


def _noise(seed: str, shape: tuple[int, ...]) -> F32:
    return np.random.default_rng(list(seed.encode())).standard_normal(shape, np.float32)


def _usual_logits(answers: Answers) -> float:
    """The norm of a row of logits, over all questions.

    A single row of a small slice may nearly vanish along the direction that its weights share, where rounding does not.
    """
    norms = [np.linalg.norm(values, axis=1) for what, values in answers.items() if what.startswith(LOGITS)]
    return float(np.sqrt(np.mean(np.concatenate(norms) ** 2))) if norms else 0.0


def _error(got: F64, right: F64, least: float) -> float:
    """As a part of the norm, or of `least` if that is more."""
    scale = max(float(np.linalg.norm(right)), least)
    error = float(np.linalg.norm(got - right))
    return error / scale if scale else error


def _ask_all(engine: Engine, proctor: Proctor, graph: RankGraph) -> None:
    questions = _questions(graph.context)
    lengths = dict.fromkeys(sorted({question.slot for question in questions}), 0)
    for slot in lengths:
        engine.open_slot(slot)
    for question in questions:
        proctor.ask(question)
        if question.position > lengths[question.slot]:
            engine.skip(question.slot, question.position)
        lengths[question.slot] = question.position + question.tokens
        rows = _noise(str(question), (question.tokens, graph.hidden))
        if question.tokens == 1:
            logits = engine.decode([question.slot], rows, [question.position])
        else:
            logits = engine.step(question.slot, rows, question.position, [question.tokens - 1])
        if graph.vocabulary:
            proctor.keep(LOGITS, logits)
    for slot in lengths:
        engine.close_slot(slot)


def _layers(nodes: Iterable[onnx.NodeProto]) -> list[int]:
    return sorted({int(found[1]) for node in nodes if (found := _LAYER.match(node.name))})


def _examined(graph: RankGraph) -> list[int]:
    """The first and the last layer of each kind, and one in the middle."""
    stored = {tensor.name: (tensor.data_type, *tensor.dims) for tensor in graph.proto.graph.initializer}
    traits: dict[int, list[object]] = {}
    for node in graph.proto.graph.node:
        if found := _LAYER.match(node.name):
            alike = (each for each in node.attribute if not each.graphs and each.name != "layer")  # those name layers
            plain = sorted(each.SerializeToString() for each in alike)
            weights = [stored[name] for name in node.input if name in stored]
            traits.setdefault(int(found[1]), []).append((node.op_type, plain, weights))
    kinds: dict[str, list[int]] = {}
    for layer, kind in sorted(traits.items()):
        kinds.setdefault(repr(kind), []).append(layer)
    layers = sorted(traits)
    return sorted({layers[len(layers) // 2], *(layer for kind in kinds.values() for layer in (kind[0], kind[-1]))})


def _only(graph: RankGraph, layers: Sequence[int]) -> RankGraph:
    """The same graph without the other layers: each goes on from the residual of the one before that is there."""
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)

    def stays(name: str, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(name)
        return found is None or int(found[1]) in layers

    residual = {}
    latest = "hidden"
    for layer in _layers(graph.proto.graph.node):
        ends = f"layers.{layer}.mlp.residual"
        latest = ends if layer in layers else latest
        residual[ends] = latest
    del proto.graph.node[:]
    for node in graph.proto.graph.node:
        if stays(node.name, _LAYER):
            kept = proto.graph.node.add()
            kept.CopyFrom(node)
            kept.input[:] = [residual.get(name, name) for name in node.input]
    for values in (proto.graph.input, proto.graph.output):
        staying = [value for value in values if stays(value.name, _CACHE)]
        del values[:]
        values.extend(staying)
    return replace(graph, proto=proto, caches=[spec for spec in graph.caches if spec.layer in layers])
