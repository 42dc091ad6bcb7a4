"""Decides what each step of a session computes: which tokens of which requests. Pure: no I/O, no clock.

There are no phases. In every step each request catches up with what is known of it: one token if it is being answered,
as many as there is time for if there is more. Whoever is being answered comes first; what `Pace` leaves of the step is
for prompts, and of these for the most urgent one that has been given least so far, or now and then for the one that
began first. If there are none, those who are being answered get guesses of their next tokens to verify, as many as are
worth it.

Requests begin in the order of their priorities, then of their arrival. Who has begun comes to its end whatever arrives:
it steps back only for those that began before it, goes on before all that have not begun, and now and then the prompt
that began first has what is left of a step.

A request is admitted when there are blocks for all its tokens, and gets them as they are needed: near ones, for rows
are written to these alone. When they are used up, those of the first positions move far. If there is no room there
either, the request that began last steps back: it waits until there is, and computes again what nobody has kept for it.
The first always goes on, unless blocks cannot be moved for now: then it waits, too.

Where ranks form stages, steps follow each other through them as *waves*, one for each stage. While a step is under way
its requests are left alone; those that are answered are shared out over the waves.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from motley.daemon.rank.adapters.table import NONE, AdapterTable
from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.blocks.far_room import FarTier
from motley.daemon.rank.guessing.drafting import Drafting
from motley.daemon.rank.guessing.drafts import MOST, how_many
from motley.daemon.rank.kept_states import KeptStates
from motley.daemon.rank.scheduling.pace import Pace, Size
from motley.daemon.rank.scheduling.plan import Part, Plan
from motley.daemon.rank.scheduling.request import Request
from motley.protocol.mesh_pb2 import Activity

MOVED_AT_ONCE = 16
"""Blocks of running requests that move far together, if there are so many: the ranks have to agree each time."""
OLDEST_FIRST = 4
"""In one of so many steps the prompt that began first comes first: shorter or more urgent ones that keep coming would
hold it up for ever."""


class _Guesses(NamedTuple):
    """How a text may go on."""

    tokens: Sequence[int]
    drafted: bool
    """By a draft model; else they were looked up."""


_NOTHING = _Guesses((), False)


class Schedule:
    """The requests of a session, and what they hold.

    Attributes:
        waiting: requests that have not been admitted, or have stepped back, the next one first (`Request.turn`).
        active: those that have, in the order in which they began.
        adapters: the slots of what requests may be computed with beside the model.
    """

    def __init__(
        self,
        store: BlockStore,
        pace: Pace,
        *,
        sequences: int,
        spans: int,
        rows: int,
        drafting: Drafting[Request] | None = None,
        waves: int = 1,
        adapters: int = 0,
        states: KeptStates | None = None,
    ) -> None:
        """
        Args:
            store: of all cache blocks; those of a single request of any length are enough for it.
            sequences: requests that may be active at a time.
            spans: requests that may share a step.
            rows: that a step may have, at least as many as there may be requests in it.
            drafting: when to ask a draft model; None: there is none.
            waves: steps that may be under way at a time.
            adapters: slots of these.
            states: the model keeps recurrent states of sequences, which are remembered now and then, or embeddings are
                made of all their rows: so none may be computed twice. None: neither.
        """
        self.waiting: list[Request] = []
        self.active: list[Request] = []
        self.adapters = AdapterTable(adapters)
        self._store = store
        self._pace = pace
        self._sequences = sequences
        self._spans = spans
        self._rows = rows
        self._drafting = drafting
        self._waves = waves
        self._under_way: set[Request] = set()
        """Requests of steps that are."""
        self._states = states
        self._begun = 0
        """Requests that have been admitted."""
        self._steps = 0
        self._full = False
        """Whether there was no room for the request that waits first, and none has become free since."""
        self._prompted = 0
        """Prompt tokens of all requests that have been admitted."""
        self._cached = 0
        """Those of them that were found in the caches."""
        self._chosen = 0
        """Tokens that have been chosen for all requests."""
        self._tried = 0
        """Guesses that were computed."""
        self._accepted = 0
        """Those of them that were right."""

    @property
    def activity(self) -> Activity:
        """How many requests there are, what they hold, and what has come together since there is this schedule."""
        windowed, windowed_used = self._store.windowed_blocks
        return Activity(
            active=len(self.active),
            waiting=len(self.waiting),
            blocks=self._store.used + self._store.available,
            blocks_used=self._store.used,
            blocks_kept=self._store.cached,
            far_blocks=self._store.far.count,
            far_blocks_used=self._store.far.count - self._store.far.free,
            windowed_blocks=windowed,
            windowed_blocks_used=windowed_used,
            block_tokens=self._store.tokens,
            prompt_tokens=self._prompted,
            cached_tokens=self._cached,
            generated_tokens=self._chosen,
            tried_drafts=self._tried,
            accepted_drafts=self._accepted,
        )

    def add(self, request: Request) -> None:
        """Have a request wait, a new one or one that has been removed."""
        insort(self.waiting, request, key=lambda each: each.turn)
        if self.waiting[0] is request:
            self._full = False

    def remove(self, request: Request, broken: bool = False) -> None:
        """Forget a request that has ended. What it has computed may still be found, unless it is `broken`."""
        if request in self.active:
            self._release(request, broken)
        else:
            self.waiting.remove(request)
        self._full = False

    def next(self) -> Plan:
        """Decide the next step; it has no parts if there is nothing to do, or nothing can be done for now."""
        plan = Plan()
        if self._grow(plan):
            self._admit(plan)
            self._choose(plan)
        plan.copied = self._states.taken() if self._states else []
        return plan

    def begun(self, plan: Plan) -> None:
        """A step is under way: its requests are left alone until it has been computed."""
        self._under_way.update(part.request for part in plan.parts)

    @property
    def far_used(self) -> dict[FarTier, int]:
        """How many far blocks hold something, by tier, those that are filled first in front."""
        return self._store.far.used

    def lose_far(self, tier: FarTier) -> list[int]:
        """Go on without far blocks, whose contents are lost: requests that have any step back. A step that was to be
        computed then has not been; recurrent states may have been changed by it, so there all requests step back.

        Returns:
            The slots of these requests, to be closed.
        """
        self._under_way.clear()
        gone = tier.numbers
        lost = [request for request in self.active if self._states or any(block in gone for block in request.blocks)]
        slots = [request.slot for request in lost]
        for request in lost:
            self._release(request, broken=True)
            self.add(request)
        self._store.lose_far(tier)
        self._full = False
        return slots

    def computed(self, plan: Plan, seconds: float) -> None:
        """A step has been computed, in so many seconds."""
        self._under_way.difference_update(part.request for part in plan.parts)
        self._pace.took(Size(plan.rows, plan.halved), plan.answers, plan.fresh, seconds, plan.revisits)
        if self._drafting:
            self._drafting.computed(seconds, sum(part.wanted > 0 for part in plan.parts), plan.without)
        for part in plan.parts:
            request = part.request
            request.position = part.position + len(part.tokens) - part.guesses
            whole = request.position // self._store.tokens
            if whole > request.whole:
                request.whole = whole
                self._store.publish(request.tokens[: request.position], request.blocks, request.root)
            if self._states and request.slot >= 0:
                self._states.computed(request)

    def chosen(self, request: Request, token: int) -> None:
        """Note the next token of a request."""
        request.tokens.append(token)
        self._chosen += 1

    def guessed(self, part: Part, right: int) -> None:
        """Note that the first `right` guesses of a part were what was chosen; they are among the tokens now."""
        self._tried += part.guesses
        self._accepted += right
        part.request.accepted += right
        part.request.position += right
        if not part.guesses:
            return
        wrong = right < part.guesses
        if not part.drafted:
            part.request.luck.tried(right, wrong)
        if self._drafting:
            self._drafting.told(part.request, part.drafted, right, wrong, part.without)

    def _needed(self, tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-tokens // self._store.tokens)

    def _grows(self, request: Request) -> bool:
        """Whether a request may come to need more blocks than for its tokens so far."""
        return self._needed(request.longest) > self._needed(len(request.tokens))

    def _promised(self, request: Request) -> int:
        """Blocks that a request is to get for its tokens so far."""
        return max(0, self._needed(len(request.tokens)) - len(request.blocks))

    def _lacking(self, request: Request) -> tuple[int, int]:
        """How many blocks a request should get now, for the rows that it may have in a step, and how many it must get
        to have any."""
        whole = request.position // self._store.tokens
        rows = min(len(request.tokens), request.position + self._rows)
        most = min(self._needed(rows), self._store.most_blocks(request.position, request.passed))
        return max(0, most - len(request.blocks)), max(0, whole + 1 - len(request.blocks))

    def _take(self, wanted: int, least: int, plan: Plan, admitted: Request | None = None) -> list[int] | None:
        """Take near blocks, as many as are wanted or can be had; None: they are fewer than `least`.

        Args:
            admitted: a request that has blocks and is not active yet.
        """
        if (short := wanted - self._store.takeable_near) > 0:
            self._move_oldest(short, plan, [*self.active, *([admitted] if admitted else [])])
        count = min(wanted, self._store.takeable)
        return self._store.take(count) if count >= least else None

    def _move_oldest(self, count: int, plan: Plan, holding: Sequence[Request]) -> None:
        """Move blocks of requests far, those of the first positions first, to have so many more near ones.

        Args:
            holding: all requests that have blocks.
        """
        if not self._store.far.count:
            return
        written = (
            (place, block)
            for request in holding
            for place, block in enumerate(request.blocks[: request.position // self._store.tokens])
            if block < self._store.near
        )
        oldest = dict.fromkeys(block for _, block in sorted(written))
        moved = self._store.move(islice(oldest, max(count, MOVED_AT_ONCE)))
        if moved:
            for request in holding:
                request.blocks = [moved.get(block, block) for block in request.blocks]
            plan.moved += moved.items()

    def _grow(self, plan: Plan) -> bool:
        """Give every active request the blocks that it needs next; who began last steps back if there are none.

        Returns:
            Whether there is to be a step: not if somebody would have to step back while steps are under way.
        """
        for request in self.active:
            request.passed = self._store.let_pass(request.blocks, request.passed, request.position)
        for request in list(self.active):
            while request.slot >= 0:
                wanted, least = self._lacking(request)
                taken = self._take(wanted, least, plan) if wanted else []
                if taken is not None:
                    request.blocks += taken
                    break
                if self._under_way:
                    return False
                if len(self.active) == 1:
                    assert self._store.far.count, "there are blocks for a request alone"
                    break
                self._step_back(self.active[-1], plan)
        return True

    def _step_back(self, request: Request, plan: Plan) -> None:
        plan.closed.append(request.slot)
        self._release(request)
        self.add(request)
        self._full = True

    def _release(self, request: Request, broken: bool = False) -> None:
        """Take an active request's slot and blocks back."""
        self.active.remove(request)
        if self._drafting:
            self._drafting.forget(request)
        if broken:
            self._store.give_back_broken(request.blocks, request.root, request.passed)
        else:
            tokens = request.tokens[: request.position]
            self._store.give_back(tokens, request.blocks, request.root, request.passed)
        if request.adapter:
            self.adapters.leave(request.adapter)
        request.slot, request.blocks, request.told, request.passed, request.adapter_slot = -1, [], 0, 0, NONE
        request.position = request.whole = 0

    def _admit(self, plan: Plan) -> None:
        """Admit those that wait, in their order, while there are slots, and blocks for each to go on for a while."""
        self.adapters.begin()
        for request in list(self.waiting):
            if self._full or len(self.active) == self._sequences:
                return
            if self._is_computed_for_another(request) or not self._has_adapter(request, plan):
                continue
            headroom = sum(map(self._grows, (*self.active, request))) if self.active else 0
            taken = None
            if self._store.fits(request.tokens, request.root, sum(map(self._promised, self.active)) + headroom):
                request.blocks, request.position = self._store.find(request.tokens, request.root)
                request.passed = self._store.first_seen(request.position)
                taken = self._take(*self._lacking(request), plan, request)
                if taken is None:
                    tokens = request.tokens[: request.position]
                    self._store.give_back(tokens, request.blocks, request.root, request.passed)
                    request.blocks, request.passed, request.position = [], 0, 0
            if taken is None:
                self._full = bool(self.active)
                return
            self.waiting.remove(request)
            request.blocks += taken
            request.given = 0
            if request.begun is None:
                request.begun = self._begun
                self._begun += 1
                request.cached = min(request.position, request.prompt)
                self._prompted += request.prompt
                self._cached += request.cached
            busy = {other.slot for other in self.active}
            request.slot = next(slot for slot in range(self._sequences) if slot not in busy)
            if request.adapter:
                request.adapter_slot = self.adapters.take(request.adapter)
            insort(self.active, request, key=lambda each: each.turn)
            plan.opened.append(request)
            if self._states:
                self._states.admitted(request)

    def _has_adapter(self, request: Request, plan: Plan) -> bool:
        """Whether a request may be computed with the adapter that it wants; one that can be loaded is to be."""
        if not request.adapter or self.adapters.may_take(request.adapter):
            return True
        slot = self.adapters.place(request.adapter)
        if slot is not None:
            plan.loads.append((slot, request.adapter))
        return False

    def _is_computed_for_another(self, request: Request) -> bool:
        """Whether an active request computes a block now that a waiting one will find when that is done.

        It is only waited for as long as it is active, and then it is in one of the next steps.
        """
        followed = request.follows
        if followed is None or followed.slot < 0 or followed.position >= request.followed:
            request.follows = None
            for other in self.active:
                if other.left > 1 and (shared := self._shared(request, other)) > other.position:
                    request.follows, request.followed = other, shared
        return request.follows is not None

    def _shared(self, request: Request, other: Request) -> int:
        """How many tokens two requests have in common, in whole blocks that the first one would find."""
        size, end = self._store.tokens, 0
        alike = request.root == other.root and not self._states
        last = min(len(request.tokens) - 1, len(other.tokens)) - size if alike else -1
        while end <= last and request.tokens[end : end + size] == other.tokens[end : end + size]:
            end += size
        return end

    def _choose(self, plan: Plan) -> None:
        """Choose the parts of a step."""
        able = [request for request in self.active if self._room(request) and request not in self._under_way]
        answered = self._of_a_wave([request for request in able if request.left == 1])
        prompts = [request for request in able if request.left > 1]
        if self._steps % OLDEST_FIRST:
            prompts.sort(key=lambda each: (each.priority, each.given))
        if len(answered) + len(prompts) > self._spans:  # by turns
            chosen = sorted([*answered, *prompts], key=lambda each: each.stepped)[: self._spans]
            answered, prompts = ([each for each in group if each in chosen] for group in (answered, prompts))
        prompted = sum(map(self._room, prompts))
        guesses = self._guesses(answered, plan) if not prompts else [_NOTHING for _ in answered]
        plan.answers = len(answered) + sum(len(each.tokens) for each in guesses)
        plan.fresh = bool(prompts) and prompts[0].position == 0
        size = self._pace.choose(plan.answers, prompted, plan.fresh)
        plan.halved, plan.revisits = size.halved, self._pace.revisits
        room = size.rows - plan.answers
        for request, guessed in zip(answered, guesses, strict=True):
            self._put(plan, request, 1, guessed)
        for request in prompts:
            if room > 0:
                rows = min(room, self._room(request))
                self._put(plan, request, rows, _NOTHING)
                room -= rows
        self._steps += 1

    def _of_a_wave(self, answered: list[Request]) -> list[Request]:
        """Of requests that can be answered in the next step, those that are: as many as there are for each wave."""
        if self._waves == 1:
            return answered
        count = -(-sum(request.left == 1 for request in self.active) // self._waves)
        longest = sorted(answered, key=lambda each: each.stepped)[:count]
        return [request for request in answered if request in longest]

    def _room(self, request: Request) -> int:
        """How many of a request's tokens can be computed in the blocks that it has."""
        most = self._states.room(request) if self._states else request.left
        return min(most, request.left, len(request.blocks) * self._store.tokens - request.position)

    def _guesses(self, answered: Sequence[Request], plan: Plan) -> list[_Guesses]:
        """How the texts of these requests may go on: as many tokens of each as are worth their time."""
        if not answered:
            return []
        found = [request.lookup.guess(request.tokens, MOST) if request.lookup else [] for request in answered]
        chances = [
            request.luck.worth()[: len(own)] if own else [] for request, own in zip(answered, found, strict=True)
        ]
        drafted: Mapping[Request, tuple[list[int], list[float]]] = {}
        if self._drafting and self._pace.measured:
            may = [request.lookup is not None for request in answered]
            drafted, plan.without = self._drafting.guesses(answered, may, chances, self._pace.seconds_up_to)
        for index, request in enumerate(answered):
            if request in drafted:
                found[index], chances[index] = drafted[request]
        if not any(found):
            return [_NOTHING for _ in answered]
        numbers, _ = how_many(chances, self._pace.seconds_up_to)
        guesses = []
        spare = self._rows - len(answered)
        for request, own, number in zip(answered, found, numbers, strict=True):
            number = max(0, min(number, spare, request.longest - len(request.tokens) - 1))
            lacking = self._needed(len(request.tokens) + number) - len(request.blocks)
            if lacking > 0 and (taken := self._store.take(lacking)) is not None:
                request.blocks += taken
            own = own[: min(number, len(request.blocks) * self._store.tokens - len(request.tokens))]
            guesses.append(_Guesses(own, request in drafted))
            spare -= len(own)
        return guesses

    def _put(self, plan: Plan, request: Request, rows: int, guesses: _Guesses) -> None:
        """Give a request some rows of a step, and as many more as there are guesses."""
        tokens = [*request.tokens[request.position : request.position + rows], *guesses.tokens]
        wanted = 1 + len(guesses.tokens) if rows == request.left else 0
        blocks = request.blocks[request.told :]
        windowed = self._store.windowed(blocks)
        guessed = len(guesses.tokens)
        plan.parts.append(
            Part(request, request.position, tokens, wanted, guessed, blocks, windowed, guesses.drafted, plan.without)
        )
        request.told, request.stepped = len(request.blocks), self._steps
        request.given += len(tokens)
