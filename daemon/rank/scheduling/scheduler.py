"""Has all ranks of a session compute what its schedule decides, chooses the tokens, and tells them to clients.

It runs on rank 0. What a step is for is decided by `motley.daemon.rank.scheduling.schedule`, which is pure; this is the
part that talks: to the other ranks, and to the daemon, from which requests come. What a step needs (pace, drafts, kept
prefixes, far caches, adapters) is in files of its own; that they meet in one step, in one order, is what is left here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import numpy as np

from motley.daemon.pipe.daemon import Commands, Tell, Together
from motley.daemon.rank.adapters.leading import LeadingAdapters
from motley.daemon.rank.all_ranks import AllRanks, by_row
from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.blocks.far_caches import FarCaches
from motley.daemon.rank.blocks.kept_block import plan_of
from motley.daemon.rank.blocks.kept_prefixes import KeptPrefixes
from motley.daemon.rank.blocks.state_blocks import StateBlockStore
from motley.daemon.rank.blocks.window_blocks import WindowBlocks
from motley.daemon.rank.constraints import Preparing
from motley.daemon.rank.decode_times import STEP_HISTORY
from motley.daemon.rank.executor import Executor
from motley.daemon.rank.guessing.drafting import Drafter, Drafting
from motley.daemon.rank.kept_states import KeptStates
from motley.daemon.rank.scheduling.client import Client, logprob_row, request_of
from motley.daemon.rank.scheduling.pace import Pace
from motley.daemon.rank.scheduling.planned_steps import Decision, UnderWay, step_of
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.rank.scheduling.schedule import Schedule
from motley.daemon.rank.steps import Close, CopyStates, More, Open, Renumber
from motley.daemon.sampling.choice import Choice, LogitsError, NeedMore, choose
from motley.daemon.sampling.constraint import Constraint, ConstraintError
from motley.daemon.sampling.parameters import SamplingError, SamplingParams
from motley.plugins.engine import CacheBlocks
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.transport import Communicator

LOOK_S = 0.5
"""Seconds between two looks after the other ranks, while nothing is asked."""
PREPARING_LOOK_S = 0.01
"""Seconds between two looks whether the constraint of a request is prepared, while there is nothing to compute."""
ACTIVITY_S = 0.5
"""Seconds between two messages that tell the daemon what is under way."""
SIGN_OF_LIFE_S = 10.0
"""Seconds without news after which a client hears that its request lives."""


@dataclass
class Scheduler:
    """Has every rank execute the steps of a session, and chooses the tokens.

    Attributes:
        executor: this rank's own, rank 0's.
        communicator: the way to the other ranks, the followers.
        blocks: of the caches of every rank.
        vocabulary: tokens that the model knows.
        sequences: requests that are under way at a time, if a step may have as many tokens; others wait.
        max_rows: the most tokens that one step may have.
        halves: whether steps may be computed in micro-chunks.
        same_tables: the shortest prompt with the same rotary tables as one of a length, see `RankGraph.same_tables`.
        tell: tells the daemon `tokens` and `activity`.
        together: has the daemon told a step's tokens in one piece.
        check: called now and then while there is nothing to do, to see whether everyone is still there.
        recurrent: whether the model keeps states of sequences, so that one can begin with what is in the caches only
            where these are remembered.
        embeds: whether texts are embedded, each from its first token on, in the place of being answered.
        adapters: slots for them that every rank has.
        report: called after each request, to tell where this rank's time went.
        tell_steps: called now and then while there are requests, to tell the same of the latest steps.
        draft_model: guesses tokens; None: there is none.
        beside: how many ranks exchange sums with this one, itself among them; 0: all.
        waves: steps that may be under way at a time: as many as the ranks form stages. One, where there are far blocks.
        step_ms: what the latest decode steps have taken, in milliseconds.
    """

    executor: Executor
    communicator: Communicator
    blocks: CacheBlocks
    vocabulary: int
    sequences: int
    max_rows: int
    halves: bool
    same_tables: Callable[[int], int]
    tell: Tell
    together: Together
    check: Callable[[], None]
    report: Callable[[], None]
    tell_steps: Callable[[], None]
    draft_model: Drafter[Request] | None = None
    waves: int = 1
    beside: int = 0
    adapters: int = 0
    recurrent: bool = False
    embeds: bool = False
    step_ms: deque[float] = field(default_factory=lambda: deque(maxlen=STEP_HISTORY))

    def __post_init__(self) -> None:
        self._ranks = AllRanks(self.executor, self.communicator, self.beside)
        self._clients: dict[Request, Client] = {}
        self._held: set[Request] = set()
        """Requests whose clients are slow: they are not in the schedule for now."""
        self._arrivals = count()
        self._preparing = Preparing()
        self._schedule: Schedule | None = None
        """There is one once the followers have told what they are able to do."""
        self._activity_due = 0.0
        """From when on the daemon is to be told what is under way."""
        self._far = FarCaches(self.blocks, self._ranks.told)
        self._kept: KeptPrefixes | None = None
        """There are such once there is a schedule, if the session keeps prefixes."""
        self._under_way: deque[UnderWay] = deque()
        """Steps that are begun and not finished, the first one first."""
        self._adapters: LeadingAdapters | None = None
        """There is one once somebody has asked for any."""
        self._stuck = False
        """Whether nothing could be computed in the last step."""

    def run(self, commands: Commands) -> None:
        """Answer requests until `commands` raises.

        Raises:
            StepError, SummaryError: a follower says something that does not fit.
            TransportError, EngineError: a rank is lost, or cannot compute.
            Exception: what `commands`, `tell`, `together`, `check` and `report` raise.
        """
        more_to_do = False
        """Whether there is something that new requests are not to wait for in full: a piece of it is done at a time."""
        while True:
            wait_s = PREPARING_LOOK_S if self._preparing else LOOK_S
            for command in commands(0.0 if more_to_do or (self._busy and not self._stuck) else wait_s):
                self._obey(command)
            for order, came, constraint in self._preparing.ready():
                self._accept_constrained(order, came, constraint)
            spreads = self._adapters is not None and self._adapters.busy
            if self._adapters is not None and spreads:
                self._fail_for(self._adapters.advance())
                if not self._adapters.busy:
                    self.tell(activity=self._activity())
            more_to_do = False
            if self._kept and self._kept.restoring:
                self._kept.restore()
                more_to_do = True
            elif self._busy:
                self._advance(self._made_schedule())
            else:
                self.check()
                more_to_do = self._keep()
            more_to_do |= self._adapters is not None and self._adapters.busy
            self._show_life(time.perf_counter())

    def keep_prefixes(self, seconds: float) -> None:
        """Have all ranks write what is in the caches to their disks, as far as so many seconds suffice; errors as
        `run`."""
        deadline = time.perf_counter() + seconds
        while self._kept and not self._kept.restoring and time.perf_counter() < deadline and self._kept.keep():
            pass

    def _keep(self) -> bool:
        """While there are no requests, read prefixes that are kept, or keep some; whether there is more to do."""
        if self.executor.kept is None:
            return False
        if self._kept is None:
            if self._ranks.are_loaded():
                self._made_schedule()
            return self._kept is not None
        before = self._kept.trouble, self._kept.count
        more = self._kept.keep()
        if (self._kept.trouble, self._kept.count) != before:
            self.tell(activity=self._activity())
        return more

    @property
    def _busy(self) -> bool:
        """Whether there is something to compute."""
        return len(self._clients) > len(self._held)

    def stop(self) -> None:
        """Tell the followers that the session is over."""
        self._ranks.stop()

    def _obey(self, command: wp.WorkerCommand) -> None:
        match command.WhichOneof("body"):
            case "decode":
                now = time.perf_counter()
                if command.decode.HasField("constraint"):
                    self._preparing.begin(command.decode, now)
                else:
                    self._accept(command.decode, now)
            case "vocabulary":
                self._preparing.vocabulary = command.vocabulary
            case "cancel":
                self._finish_all()
                self._cancel(command.cancel)
            case "hold":
                self._finish_all()
                self._hold(command.hold)
            case "adapter":
                self._finish_all()
                self._led_adapters().order(command.adapter)

    def _accept_constrained(self, decode: wp.Decode, came: float, constraint: Callable[[], Constraint]) -> None:
        """Accept a request that has come at `came`, and whose constraint is prepared, or cannot be."""
        try:
            self._accept(decode, came, constraint())
        except ConstraintError as error:
            self._refuse(decode, str(error))

    def _refuse(self, decode: wp.Decode, why: str, code: str = "invalid_request") -> None:
        self._say(decode.request_id, finish="error", failure=pb.Failure(code=code, message=why))

    def _accept(self, decode: wp.Decode, now: float, constraint: Constraint | None = None) -> None:
        try:
            params = SamplingParams.from_proto(decode.sampling)
        except SamplingError as error:
            self._refuse(decode, str(error))
            return
        if params.top_k >= self.vocabulary:  # every token passes: no rank has to sort and send its whole slice for it
            decode.sampling.top_k = 0
            params = replace(params, top_k=0)
        adapter = decode.adapter
        if adapter.fingerprint and not self.adapters:
            self._refuse(decode, "this session was started without room for adapters")
            return
        request = request_of(decode, next(self._arrivals), self.same_tables)
        client = Client(decode, params, request, arrived=now, spoken=now, constraint=constraint)
        self._clients[request] = client
        self._made_schedule().add(request)
        if adapter.fingerprint:
            self._led_adapters().want(adapter)
        self._shorten(client)

    def _led_adapters(self) -> LeadingAdapters:
        """What rank 0 does about adapters, once there is a schedule, which this makes."""
        if self._adapters is None:
            self._adapters = LeadingAdapters(self._made_schedule().adapters, self._ranks.told, self.tell)
        return self._adapters

    def _fail_for(self, failed: Mapping[str, str]) -> None:
        """End the requests that wait for adapters which cannot be had, by fingerprint, for these reasons."""
        for request, client in list(self._clients.items()):
            if request.slot < 0 and request.adapter in failed:
                self._end(client)
                self._refuse(client.decode, failed[request.adapter], "adapter_unavailable")

    def _cancel(self, request_id: str) -> None:
        if self._preparing.cancel(request_id):
            self._say(request_id, finish="cancelled")
            return
        for client in self._clients.values():
            if client.decode.request_id == request_id:
                self._end(client)
                self._say(request_id, finish="cancelled")
                return

    def _hold(self, hold: pb.Hold) -> None:
        """Compute no more of a request for now, so that others may have its blocks, or go on with it before those that
        wait. What has been computed is found again, as far as it is still there."""
        for request, client in self._clients.items():
            if client.decode.request_id != hold.request_id or hold.held == (request in self._held):
                continue
            if hold.held:
                self._held.add(request)
                self._withdraw(request)
            else:
                self._held.remove(request)
                self._made_schedule().add(request)

    def _made_schedule(self) -> Schedule:
        if self._schedule is None:
            able = self._ranks.abilities()
            blocks = self.blocks
            windows = WindowBlocks(blocks.windowed, blocks.window, blocks.tokens) if blocks.windowed else None
            sizes = blocks.count, blocks.tokens, self._far.in_order([each.block_s for each in able])
            store, states = BlockStore(*sizes, windows), None
            if self.recurrent or self.embeds:
                remembered = 0 if self.embeds else blocks.snapshots
                places = range(blocks.slots, blocks.slots + remembered)
                store = StateBlockStore(*sizes, windows, places)
                states = KeptStates(store)
            pace = Pace(self.max_rows, self.halves)
            sequences = min(self.sequences, self.max_rows, *([blocks.slots] if self.recurrent else []))
            drafting = Drafting(self.draft_model) if self.draft_model else None
            spans = min(each.spans for each in able)
            self._schedule = Schedule(
                store,
                pace,
                sequences=sequences,
                spans=spans,
                rows=self.max_rows,
                drafting=drafting,
                waves=self.waves,
                adapters=self.adapters,
                states=states,
            )
            if (file := self.executor.kept) is not None:
                self._kept = KeptPrefixes(file, plan_of([each.plan for each in able]), store, self._ranks.told)
        return self._schedule

    def _advance(self, schedule: Schedule) -> None:
        """Have every rank begin the next step, unless there is none now, and finish one if as many are under way as may
        be."""
        began = time.perf_counter()
        plan = schedule.next()
        planned = time.perf_counter()  # a draft model and moved blocks may have taken their time
        if plan.copied:
            self._ranks.do(CopyStates(np.array(plan.copied, np.int32)))
        if plan.moved:
            self._ranks.do(Renumber(np.array(plan.moved, np.int32)))
        for slot in plan.closed:
            self._ranks.do(Close(slot))
        if plan.loads:
            self._fail_for(self._led_adapters().load(plan.loads))
        for request in plan.opened:
            sampling, tokens = request.sampling.SerializeToString(), np.array(request.tokens, np.int32)
            self._ranks.do(Open(request.slot, request.prompt, sampling, tokens, request.adapter_slot))
        heard = bool(self.blocks.far) or any(part.wanted for part in plan.parts)
        if plan.parts and heard:
            self._ranks.begin(step_of(plan, self._clients))
            schedule.begun(plan)
            self._under_way.append(UnderWay(plan, began, planned))
        elif plan.parts:
            self._ranks.do(step_of(plan, self._clients))
            self._computed(schedule, UnderWay(plan, began, planned))
        self._stuck = not (plan.parts or plan.loads or self._under_way or self._far.losing)
        if self._under_way and (len(self._under_way) >= self.waves or not (plan.parts and heard)):
            self._finish(schedule)
        elif self._far.losing:
            self._go_on_without(schedule)

    def _finish(self, schedule: Schedule) -> None:
        """Wait for the first step that is under way, and settle on the tokens that it decides."""
        step = self._under_way.popleft()
        told: Sequence[bytes] = self._ranks.finish()
        if self.blocks.far:
            told = self._far.summaries(told)
        if self._far.losing:
            self._go_on_without(schedule)
            return
        self._computed(schedule, step)
        deciding = [part for part in step.plan.parts if part.wanted]
        if deciding:
            rows = by_row(told, sum(part.wanted for part in deciding))
            with self.together():
                self._settle(schedule, [Decision(part, [*islice(rows, part.wanted)]) for part in deciding])

    def _computed(self, schedule: Schedule, step: UnderWay) -> None:
        """A step has been computed, as far as rank 0 waits for it."""
        plan = step.plan
        if self._kept:
            self._kept.changed()
        ended = time.perf_counter()
        schedule.computed(plan, ended - step.planned)
        if plan.rows == plan.answers:
            self.step_ms.append(1e3 * (ended - step.began))  # first: a request that ends has it reported

    def _finish_all(self) -> None:
        """Wait for all steps that are under way, so that any request may be taken out of the schedule."""
        while self._under_way:
            self._finish(self._made_schedule())

    def _go_on_without(self, schedule: Schedule) -> None:
        """Go on without far blocks that are lost: what was computed with them is computed again."""
        for tier in self._far.lose():
            for slot in schedule.lose_far(tier):
                self._ranks.do(Close(slot))
        for client in list(self._clients.values()):
            self._shorten(client)

    def _shorten(self, client: Client) -> None:
        """Once far blocks are lost, let a request have no more tokens than the others hold: with the last of these it
        ends or, where other machines may keep caches, breaks off; or now, if it has as many."""
        request, room = client.request, (self.blocks.count + self._far.room) * self.blocks.tokens
        if not self._far.lost or request.longest <= room:
            return
        if len(request.tokens) >= room:
            self._break_off(client)
        else:
            request.longest, client.decode.max_tokens = room, room - request.prompt
            client.cut_short = self.blocks.held > 0

    def _break_off(self, client: Client) -> None:
        """End a request that has more tokens than caches of which a part is lost have room for."""
        message = (
            f"its {len(client.request.tokens)} tokens and what follows them have no room without caches that are lost"
            f" ({self._far.why_lost}). Start the session anew"
        )
        self._end(client)
        self._refuse(client.decode, message, "caches_lost")

    def _settle(self, schedule: Schedule, decisions: Sequence[Decision]) -> None:
        """Choose the next tokens of each request and tell them; the request ends with them, or goes on.

        Those whose candidates do not decide ask for more, all in one round.
        """
        while decisions:
            wants = [self._decide(schedule, decision) for decision in decisions]
            undecided = [each for each, want in zip(decisions, wants, strict=True) if want]
            if undecided:
                fields = [
                    (each.part.request.slot, each.row, want)
                    for each, want in zip(undecided, filter(None, wants), strict=True)
                ]
                more = self._ranks.told(More(*np.array(fields, np.int32).T))
                for decision, told in zip(undecided, by_row(more, len(undecided)), strict=True):
                    decision.told[decision.row] = told
            decisions = undecided

    def _decide(self, schedule: Schedule, decision: Decision) -> int:
        """Choose tokens for a request until one is not what was guessed, or it ends.

        Returns:
            How many candidates for the next one every rank has to tell, if those that are known do not decide; else 0.
        """
        part = decision.part
        client = self._clients[part.request]
        guessed = part.tokens[len(part.tokens) - part.guesses :]
        if client.constraint is not None and client.constraint.trouble:
            schedule.guessed(part, decision.row)
            self._end(client)
            self._refuse(client.decode, f"the answer cannot be kept to its constraint: {client.constraint.trouble}")
            return 0
        if self.embeds:
            self._tell_embedding(client, decision.told[0][-1])
            return 0
        while True:
            try:
                choice = choose(decision.told[decision.row], client.params, client.generated)
            except LogitsError as error:
                schedule.guessed(part, decision.row)
                self._end(client, broken=True)
                self._refuse(client.decode, str(error), "bad_logits")
                return 0
            if isinstance(choice, NeedMore):
                return choice.want
            finish = client.finish(choice)
            right = not finish and decision.row < part.guesses and choice.token == guessed[decision.row]
            if not right:
                schedule.guessed(part, decision.row)
            self._go_on(client, choice, finish)
            if not right:
                return 0
            decision.row += 1

    def _tell_embedding(self, client: Client, embedding: bytes) -> None:
        """End a request with the embedding of its text, as the last rank tells it, which has the last layers."""
        finite = bool(np.isfinite(np.frombuffer(embedding, "<f4")).all())
        self._end(client, broken=not finite)
        if not finite:
            self._refuse(client.decode, "the embedding of the text is not finite", "bad_logits")
            return
        waited = time.perf_counter() - client.arrived
        self._say(client.decode.request_id, embedding=embedding, prefill_s=waited, finish="stop")

    def _go_on(self, client: Client, choice: Choice, finish: str) -> None:
        """Tell a request's next token, with which it may end."""
        decode = client.decode
        cut_short = client.cut_short and finish == "length"
        if cut_short:
            finish = ""
        self._made_schedule().chosen(client.request, choice.token)
        said: dict[str, Any] = {"ids": [choice.token], "finish": finish}
        if client.params.logprobs:
            said["logprobs"] = [logprob_row(choice)]
        client.spoken = time.perf_counter()
        if client.generated == len(decode.written) + 1:
            said["prefill_s"] = client.spoken - client.arrived
            said["cached_tokens"] = client.request.cached
        if finish:
            said["accepted_drafts"] = client.request.accepted
            self._end(client)
        self._say(decode.request_id, **said)
        if cut_short:
            self._break_off(client)

    def _end(self, client: Client, broken: bool = False) -> None:
        """Let go of a request; `broken`: what was computed for it is nothing to begin another one with."""
        del self._clients[client.request]
        if client.request in self._held:
            self._held.remove(client.request)
        else:
            self._withdraw(client.request, broken)
        if not self._clients:
            self.tell(activity=self._activity())

    def _activity(self) -> pb.Activity:
        activity = self._made_schedule().activity
        activity.trouble = "; ".join(filter(None, (self._far.trouble, self._kept.trouble if self._kept else "")))
        activity.far_tiers.extend(self._far.activity(self._made_schedule().far_used))
        activity.blocks_on_disk = self._kept.count if self._kept else 0
        table = self._made_schedule().adapters
        activity.adapters.extend(table.loaded)
        activity.adapter_loads = table.loads
        return activity

    def _withdraw(self, request: Request, broken: bool = False) -> None:
        """Take a request out of the schedule, and free what it holds; `broken` as in `_end`."""
        slot = request.slot
        self._made_schedule().remove(request, broken)
        if slot >= 0:
            self._ranks.do(Close(slot))
            self.report()

    def _show_life(self, now: float) -> None:
        """Tell the daemon what is under way, and the clients that have had no news for a while that theirs lives."""
        if self._clients and now >= self._activity_due:
            self._activity_due = now + ACTIVITY_S
            self.tell(activity=self._activity())
            self.tell_steps()
        for client in self._clients.values():
            if now - client.spoken > SIGN_OF_LIFE_S:
                client.spoken = now
                self._say(client.decode.request_id)
        for request_id in self._preparing.unspoken(now, SIGN_OF_LIFE_S):
            self._say(request_id)

    def _say(self, request_id: str, **said: Any) -> None:
        self.tell(tokens=wp.Tokens(request_id=request_id, **said))
