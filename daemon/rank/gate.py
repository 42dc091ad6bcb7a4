"""The start-up gate: before a rank serves, its engine must compute what the reference computes from the same share.

A rank is examined alone. In place of the transport its engine gets a `Proctor`: it takes a *fingerprint* of every
partial sum that the rank hands in, and hands back noise as the sum over all ranks; and noise too as what experts
elsewhere make of their rows. The residual that enters a layer is then known beforehand, whatever the layers before it
computed, so the reference has to run a few layers only (and of the others what changes the residual by itself), and an
error is found where it arises: the first and the last layer of each *kind* (those of a kind have the same operators,
windows, shapes and types of weights), and one in the middle. That other layers' weights are what was written, the
share's checksum tells.

The exam is a few tokens at the beginning of a sequence and a few far inside it, as prompts and as single tokens, a
longer prompt, and two sequences at once: these are different kernels, shapes and rotary positions. What lies before the
far tokens is the longer prompt, and after that zero, as all blocks of caches are at first. Where a rank has recurrent
states, the far tokens follow the longer prompt, as a state goes on where it stands and nowhere else.

Where layers choose the positions that rows see, fewer than lie before the far tokens, these follow the first five
alone. Zeros score 0, so the sign of its score says whether one of the few others is seen, and rounding turns a sign
now and then: a right engine has another answer in one row of thirty, one that chooses wrongly in nearly all of them. So
there are more of these rows, and they are judged one by one (`motley.daemon.loading.answers.CHOICES`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx

from motley.daemon.loading.answers import (
    CHOICES,
    F64,
    LOGITS,
    Answers,
    GateError,
    difference,
    fingerprint,
    kept_answers,
    noise,
)
from motley.plugins.engine import (
    F32,
    CacheBlocks,
    Collectives,
    Engine,
    EngineFactory,
    EngineOptions,
    Pending,
    RankGraph,
    Span,
)
from motley.plugins.mixture import Compute, Sent
from motley.plugins.nodes import all_seen, attributes_of, is_collective, is_experts, reads
from motley.plugins.recurrent import ROWS_READ
from motley.plugins.streams import WRITE_STREAMS

FAR = 4000
"""The position of the far tokens in their sequence; or the end of the context, or of what all blocks hold, if that
comes before. Where there are recurrent states: `LONG`; where positions are chosen, at least twice as many."""
LONG = 48
"""Tokens of the longer prompt."""
CHOOSING, CHOOSING_ALONE = 12, 7
"""Far tokens of a prompt, and single ones before it, where layers choose what these see."""
_LAYER = re.compile(r"layers\.(\d+)\.")
_COLLECTIVE = re.compile(r"layers\.(?P<layer>\d+)\.(?P<part>attention|mlp|dense)\.(?P<scales>squares|moments)?")
_CACHE = re.compile(r"(?:key|value|index)_cache\.(\d+)")


@dataclass(frozen=True)
class _Question:
    """A step of the exam: some tokens of one sequence or two, of whose last ones the logits are wanted.

    Attributes:
        parts: of each sequence the position of its first token, and how many there are. The first sequence has the
            blocks from the last one down, the second those from the first one up. Of layers with a window they are the
            same round and round, where these have fewer.
        chooses: whether layers choose among more positions than the tokens see.
    """

    parts: tuple[tuple[int, int], ...]
    chooses: bool = False

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.parts)

    def __str__(self) -> str:
        return " and ".join(f"{tokens} tokens from position {position}" for position, tokens in self.parts)

    @property
    def heading(self) -> str:
        """What answers are kept under: the rows of choices together, those of a prompt and those of single tokens."""
        return f"{'a prompt' if self.tokens > 1 else 'single tokens'} far inside" if self.chooses else str(self)

    def spans(self, blocks: CacheBlocks) -> list[Span]:
        """What an engine is asked."""
        up = np.arange(blocks.count, dtype=np.int32)
        around = up % blocks.windowed if blocks.windowed else up
        tables = (np.ascontiguousarray(up[::-1]), up)
        windowed = (np.ascontiguousarray((blocks.windowed or blocks.count) - 1 - around), around)
        return [
            Span(table, *part, wanted=1, windowed=own, slot=slot)
            for slot, (table, own, part) in enumerate(zip(tables, windowed, self.parts, strict=False))
        ]


def _questions(graph: RankGraph, spans: int) -> list[_Question]:
    """The steps of the exam of a rank whose engine takes so many spans."""
    blocks = graph.blocks
    context = min(graph.context, blocks.count * blocks.tokens)
    choosing = _choosing(graph, context)
    far = LONG if graph.states else min(FAR, context - 4)  # a recurrent state goes on where it stands alone
    asked = [[(0, 5)], [(5, 1)], [(6, 1)], [(0, LONG)]]  # the second token alone may repeat commands of the first
    if far >= 2 and not choosing:
        asked += [[(far, 3)], [(far + 3, 1)]]
    asked += [[(0, 2)]]
    fewest = min(blocks.count, blocks.windowed or blocks.count)
    slots = blocks.slots if graph.states else spans
    if min(spans, slots) > 1 and (fewest - 1) * blocks.tokens >= 7:  # together they need no more than there is
        asked += [[(2, 1), (0, 3)]]
    fitting = [parts for parts in asked if all(position + tokens <= context for position, tokens in parts)]
    first, *others = (_Question(tuple(parts)) for parts in fitting or [[(0, context)]])
    return [first, *choosing, *others]


def _choosing(graph: RankGraph, context: int) -> list[_Question]:
    """The steps of far tokens that see some positions of more; none, if they see all, or states go on elsewhere.

    Backwards, so that none sees another's tokens.
    """
    seen = all_seen(graph.proto.graph.node, context)
    far = min(max(FAR, 2 * seen), context - CHOOSING - CHOOSING_ALONE)
    if graph.states or far < 5 or seen >= context:
        return []
    alone = reversed(range(far + CHOOSING, far + CHOOSING + CHOOSING_ALONE))
    return [_Question((part,), chooses=True) for part in (*((position, 1) for position in alone), (far, CHOOSING))]


@dataclass(frozen=True)
class _Call:
    """A collective that an engine calls in a layer.

    Attributes:
        part: ``attention``, ``mlp``, or ``dense`` for an MLP beside experts.
        scales: ``squares`` where it is about sums of squares, by which queries and keys are scaled, ``moments`` where
            about the sums and the sums of squares of gates, which say what of them counts; else empty.
    """

    layer: int
    part: str
    scales: str

    def __str__(self) -> str:
        return f"layer {self.layer} {self.part} {self.scales}".rstrip()


def _calls(graph: RankGraph) -> list[_Call]:
    """The collectives that a step calls, in order.

    Raises:
        GateError: the name of one does not say which layer it is in: what it is about cannot be examined.
    """
    calls = []
    for node in filter(is_collective, graph.proto.graph.node):
        name = _COLLECTIVE.match(node.name)
        if name is None:
            raise GateError(f"the graph has a collective that belongs to no part of a layer: {node.name!r}")
        calls.append(_Call(int(name["layer"]), name["part"], name["scales"] or ""))
    return calls


class Proctor:
    """Collectives of a rank that is being examined; see `motley.plugins.engine.Collectives`.

    Attributes:
        answers: fingerprints f64[T, PROJECTIONS] of what was handed in at the examined layers, by what it was.
        examines: what it gives back is no sum, see `motley.plugins.engine.is_alone`.
    """

    examines: ClassVar[bool] = True

    def __init__(self, rank: int, size: int, calls: Sequence[_Call], examined: Sequence[int]) -> None:
        """`calls` are those that the engine will make in each step, in order; `examined` are layers."""
        self.rank = rank
        self.size = size
        self.answers: dict[str, F64] = {}
        self._calls = calls
        self._examined = set(examined)
        self._question = _Question(())
        self._made = 0

    def ask(self, question: _Question) -> None:
        """A step of the exam begins."""
        self._question, self._made = question, 0

    def check_all_called(self) -> None:
        """A step of the exam ends.

        Raises:
            GateError: the engine has left out collectives.
        """
        if self._made < len(self._calls):
            raise GateError(
                f"the engine has called {self._made} collectives for {self._question}, not the {len(self._calls)} of"
                f" the graph: {self._calls[self._made]} is missing"
            )

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
            made = noise(what, shape) if examined else np.zeros(shape, np.float32)
            results.append(made[np.minimum(own.rows, tokens - 1)])
        return results

    def _exchange(self, local: F32, results: Sequence[F32]) -> None:
        """Keep what the rank hands in, f32[..., T, D], and fill the results.

        An engine may run more rows than it was asked for; these do not count.

        Raises:
            GateError: the graph has no further collective.
        """
        if self._made == len(self._calls):
            raise GateError(f"the engine calls more collectives for {self._question} than the graph's {self._made}")
        call, tokens = self._calls[self._made], self._question.tokens
        self._made += 1
        examined = call.layer in self._examined
        if examined and local.size:
            self.keep(str(call), local[..., :tokens, :].reshape(-1, local.shape[-1]))
        if call.scales:
            # What is scaled by them must be of the right size: as if all ranks had the like. Either of two sums of
            # squares may be counted by another rank; their sum is not zero.
            rows = local.reshape(-1, *local.shape[-2:]).sum(axis=0)
            if call.scales == "squares":
                rows = rows.sum(axis=1)[:, None]
            terms = sum(len(result) if result.ndim > 2 else 1 for result in results)
            for result in results:
                result[...] = self.size * rows / terms
            return
        for number, result in enumerate(results):
            asked = result[..., :tokens, :]
            asked[...] = noise(f"{call} {number} {self._question}", asked.shape) if examined else 0
            result[..., tokens:, :] = asked[..., -1:, :]

    def keep(self, what: str, values: F32) -> None:
        """Take the fingerprint of f32[T, N]; where positions are chosen, of attention alone, as only that sees them."""
        question, answer = self._question, fingerprint(values)
        name = f"{what} of {question.heading}"
        if not question.chooses:
            self.answers[name] = answer
        elif what.endswith(" attention"):
            name = f"{CHOICES} of {name}"
            before = self.answers.get(name)
            self.answers[name] = answer if before is None else np.concatenate([before, answer])


class _Finished:
    """A collective that has been done by the time it was started; see `motley.plugins.engine.Pending`."""

    def advance(self) -> None:
        pass

    def finish(self) -> None:
        pass


def reference_answers(
    graph: RankGraph, rank: int, size: int, build: EngineFactory, folder: Path | None = None, *, anew: bool = False
) -> Answers:
    """What the reference answers for a rank's share. It computes the examined layers only.

    Args:
        build: makes the reference engine.
        folder: where the answers are kept for the next time, with the share they are about; None: nowhere.
        anew: compute them even if they are kept.
    """
    compute = partial(_computed_answers, graph, rank, size, build)
    return kept_answers(graph.proto, compute, folder, anew, graph.blocks.format)


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
        """What collectives go through now, by the name that `motley.plugins.engine.transport` looks for."""

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
            expected: answers of the reference.
            anew: asks the reference again, where `expected` have been kept: they may be to other questions, or by
                another reference.

        Raises:
            GateError: an answer is not the reference's.
        """
        asked = tuple(f" of {question.heading}" for question in _ask_all(engine, self._proctor, self._graph))

        def about(answers: Answers) -> Answers:
            """The reference's answers to what this engine could be asked."""
            return {what: values for what, values in answers.items() if what.endswith(asked)}

        wrong = difference(self._proctor.answers, about(expected))
        if wrong and anew is not None:
            wrong = difference(self._proctor.answers, about(anew()))
        if wrong:
            raise GateError(wrong)
        self.now = self._session


def _ask_all(engine: Engine, proctor: Proctor, graph: RankGraph) -> list[_Question]:
    """Ask all that an engine can be asked; what was asked."""
    questions = _questions(graph, engine.most_spans)
    for question in questions:
        proctor.ask(question)
        rows = noise(str(question), (question.tokens, graph.entering))
        logits = engine.step(rows, question.spans(graph.blocks))
        proctor.check_all_called()
        if graph.vocabulary:
            proctor.keep(LOGITS, logits)
    return questions


def _examined(graph: RankGraph) -> list[int]:
    """The first and the last layer of each kind, and one in the middle."""
    stored = {tensor.name: (tensor.data_type, *tensor.dims) for tensor in graph.proto.graph.initializer}
    naming = ("layer", "parts")  # attributes that name layers
    traits: dict[int, list[object]] = {}
    for node in graph.proto.graph.node:
        if found := _LAYER.match(node.name):
            alike = (each for each in node.attribute if not each.graphs and each.name not in naming)
            plain = sorted(each.SerializeToString() for each in alike)
            weights = [stored[name] for name in node.input if name in stored]
            traits.setdefault(int(found[1]), []).append((node.op_type, plain, weights))
    kinds: dict[str, list[int]] = {}
    for layer, kind in sorted(traits.items()):
        kinds.setdefault(repr(kind), []).append(layer)
    layers = sorted(traits)
    chosen = sorted({layers[len(layers) // 2], *(layer for kind in kinds.values() for layer in (kind[0], kind[-1]))})
    return sorted({*chosen, *(other for layer in chosen for other in _read_by(graph, layer))})


def _read_by(graph: RankGraph, layer: int) -> set[int]:
    """The layers before the one before it whose keys and values a layer reads."""
    nodes = (node for node in graph.proto.graph.node if (found := _LAYER.match(node.name)) and int(found[1]) == layer)
    read = (_LAYER.match(name) for node in nodes for name in node.input if not name.endswith(".residual"))
    return {int(found[1]) for found in read if found} - {layer}


def _only(graph: RankGraph, layers: Sequence[int]) -> RankGraph:
    """The same graph without what other layers exchange, for which the proctor gives them zeros; what they change of
    the residual by themselves (Gemma 4 scales it, and adds rows of the token; streams are mixed) stays.

    What lies between a sum and the residual must make zero of zero, as norms and scales without a bias do.
    """
    equals: dict[str, str | None] = {}
    """By name of a value: another that it equals; None: it is zero, and so is what is made of it."""
    left: list[onnx.NodeProto] = []

    def stays(name: str, pattern: re.Pattern[str]) -> bool:
        found = pattern.match(name)
        return found is None or int(found[1]) in layers

    for node in graph.proto.graph.node:
        read = [equals.get(name, name) for name in node.input]
        zeros = read.count(None)
        if stays(node.name, _LAYER) or not (zeros or is_collective(node) or is_experts(node)):
            left.append(_reading(node, read))
        elif node.op_type == "Add" and zeros == 1:
            equals[node.output[0]] = read[0] or read[1]
        elif node.op_type == WRITE_STREAMS and read[-1] is None:
            left.append(_reading(node, read[:-1]))  # they are mixed by themselves
        else:
            equals.update(dict.fromkeys(node.output))

    wanted = {value.name for value in graph.proto.graph.output if stays(value.name, _CACHE)}
    needed = []
    for node in reversed(left):
        if stays(node.name, _LAYER) or wanted.intersection(node.output):
            wanted.update(reads(node))
            needed.append(node)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(needed))

    for values in (proto.graph.input, proto.graph.output):
        staying = [value for value in values if stays(value.name, _CACHE)]
        del values[:]
        values.extend(staying)
    caches = [spec for spec in graph.caches if spec.layer in layers]
    changed = {attributes_of(node)["layer"] for node in needed if node.op_type in ROWS_READ}
    states = [each for each in graph.states if each.layer in changed]
    return replace(graph, proto=proto, caches=caches, states=states)


def _reading(node: onnx.NodeProto, names: Sequence[str | None]) -> onnx.NodeProto:
    """The same node with inputs of other names, none of which is zero: the proctor gives what is examined no zeros."""
    same = onnx.NodeProto()
    same.CopyFrom(node)
    assert None not in names, f"{node.name} reads zeros"
    same.input[:] = [name for name in names if name is not None]
    return same
