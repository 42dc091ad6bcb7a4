"""A small model on rank 0 that guesses how the texts of a session's requests go on; only its token ids leave it.

It chooses tokens as the session's model does: by the same sampler, with the noise of the same (seed, step, token). So
the two agree, on sampled texts too, wherever their logits are alike enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.blocks.roots import root_of
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.guessing.in_steps import in_steps
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.steps import Close, More, Open, SpanPlan, Step, split
from motley.daemon.sampling.choice import LogitsError, NeedMore, choose, initial_want
from motley.daemon.sampling.parameters import SamplingParams
from motley.plugins.engine import CacheBlocks
from motley.protocol import mesh_pb2 as pb


@dataclass
class _Text:
    """What the draft model has of a request's text.

    Attributes:
        slot: of the sequence, in the executor.
        params: how its tokens are chosen.
        root: see `BlockStore.find`.
        blocks: its cache blocks.
        told: how many of these the executor knows of.
        written: the tokens whose keys and values are in the blocks; the last ones may be guesses.
        checked: how many of them are surely the text's.
        published: blocks that other texts may find already.
        hopeless: it has a token that the draft model does not know, or one made its logits no numbers.
    """

    slot: int
    params: SamplingParams
    root: int
    blocks: list[int]
    written: list[int]
    told: int = 0
    checked: int = 0
    published: int = 0
    hopeless: bool = False


@dataclass(frozen=True)
class _Row:
    """The next tokens of a text for the draft model to compute, and whether it is to choose the one after them."""

    text: _Text
    request: Request
    tokens: Sequence[int]
    wanted: bool


@dataclass
class DraftModel:
    """Guesses the next tokens of requests; see `motley.daemon.rank.guessing.drafting.Drafter`.

    Attributes:
        executor: of the only rank that the draft model has.
        blocks: of its caches.
        context: the longest text that it can go on with, in tokens.
        same_tables: the shortest prompt with the same rotary tables as one of a length, see `RankGraph.same_tables`.
        max_rows: tokens that one step of its own may have.
        vocabulary: tokens that it knows.
        known: tokens that the session's model knows; it guesses no others.
    """

    executor: Executor
    blocks: CacheBlocks
    context: int
    same_tables: Callable[[int], int]
    max_rows: int
    vocabulary: int
    known: int
    _texts: dict[Request, _Text] = field(default_factory=dict)
    _slots: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self._store = BlockStore(self.blocks.count, self.blocks.tokens)

    def unread(self, request: Request) -> int | None:
        """How many tokens of a request's text, but for the last one, it has not read; None: it cannot guess how it goes
        on, as the text is too long for it or has tokens that it does not know."""
        if len(request.tokens) > self.context:
            return None
        text = self._texts.get(request)
        if text is None:
            return len(request.tokens) - 1
        return None if text.hopeless else len(request.tokens) - 1 - self._follow(text, request)

    def read(self, request: Request, tokens: int) -> float:
        """Read the next tokens of a text, so many at most; the seconds that it took.

        Raises:
            motley.plugins.engine.EngineError: from its engine.
        """
        began = time.perf_counter()
        text = self._begun(request)
        at = self._follow(text, request)
        new = request.tokens[at : min(at + tokens, at + self.max_rows, len(request.tokens) - 1)]
        if new and self._can_take(text, new, len(new)):
            self._compute([_Row(text, request, new, False)])
        return time.perf_counter() - began

    def guess(self, wanted: Sequence[tuple[Request, int]]) -> tuple[list[list[int]], float]:
        """Guess the next tokens of some texts, of each as many as wanted, or fewer; and the seconds that it took.

        Raises:
            motley.plugins.engine.EngineError: from its engine.
        """
        began = time.perf_counter()
        guesses: dict[Request, list[int]] = {request: [] for request, _ in wanted}
        left = {}
        rows = []
        for request, number in wanted:
            text = self._begun(request)
            new = request.tokens[self._follow(text, request) :]
            left[request] = min(number, self.context - len(request.tokens) + 1)
            if left[request] <= 0 or not self._can_take(text, new, len(new) + left[request] - 1):
                continue
            while len(new) > self.max_rows:
                self._compute([_Row(text, request, new[: self.max_rows], False)])
                new = new[self.max_rows :]
            rows.append(_Row(text, request, new, True))
        while rows:
            going_on = []
            for row, token in zip(rows, self._compute(rows), strict=True):
                if token is None or token >= self.known:
                    continue
                guesses[row.request].append(token)
                if len(guesses[row.request]) < left[row.request] and token < self.vocabulary:
                    going_on.append(_Row(row.text, row.request, [token], True))
            rows = going_on
        return list(guesses.values()), time.perf_counter() - began

    def forget(self, request: Request) -> None:
        """Let go of what is kept of a text; other texts that begin like it may still find it."""
        text = self._texts.pop(request, None)
        if text is not None:
            at = self._follow(text, request)
            self._store.give_back(text.written[:at], text.blocks, text.root)
            self.executor.execute(Close(text.slot))

    def _begun(self, request: Request) -> _Text:
        """What there is of a text, which begins with what others have left of the same beginning."""
        text = self._texts.get(request)
        if text is None:
            sampling = pb.Sampling()
            sampling.CopyFrom(request.sampling)
            sampling.logprobs, sampling.top_logprobs = False, 0  # nobody is told these of a guess
            root = root_of(self.same_tables(request.prompt))  # its guesses come without an adapter
            blocks, found = self._store.find(request.tokens, root)
            params, written = SamplingParams.from_proto(sampling), request.tokens[:found]
            text = _Text(next(self._slots), params, root, blocks, written, published=found // self.blocks.tokens)
            tokens = np.array(request.tokens, np.int32)
            self.executor.execute(Open(text.slot, request.prompt, sampling.SerializeToString(), tokens))
            self._texts[request] = text
        return text

    def _follow(self, text: _Text, request: Request) -> int:
        """Drop guesses that were wrong; how many tokens of a request's text are in its blocks, never the last one."""
        end = min(len(text.written), len(request.tokens) - 1)
        while text.checked < end and text.written[text.checked] == request.tokens[text.checked]:
            text.checked += 1
        del text.written[text.checked :]
        whole = text.checked // self.blocks.tokens
        if whole > text.published:
            text.published = whole
            self._store.publish(text.written, text.blocks, text.root)
        return text.checked

    def _can_take(self, text: _Text, new: Sequence[int], tokens: int) -> bool:
        """Whether a text can have `new` tokens that the draft model knows, and blocks for so many; it gets these."""
        text.hopeless = text.hopeless or max(new) >= self.vocabulary
        lacking = -(-(len(text.written) + tokens) // self.blocks.tokens) - len(text.blocks)
        taken = None if text.hopeless else self._store.take(max(0, lacking))
        text.blocks += taken or []
        return taken is not None

    def _compute(self, rows: Sequence[_Row]) -> list[int | None]:
        """Compute tokens of some texts, in as few steps as that can be.

        Returns:
            The next token of each; None where none is wanted or can be chosen.
        """
        steps = in_steps(rows, self.max_rows, self.executor.most_spans)
        return [token for step in steps for token in self._step(step)]

    def _step(self, rows: Sequence[_Row]) -> list[int | None]:
        """Compute one step of at most `max_rows` tokens; see `_compute`."""
        spans = []
        for row in rows:
            text = row.text
            blocks = np.array(text.blocks[text.told :], np.int32)
            want = initial_want(text.params) if row.wanted else 0
            spans.append(SpanPlan(text.slot, len(text.written), len(row.tokens), int(row.wanted), want, blocks))
            text.told = len(text.blocks)
        tokens = np.array([token for row in rows for token in row.tokens], np.int32)
        told = self.executor.execute(Step(spans, tokens))
        for row in rows:
            row.text.written += row.tokens
        summaries = iter(split(told, sum(row.wanted for row in rows)) if told is not None else ())
        return [self._choose(row, next(summaries)) if row.wanted else None for row in rows]

    def _choose(self, row: _Row, summary: bytes) -> int | None:
        """The token that the draft model chooses after a text; None: its logits are no numbers."""
        text = row.text
        step = len(text.written) - row.request.prompt
        while True:
            try:
                choice = choose([summary], text.params, step)
            except LogitsError:
                text.hopeless = True
                return None
            if not isinstance(choice, NeedMore):
                return choice.token
            asked = (np.array([number], np.int32) for number in (text.slot, 0, choice.want))
            told = self.executor.execute(More(*asked))
            assert told is not None
            (summary,) = split(told, 1)
