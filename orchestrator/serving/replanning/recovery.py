"""Sessions that have lost a rank get a new plan, of nodes that are left: whoever was there before, else anybody.

A machine that is lost for a moment may be all that a plan lacks, so plans are tried for a while before a session is
paused; and then now and then, so that it comes back by itself when its nodes do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Mapping
from itertools import chain

from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import Node, NodeTable
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.planning.draft import Draft
from motley.orchestrator.planning.experts.layout import LayoutError
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.planning.setup import SetupError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.lending import Lending
from motley.orchestrator.serving.plans.copies import Copies, has_files, is_missing
from motley.orchestrator.serving.plans.descriptions import Descriptions
from motley.orchestrator.serving.plans.drafts import describe_draft
from motley.orchestrator.serving.plans.forecasts import forecast_of
from motley.orchestrator.serving.plans.layouts import Layouts
from motley.orchestrator.serving.plans.participants import choose_participants, participant, taken_back
from motley.orchestrator.serving.plans.substitutes import substitutes
from motley.orchestrator.session_request import Place, SessionRequest
from motley.orchestrator.sessions.facts import Interruption, ModelKnown, Pause, State
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import Failure

PATIENCE_S = 20.0
"""So long after a loss, plans are tried that do not fit: a machine that was lost for a moment is back by then."""
AGAIN_S = 0.5
"""How often they are."""
PAUSED_S = 2.0
"""How often they are of a session that is paused, for as long as it is wanted."""
BRIEF_S = 2 * 60 * 60.0
"""For no longer, requests wait for a device that was taken back: leases end by then unless they are renewed."""
LOOK_S = 3.0
"""A node that has joined since the first plan takes part if it says so soon that it has the model."""

DRAFT_S = 10.0
"""A draft model that is not described, and lent if need be, so soon is done without: answers wait."""

_log = logging.getLogger(__name__)

_Refusal = (ServingError, PlanError, PlacementError, LayoutError, SetupError)
"""Why there may be no plan."""


class Recovery:
    """Plans sessions anew, one attempt per session at a time."""

    def __init__(
        self,
        nodes: NodeTable,
        links: LinkTable,
        descriptions: Descriptions,
        lending: Lending,
        layouts: Layouts,
        carrier: Carrier,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._descriptions = descriptions
        self._lending = lending
        self._layouts = layouts
        self._carrier = carrier
        self._clock = clock
        self._planning: dict[str, asyncio.Task[None]] = {}
        """By session."""

    def look_after(self, session: Session) -> None:
        """Begin to plan a session anew, if it has lost a rank and the others are gone."""
        if session.id not in self._planning and session.cleared(self._clock()):
            task = self._planning[session.id] = asyncio.create_task(self._recover(session))
            task.add_done_callback(lambda _: self._planning.pop(session.id))

    def has_room_for_caches(self, session: Session) -> bool:
        """Whether a session with cache holders that has lost caches would find room for them, and is to recover."""
        if session.state is not State.READY or not session.request.recover or not session.holders:
            return False
        lost = session.lost_holder
        avoid = {lost.node_id} if lost else set[str]()
        try:
            self._layouts.place_holders(session.ranks, session.caches, session.profile, avoid, instead_of=session)
        except (PlanError, ServingError):
            return False
        return True

    async def finish(self) -> None:
        """Wait until no session is planned any more; those that are must have been closed."""
        await asyncio.gather(*self._planning.values())

    async def _recover(self, session: Session) -> None:
        """Start a session by a new plan, or have it fail."""
        assert session.interruption is not None
        self._tell(session, session.interruption)
        try:
            while (hindrance := await self._try(session)) is not None:
                why = session.losses.last[-1].why if session.interruption.lost else session.interruption.why
                if self._clock() - session.interruption.at > PATIENCE_S:
                    message = f"{why.message}. It cannot go on with the nodes that are left: {hindrance}"
                    failure = Failure(code=why.code, message=message, lost_rank=why.lost_rank)
                    if not session.serves:
                        self._fail(session, failure)
                        return
                    if session.state is State.RECOVERING:
                        _log.warning("session %s (%s) is paused: %s", session.id, session.name, message)
                    session.wait_for_plan(Pause(failure, brief=self._is_brief(session)))
                    self._carrier.carry_out(session, [])
                await asyncio.sleep(AGAIN_S if session.state is State.RECOVERING else PAUSED_S)
        except Exception as error:
            _log.exception("planning session %s (%s) anew", session.id, session.name)
            message = f"a fault of the orchestrator ({type(error).__name__}: {error}); its log has more"
            self._fail(session, Failure(code="internal_error", message=message))

    def _tell(self, session: Session, interruption: Interruption) -> None:
        """Log what has happened to a session, and what happens next. That somebody has ended a daemon is no trouble."""
        about, why = (session.id, session.name), interruption.why.message
        if not interruption.lost:
            _log.info("session %s (%s) is planned anew: %s", *about, why)
            return
        lost = session.losses.last[-1].node
        level = logging.INFO if any(node.name == lost and node.left for node in self._nodes) else logging.WARNING
        then = "it goes on with the nodes that are left, where they can; its requests wait meanwhile"
        _log.log(level, "session %s (%s) has lost a rank: %s; %s", *about, why, then)

    def _is_brief(self, session: Session) -> bool:
        """Whether a device that a session could have is only taken back for a while."""
        assert session.interruption is not None
        lent = any(node.alive and taken_back(session.request, node) for node in self._nodes)
        return lent and self._clock() - session.interruption.at < BRIEF_S

    def _fail(self, session: Session, failure: Failure) -> None:
        """End a session that finds no plan, unless it was closed meanwhile."""
        if session.replanned:
            self._carrier.carry_out(session, session.fail(failure, self._clock()))

    async def _try(self, session: Session) -> str | None:
        """Start a session by the best plan that is possible now; what is wrong with the last one, if none is."""
        assert session.known is not None, "it has been planned before"
        copies = await self._copies(session, session.known)
        lacking, borrowing = self._lacking(session, copies)
        assert session.interruption is not None
        avoid = set(session.interruption.avoid)
        lent: dict[str, set[str]] = {}
        for node in self._nodes:
            if node.alive and (why := taken_back(session.request, node)):
                lent.setdefault(why, set()).add(node.id)
        reasons = {
            **lent,
            "cannot compute what the session asks for": self._unable(session.request),
            "has not ended its last worker yet": session.unreleased,
            "does not have the model": lacking,
        }
        blocked = set[str]().union(*reasons.values())
        why = in_the_way = self._in_the_way(reasons)
        nodes, suspects = list(self._nodes), session.suspects
        named = set[str]()
        if not session.interruption.lost:  # nobody hurries: the nodes that were asked for are worth waiting for
            named = {place.node for place in session.request.places}
            borrowing -= {node.id for node in nodes if node.name in named}
        aside = self._nodes.set_aside(named) - session.unblamed
        tried = [blocked | borrowing | avoid | aside, blocked | borrowing | avoid, blocked | avoid, blocked]
        attempts = chain.from_iterable(
            substitutes(session.request, nodes, out, suspects - out)
            for number, out in enumerate(tried)
            if out not in tried[:number]
        )
        for request, avoid in attempts:
            if not session.replanned:
                return None
            try:
                await self._start(session, session.known, copies, request, avoid)
            except _Refusal as error:
                why = in_the_way or str(error)
            else:
                return None
        return why if session.replanned else None

    def _in_the_way(self, reasons: Mapping[str, Container[str]]) -> str:
        """Why none of the nodes that are there can take part; empty: one can, or none is there.

        Args:
            reasons: what may be in a node's way, each with the ids of the nodes of which it is true.
        """
        told = []
        for node in self._nodes:
            if node.alive:
                why = next((why for why, those in reasons.items() if node.id in those), None)
                if why is None:
                    return ""
                told.append(f"node {node.name!r} {why}")
        return "; ".join(told)

    async def _copies(self, session: Session, known: ModelKnown) -> Copies:
        """What nodes have of a session's model: those that had none when it was first planned may have it now."""
        new = [node for node in self._nodes if node.alive and not _had(known, node)]
        return {**known.copies, **await self._descriptions.look(session, known.spec, new, LOOK_S)}

    def _lacking(self, session: Session, copies: Copies) -> tuple[set[str], set[str]]:
        """Ids of the nodes that cannot have the files of a session's model, as far as is known, and of those that would
        have to borrow all that they need of it: others have what they needed before."""
        assert session.known is not None
        alive = [node for node in self._nodes if node.alive]
        fingerprint = session.profile.fingerprint
        lacking, borrowing = set[str](), set[str]()
        have_borrowed = {worker.node_name for worker in session.workers if worker.loan}
        lenders = any(has_files(copies, node.name, fingerprint) for node in alive)
        for node in alive:
            own = copies.get(node.name)
            would_fetch = own is not None and not own.HasField("failure") and not own.profile.fingerprint
            if lenders and is_missing(copies, node.name, fingerprint):
                if node.name not in have_borrowed:
                    borrowing.add(node.id)
            elif not has_files(copies, node.name, fingerprint) and not (would_fetch and _had(session.known, node)):
                lacking.add(node.id)  # only nodes of the first plan are to fetch it
        return lacking, borrowing

    def _unable(self, request: SessionRequest) -> set[str]:
        """Ids of the nodes that cannot compute what a session asks for, but for those that it names."""
        unable, named = set[str](), {place.node for place in request.places}
        for node in (node for node in self._nodes if node.name not in named):
            try:
                participant(request, node, Place(node.name, ""))
            except ServingError:
                unable.add(node.id)
        return unable

    async def _start(
        self, session: Session, known: ModelKnown, copies: Copies, request: SessionRequest, avoid: Container[str]
    ) -> None:
        """Plan a session as another request would have it, and start its workers.

        Raises:
            one of `_Refusal`: that is not possible.
        """
        caches, model = session.caches, (known.spec, known.profiles)
        draft = await self._draft(session, request, avoid)
        taking = [one.node for one in choose_participants(request, self._but(avoid))]
        fingerprint, surely = session.profile.fingerprint, bool(request.places)
        loans = await self._lending.begin(known.spec, fingerprint, copies, self._nodes, taking, surely=surely)
        try:
            laid_out = await self._layouts.lay_out(session, request, *model, caches, draft, avoid)
        except _Refusal:
            if draft is None or not session.replanned:
                raise
            laid_out = await self._layouts.lay_out(session, request, *model, caches, None, avoid)
        ranks, experts, session.no_part = laid_out
        if loans:
            loans.give([*ranks, *(experts.hosts + experts.members if experts else ())])
        holders = self._layouts.place_holders(ranks, caches, session.profile, avoid)
        session.forecast = None if experts else forecast_of(ranks, known.profiles, request, self._nodes, self._links)
        commands = session.assign(known.spec, session.profile, ranks, caches, self._clock(), experts, holders)
        names = ", ".join(dict.fromkeys(worker.node_name for worker in session.workers))
        _log.info("session %s (%s) is loaded anew (by %s), and then goes on", session.id, session.name, names)
        self._carrier.carry_out(session, commands)

    def _but(self, avoid: Container[str]) -> list[Node]:
        return [node for node in self._nodes if node.id not in avoid]

    async def _draft(self, session: Session, request: SessionRequest, avoid: Container[str]) -> Draft | None:
        """The draft model beside the new rank 0; None: there was none, or that node cannot have it, which changes no
        text."""
        if not request.draft_model:
            return None
        first = choose_participants(request, self._but(avoid))[0]
        try:
            async with asyncio.timeout(DRAFT_S):
                draft, owner = await describe_draft(self._descriptions, session, first, self._nodes, session.caches)
                return await self._lending.lend_draft(draft, owner, first.node)
        except (ServingError, PlanError, TimeoutError) as error:
            _log.warning("session %s (%s) goes on without its draft model: %s", session.id, session.name, error)
            return None


def _had(known: ModelKnown, node: Node) -> bool:
    """Whether a node had the files of a model, or was to fetch them, when that was first planned."""
    return node.name in known.copies and not known.copies[node.name].HasField("failure")
