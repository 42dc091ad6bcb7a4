"""When a draft model is asked: it makes text faster where it can, and never much slower, whatever it is like."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.guessing.drafting import ADVANCE_S, CHUNK, Drafting
from motley.daemon.rank.guessing.drafts import Lookup
from motley.daemon.rank.scheduling.pace import Pace
from motley.daemon.rank.scheduling.plan import Plan
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.scheduling.schedule import Schedule


class Drafter:
    """Guesses that are right as often as is said; its time is counted, not taken.

    Args:
        right: how likely each guess is the next token.
        token_s: what a token of all requests together takes.
        row_s: what each token takes that it reads.
    """

    def __init__(self, right: Callable[[], float], token_s: float, row_s: float = 0.0) -> None:
        self.right = right
        self.token_s = token_s
        self.row_s = row_s
        self.seconds = 0.0
        self.asked = 0
        self.has_read: dict[Request, int] = {}
        self._random = Random(1)

    def unread(self, request: Request) -> int | None:
        return len(request.tokens) - 1 - self.has_read.get(request, 0)

    def read(self, request: Request, tokens: int) -> float:
        assert tokens <= CHUNK
        self.has_read[request] = self.has_read.get(request, 0) + tokens
        return self._takes(self.row_s * tokens)

    def guess(self, wanted: Sequence[tuple[Request, int]]) -> tuple[list[list[int]], float]:
        self.asked += 1
        rows = 0
        guesses = []
        for request, number in wanted:
            left = self.unread(request)
            assert left is not None
            assert left <= CHUNK
            rows += left
            self.has_read[request] = len(request.tokens) - 1
            at = len(request.tokens)
            guesses.append([each + (self._random.random() >= self.right()) for each in range(at, at + number)])
        return guesses, self._takes(self.token_s * max(number for _, number in wanted) + self.row_s * rows)

    def forget(self, request: Request) -> None:
        self.has_read.pop(request, None)

    def _takes(self, seconds: float) -> float:
        self.seconds += seconds
        return seconds


def took(
    drafter: Drafter | None,
    requests: int,
    tokens: int,
    row_s: float,
    prompt: int = 100,
    again: int = 1,
    waves: int = 1,
) -> float:
    """Seconds in which some requests at a time are answered, one lot after another, where a step takes 10 ms, and
    `row_s` more for each row. The token at each place of a text is that place's number.

    Args:
        waves: steps that are under way at a time.
    """
    drafting = Drafting[Request](drafter) if drafter else None
    pace = Pace(256, False)
    schedule = Schedule(BlockStore(10_000, 16), pace, sequences=64, spans=64, rows=256, drafting=drafting, waves=waves)
    seconds = 0.0
    under_way: deque[Plan] = deque()
    for number in range(again):
        lot = [
            Request(number, [-each, *range(1, prompt)], prompt, prompt + tokens, lookup=Lookup())
            for each in range(requests)
        ]
        for request in lot:
            schedule.add(request)
        while schedule.active or schedule.waiting:
            plan = schedule.next()
            schedule.begun(plan)
            if plan.parts:
                under_way.append(plan)
                if len(under_way) < waves:
                    continue
            plan = under_way.popleft()
            step = 0.01 + row_s * plan.rows
            seconds += step if plan.rows == plan.answers else 0.0
            schedule.computed(plan, step)
            for part in plan.parts:
                if not part.wanted:
                    continue
                request, guessed = part.request, part.tokens[1:] if part.guesses else ()
                right = 0
                at = len(request.tokens)
                while right < len(guessed) and guessed[right] == at + right and at + right + 1 < request.longest:
                    right += 1
                schedule.guessed(part, right)
                request.tokens += range(at, at + right + 1)
                if len(request.tokens) == request.longest:
                    schedule.remove(request)
    return seconds + (drafter.seconds if drafter else 0.0)


def test_a_quick_draft_model_that_is_often_right_makes_text_faster() -> None:
    drafter = Drafter(lambda: 0.85, token_s=0.001, row_s=1e-4)
    assert took(drafter, 1, 1000, row_s=2e-4) < 0.5 * took(None, 1, 1000, row_s=2e-4)


def test_several_requests_are_guessed_for_together() -> None:
    drafter = Drafter(lambda: 0.85, token_s=0.001, row_s=1e-4)
    assert took(drafter, 8, 300, row_s=2e-4) < 0.85 * took(None, 8, 300, row_s=2e-4)


def test_steps_under_way_together_each_have_their_own_account() -> None:
    """One that the draft model has a part in, and one that it has none in, as all its requests are in the other."""
    drafter = Drafter(lambda: 0.85, token_s=0.001, row_s=1e-4)
    assert took(drafter, 2, 1000, row_s=2e-4, waves=2) < 0.6 * took(None, 2, 1000, row_s=2e-4, waves=2)
    useless = Drafter(lambda: 0.0, token_s=0.01, row_s=1e-3)
    usual = took(None, 2, 600, row_s=2e-4, prompt=400, again=4, waves=2)
    assert took(useless, 2, 600, row_s=2e-4, prompt=400, again=4, waves=2) < usual / 0.95 + ADVANCE_S


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("token_s", [0.0005, 0.01, 0.1])
@pytest.mark.parametrize("right", [0.0, 0.3])
def test_a_draft_model_never_makes_text_much_slower(right: float, token_s: float, requests: int) -> None:
    """However slow and however wrong it is, but for what it may take in advance. Of several requests that begin
    together, those that are guessed for rightly end first, and the others share the last steps with fewer."""
    drafter = Drafter(lambda: right, token_s, token_s / 10)
    usual = took(None, requests, 600, row_s=2e-4, prompt=400, again=4)
    least = 0.97 if requests == 1 else 0.95
    assert took(drafter, requests, 600, row_s=2e-4, prompt=400, again=4) < usual / least + ADVANCE_S


def test_a_draft_model_that_does_not_pay_is_asked_again_now_and_then_and_used_when_it_does() -> None:
    luck = [0.0]
    drafter = Drafter(lambda: luck[0], 0.001, 1e-4)
    drafting = Drafting[Request](drafter)
    pace = Pace(256, False)
    schedule = Schedule(BlockStore(10_000, 16), pace, sequences=64, spans=64, rows=256, drafting=drafting)
    request = Request(0, [*range(10)], 10, 10**6, lookup=Lookup())
    schedule.add(request)

    def steps(count: int) -> int:
        before, length = drafter.asked, len(request.tokens)
        for _ in range(count):
            plan = schedule.next()
            schedule.computed(plan, 0.01 + 2e-4 * plan.rows)
            (part,) = plan.parts
            at = len(request.tokens)
            right = 0
            while right < part.guesses and part.tokens[1 + right] == at + right:
                right += 1
            schedule.guessed(part, right)
            request.tokens += range(at, at + right + 1)
        return drafter.asked - before if not luck[0] else len(request.tokens) - length

    steps(500)
    assert 2 <= steps(1000) < 100
    luck[0] = 1.0
    steps(1000)
    assert steps(100) > 300


def test_a_long_text_is_read_in_chunks_and_only_if_there_is_time_for_it() -> None:
    drafter = Drafter(lambda: 1.0, 0.001, row_s=0.01)
    took(drafter, 1, 200, row_s=2e-4, prompt=3000)
    assert drafter.asked == 0
    assert drafter.seconds <= CHUNK * 0.01


@given(st.integers(1, 6), st.integers(1, 60), st.integers(1, 300), st.floats(0, 1), st.floats(0, 0.1), st.booleans())
def test_whatever_is_guessed_every_request_gets_its_tokens(
    requests: int, tokens: int, prompt: int, right: float, token_s: float, quick: bool
) -> None:
    drafter = Drafter(lambda: right, token_s, 0.0 if quick else 1e-3)
    took(drafter, requests, tokens, row_s=1e-4, prompt=prompt, again=2)
    assert not drafter.has_read, "it forgets whoever has ended"
