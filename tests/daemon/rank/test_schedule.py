"""The pure schedule by itself: who is in the next steps, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.guessing.drafts import PROBE, Lookup
from motley.daemon.rank.scheduling.pace import Pace
from motley.daemon.rank.scheduling.plan import Plan
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.scheduling.schedule import Schedule

ARRIVALS = count()


def a_schedule(*, blocks: int = 1000, sequences: int = 64, spans: int = 64, rows: int = 256) -> Schedule:
    return Schedule(BlockStore(blocks, 16), Pace(rows, False), sequences=sequences, spans=spans, rows=rows)


def a_request(prompt: Sequence[int], answer: int, lookup: Lookup | None = None, priority: int = 0) -> Request:
    return Request(next(ARRIVALS), [*prompt], len(prompt), len(prompt) + answer, lookup=lookup, priority=priority)


def run(schedule: Schedule, token: int = 7) -> Iterator[Plan]:
    """Compute steps in which every request goes on with the same token; no guess is right."""
    while True:
        plan = schedule.next()
        schedule.computed(plan, 1.0)
        for part in plan.parts:
            if part.wanted:
                schedule.guessed(part, 0)
                schedule.chosen(part.request, token)
                if len(part.request.tokens) == part.request.longest:
                    schedule.remove(part.request)
        yield plan


def test_who_was_guessed_wrongly_is_guessed_again_now_and_then() -> None:
    class Wrong(Lookup):
        def guess(self, tokens: Sequence[int], most: int) -> list[int]:
            return [8] * most

    schedule = a_schedule()
    schedule.add(a_request([1], 1000, Wrong()))
    guesses = [plan.parts[0].guesses for plan, _ in zip(run(schedule), range(100 + 3 * PROBE), strict=False)]
    assert sum(map(bool, guesses[100:])) == 3


def test_an_old_prompt_goes_on_however_many_new_ones_come() -> None:
    """Each new one has been given less; together they want more rows than there are."""
    schedule = a_schedule(sequences=16)
    old = a_request(range(1000, 3000), 5)
    schedule.add(old)
    arrivals = count(start=10_000)
    for plan, _ in zip(run(schedule), range(150), strict=False):
        assert plan.parts
        for _ in range(16 - len(schedule.waiting)):
            schedule.add(a_request([next(arrivals)] * 100, 1))
    assert len(old.tokens) == old.longest


def test_those_of_a_lower_priority_begin_earlier_and_equal_ones_as_they_came() -> None:
    schedule = a_schedule(sequences=1)
    requests = [a_request([number], 2, priority=priority) for number, priority in enumerate((0, 3, -1, 3, 0, -1))]
    for request in requests:
        schedule.add(request)
    began: list[Request] = []
    for plan, _ in zip(run(schedule), range(20), strict=False):
        began += plan.opened
    assert [requests.index(request) for request in began] == [2, 5, 0, 4, 1, 3]


def test_the_more_urgent_of_two_prompts_is_computed_first() -> None:
    schedule = a_schedule()
    patient, urgent = (a_request(range(start, start + 600), 3, priority=-start) for start in (0, 1000))
    for request in (patient, urgent):
        schedule.add(request)
    for _ in run(schedule):
        if not urgent.left > 1:
            break
    assert patient.position < 300


def test_a_request_under_way_comes_to_its_end_however_many_urgent_ones_keep_coming() -> None:
    """They want all slots, rows and blocks: it steps back for none of them, is not overtaken where it waits, and its
    prompt is computed beside theirs."""
    schedule = a_schedule(blocks=60, sequences=8)
    patient = a_request(range(1000, 1300), 300)
    schedule.add(patient)
    arrivals, stepped_back = count(start=10_000), 0
    for plan, _ in zip(run(schedule), range(600), strict=False):
        assert plan.parts
        stepped_back += len(plan.closed)
        while len(schedule.waiting) < 8:
            schedule.add(a_request([next(arrivals)] * 100, 40, priority=-1))
        assert patient.slot >= 0 or len(patient.tokens) == patient.longest
    assert stepped_back > 3, "there are fewer blocks than are wanted"
    assert len(patient.tokens) == patient.longest


def test_what_was_under_way_when_ranks_were_lost_goes_on_before_what_was_not() -> None:
    schedule = a_schedule(sequences=1)
    urgent, asked_again = a_request([1], 5, priority=-9), a_request([2], 5)
    asked_again.tokens.append(7)
    for request in (urgent, asked_again):
        schedule.add(request)
    schedule.next()
    assert schedule.active == [asked_again]


def test_who_needs_no_more_blocks_keeps_nobody_out() -> None:
    """Engines that want whole caches have one block for each sequence, and as many sequences as blocks."""
    schedule = Schedule(BlockStore(4, 100), Pace(256, False), sequences=64, spans=64, rows=256)
    for _ in range(5):
        schedule.add(a_request([1] * 50, 50))
    schedule.next()
    assert (len(schedule.active), len(schedule.waiting)) == (4, 1)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    schedule = a_schedule()
    alike = [a_request([*range(500), 1000 + number], 3) for number in range(5)]
    for request in alike:
        schedule.add(request)
    rows = sum(sum(len(part.tokens) for part in plan.parts) for plan, _ in zip(run(schedule), range(40), strict=False))
    assert [request.cached for request in alike] == [0, *[496] * 4]
    assert rows == 501 + 4 * 5 + 5 * 2
    assert (schedule.activity.prompt_tokens, schedule.activity.cached_tokens) == (5 * 501, 4 * 496)


def test_who_waits_for_another_to_compute_the_same_keeps_nobody_else_waiting() -> None:
    schedule = a_schedule()
    first, second, unlike = (a_request(prompt, 3) for prompt in ([*range(500)], [*range(500)], [*range(9, 60)]))
    for request in (first, second, unlike):
        schedule.add(request)
    schedule.next()
    assert schedule.active == [first, unlike]


def test_when_the_one_that_computes_the_same_goes_the_next_one_does_it() -> None:
    """It goes on where that one was."""
    schedule = a_schedule()
    first, second, third = (a_request([*range(500)], 3) for _ in range(3))
    for request in (first, second, third):
        schedule.add(request)
    steps = run(schedule)
    next(steps)
    done = first.position
    assert 0 < done < 500
    schedule.remove(first)
    next(steps)
    assert schedule.active == [second]
    assert second.cached == done // 16 * 16
    for _ in zip(steps, range(30), strict=False):
        pass
    assert third.cached == 496


def test_a_text_that_is_only_read_gets_no_guesses() -> None:
    """An embedding's, whose last token is left for a step of its own, and which repeats itself."""
    schedule = Schedule(BlockStore(100, 5), Pace(16, False), sequences=1, spans=1, rows=16)
    request = Request(0, [7] * 17, 17, 17, lookup=Lookup())
    schedule.add(request)
    computed = 0
    while request.left:
        plan = schedule.next()
        assert [part.guesses for part in plan.parts] == [0]
        schedule.computed(plan, 0.01)
        computed += plan.rows
    assert computed == 17
