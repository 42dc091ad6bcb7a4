"""The model's own head that predicts further ahead, on rank 0: it guesses how the texts of a session's requests go on.

It reads pairs: what the model has made of a token (`HandedRows`), and the token that follows. What it makes of the last
pair of a text is the first guess; from the second on, what it has made itself stands for what the model will make. So
pairs with its own rows are read again once the model's are there. It has the keys and values of a text's pairs from the
first on whose row was handed: where the answer begins, and later where the text was begun anew or rows are missing.
That changes how good the guesses are, and nothing else: they are verified like any others.

Tokens are chosen as the session's model does it, see `motley.daemon.rank.guessing.draft_model`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from motley.daemon.rank.executor import Embed
from motley.daemon.rank.guessing.handed_rows import HandedRows
from motley.daemon.rank.guessing.in_steps import in_steps
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.sampling.choice import LogitsError, NeedMore, choose, initial_want
from motley.daemon.sampling.parameters import SamplingParams
from motley.daemon.sampling.shard import ShardSampler
from motley.plugins.engine import F32, CacheBlocks, Engine, Span


@dataclass
class _Text:
    """What the head has of a request's text.

    Attributes:
        params, sampler: how its tokens are chosen.
        begin: the position in the text of the row of its first pair.
        read: pairs of the model's rows whose keys and values are in the blocks; others may follow them there.
        table: i32[N], its cache blocks.
        accepted: tokens of the text that the sampler knows of.
        hopeless: it has made no numbers once.
    """

    params: SamplingParams
    sampler: ShardSampler
    begin: int
    read: int = 0
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    accepted: int = 0
    hopeless: bool = False


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a text for the head to read, the first of which is its pair number `first`: rows and tokens."""

    request: Request
    text: _Text
    first: int
    rows: Sequence[F32]
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        """The number of the pair after these."""
        return self.first + len(self.tokens)


class OwnHead:
    """Guesses the next tokens of requests; see `motley.daemon.rank.guessing.drafting.Drafter`."""

    def __init__(
        self,
        engine: Engine,
        embed: Embed,
        handed: HandedRows,
        blocks: CacheBlocks,
        context: int,
        max_rows: int,
        words: range,
        words_per_unit: int,
    ) -> None:
        """
        Args:
            engine: of the head's graph; a row of what it gives is logits and, behind them, what it hands itself.
            embed: gives the embeddings of tokens.
            handed: what the model hands, by the requests' slots.
            blocks: of the head's caches.
            context: pairs of a text that it can have.
            max_rows: pairs that one step may have.
            words: all tokens.
            words_per_unit: see `ShardSampler`.
        """
        self._engine = engine
        self._embed = embed
        self._handed = handed
        self._free = list(range(blocks.count))
        self._block_tokens = blocks.tokens
        self._context = context
        self._max_rows = max_rows
        self._words = words
        self._words_per_unit = words_per_unit
        self._texts: dict[Request, _Text] = {}

    def unread(self, request: Request) -> int | None:
        """How many pairs of a request's text, but for the last one, it has not read; None: it cannot guess how it goes
        on, as the last row is missing or the text is too long for it."""
        text = self._texts.get(request)
        _, rows = self._unread_rows(request, text)
        hopeless = text is not None and text.hopeless
        return None if hopeless or not rows or len(request.tokens) > self._context else len(rows) - 1

    def read(self, request: Request, tokens: int) -> float:
        """Read the next pairs of a text, so many at most, but not the last one; the seconds that it took.

        Raises:
            motley.plugins.engine.EngineError: from its engine.
        """
        began = time.perf_counter()
        pairs = self._next(request)
        count = min(tokens, self._max_rows, len(pairs.tokens) - 1)
        if count > 0 and self._has_room(pairs.text, pairs.first + count):
            self._step([replace(pairs, rows=pairs.rows[:count], tokens=pairs.tokens[:count])])
            pairs.text.read += count
        return time.perf_counter() - began

    def guess(self, wanted: Sequence[tuple[Request, int]]) -> tuple[list[list[int]], float]:
        """Guess the next tokens of some texts, of each as many as wanted, or fewer; and the seconds that it took.

        Raises:
            motley.plugins.engine.EngineError: from its engine.
        """
        began = time.perf_counter()
        guesses: dict[Request, list[int]] = {request: [] for request, _ in wanted}
        numbers, asked = {}, []
        for request, number in wanted:
            pairs = self._next(request)
            numbers[request] = min(number, self._context - pairs.end + 1)
            if pairs.tokens and numbers[request] > 0 and self._has_room(pairs.text, pairs.end + numbers[request] - 1):
                self._accept(pairs.text, request)
                pairs.text.read = pairs.end
                asked.append(pairs)
        while asked:
            going_on = []
            for pairs, (token, row) in zip(asked, self._made(asked, guesses), strict=True):
                if token is None:
                    continue
                own = guesses[pairs.request]
                pairs.text.sampler.accept(len(pairs.request.tokens) + len(own) - pairs.request.prompt, token)
                own.append(token)
                if len(own) < numbers[pairs.request]:
                    going_on.append(_Pairs(pairs.request, pairs.text, pairs.end, [row], [token]))
            asked = going_on
        return list(guesses.values()), time.perf_counter() - began

    def forget(self, request: Request) -> None:
        """Let go of what is kept of a text."""
        self._handed.forget(request.slot)
        if (text := self._texts.pop(request, None)) is not None:
            self._free += text.table.tolist()

    def _unread_rows(self, request: Request, text: _Text | None) -> tuple[int, Sequence[F32]]:
        """What the model has made of the tokens of a text that it has not read, but for the last one: nothing is
        computed of that yet. The position of the first of them, and the rows."""
        return self._handed.between(request.slot, text.begin + text.read if text else 0, len(request.tokens) - 1)

    def _next(self, request: Request) -> _Pairs:
        """The pairs of a text that it has not read; where some before them are missing, it is begun anew with these."""
        text = self._texts.get(request)
        first, rows = self._unread_rows(request, text)
        if text is None:
            params = replace(SamplingParams.from_proto(request.sampling), logprobs=False, top_logprobs=0)
            prompt = request.tokens[: request.prompt]
            sampler = ShardSampler(params, self._words.start, len(self._words), prompt, self._words_per_unit)
            text = self._texts[request] = _Text(params, sampler, first)
        elif rows and first != text.begin + text.read:
            text.begin, text.read = first, 0
        return _Pairs(request, text, text.read, rows, request.tokens[first + 1 :] if rows else ())

    def _accept(self, text: _Text, request: Request) -> None:
        """Have the sampler know the tokens of an answer."""
        for position in range(max(request.prompt, text.accepted), len(request.tokens)):
            text.sampler.accept(position - request.prompt, request.tokens[position])
        text.accepted = len(request.tokens)

    def _has_room(self, text: _Text, pairs: int) -> bool:
        """Whether a text has blocks for so many pairs; it gets what it lacks."""
        lacking = -(-pairs // self._block_tokens) - len(text.table)
        if pairs > self._context or lacking > len(self._free):
            return False
        if lacking > 0:
            text.table = np.array([*text.table, *self._free[-lacking:]], np.int32)
            del self._free[-lacking:]
        return True

    def _made(self, asked: Sequence[_Pairs], guesses: dict[Request, list[int]]) -> list[tuple[int | None, F32]]:
        """What the head makes of the last of some texts' pairs: the token after it, and the row that it hands.

        Args:
            guesses: that there are of each text.
        """
        made: list[tuple[int | None, F32]] = []
        for some in in_steps(asked, self._max_rows, self._engine.most_spans):
            for pairs, row in zip(some, self._step(some), strict=True):
                step = len(pairs.request.tokens) + len(guesses[pairs.request]) - pairs.request.prompt
                logits, own = np.split(row, [len(self._words)])
                made.append((_chosen(pairs.text, logits, step), own))
        return made

    def _step(self, asked: Sequence[_Pairs]) -> F32:
        """Compute pairs of some texts in one step: f32[texts, V + D], of the last one of each."""
        tokens = [token for pairs in asked for token in pairs.tokens]
        rows = np.stack([row for pairs in asked for row in pairs.rows])
        spans = [Span(pairs.text.table, pairs.first, len(pairs.tokens), wanted=1) for pairs in asked]
        return self._engine.step(np.concatenate([self._embed(tokens), rows], axis=1), spans).copy()


def _chosen(text: _Text, logits: F32, step: int) -> int | None:
    """The token that is chosen by logits f32[V] after so many of an answer; None: they are no numbers."""
    want = initial_want(text.params)
    while True:
        try:
            choice = choose([text.sampler.summarise(logits, step, want)], text.params, step)
        except LogitsError:
            text.hopeless = True
            return None
        if not isinstance(choice, NeedMore):
            return choice.token
        want = choice.want
