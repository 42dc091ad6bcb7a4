"""A session's way up and down: a node describes its model, it is laid out, its workers start, and are released."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from motley.orchestrator.experts.loads import KeptLoads
from motley.orchestrator.mesh.links import LinkTable
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.planning.cutting.shares import PlanError
from motley.orchestrator.planning.experts.layout import LayoutError
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.planning.setup import SetupError
from motley.orchestrator.serving.carrier import Carrier
from motley.orchestrator.serving.errors import ServingError, refusal
from motley.orchestrator.serving.lending import Lending
from motley.orchestrator.serving.plans.copies import check_copies
from motley.orchestrator.serving.plans.descriptions import Descriptions
from motley.orchestrator.serving.plans.drafts import describe_draft
from motley.orchestrator.serving.plans.fitting import Fitting
from motley.orchestrator.serving.plans.forecasts import forecast_of
from motley.orchestrator.serving.plans.layouts import Layouts
from motley.orchestrator.serving.plans.participants import choose_participants, wanted_model
from motley.orchestrator.serving.plans.sizes import caches_of
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.facts import ModelKnown, State
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import NameInUseError, SessionTable

READY_S = 3600.0
"""The longest wait for a session to be ready; its own deadlines are shorter while nothing happens."""
CLOSE_S = 15.0
"""The longest wait for a session's ranks to be released."""


class Lifecycle:
    """Brings sessions up and down, as clients ask."""

    def __init__(
        self,
        nodes: NodeTable,
        links: LinkTable,
        sessions: SessionTable,
        descriptions: Descriptions,
        lending: Lending,
        layouts: Layouts,
        fitting: Fitting,
        carrier: Carrier,
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._sessions = sessions
        self._descriptions = descriptions
        self._lending = lending
        self._layouts = layouts
        self._fitting = fitting
        self._carrier = carrier
        self._clock = clock

    async def create(self, request: SessionRequest, loads: KeptLoads | None = None) -> Session:
        """Plan a session and start its ranks; returns once the assignments are sent.

        Args:
            loads: how often its experts were chosen before it is begun anew; None: it is new.

        Raises:
            ServingError: the name is taken, a node or engine is unknown, the model cannot be served or fitted, or the
                orchestrator shuts down.
        """
        self._carrier.check_running()
        try:
            aside = self._nodes.set_aside(request.all_named)
            participants = choose_participants(request, [node for node in self._nodes if node.id not in aside])
            spec = wanted_model(request, participants)
            session = self._sessions.open(request, time.time())
            session.earlier_loads = loads or {}
            try:
                taking = [one.node for one in participants]
                profiles, copies = await self._descriptions.survey(session, spec, taking, self._nodes)
                profile = profiles[spec.quantisation]
                self._carrier.check_planning(session)
                loans = await self._lending.begin(
                    spec, profile.fingerprint, copies, self._nodes, taking, surely=bool(request.places)
                )
                self._carrier.check_planning(session)
                caches = caches_of(request, profile)
                draft = None
                if request.draft_model:
                    first = participants[0]
                    draft, owner = await describe_draft(self._descriptions, session, first, self._nodes, caches)
                    draft = await self._lending.lend_draft(draft, owner, first.node)
                    self._carrier.check_planning(session)
                self._sessions.rename(session, request.name or profile.name)
                try:
                    laid_out = await self._layouts.lay_out(session, request, spec, profiles, caches, draft, aside)
                except (PlanError, PlacementError) as error:
                    hint = await self._fitting.hint(session, participants, spec, profiles, caches, draft)
                    more = [hint] if hint else []
                    if away := [node.name for node in self._nodes if node.id in aside]:
                        more.append(
                            f"Nodes that come and go take no part unless --nodes names them: {', '.join(away)}."
                        )
                    raise type(error)("\n".join([str(error), *more])) from error
                ranks, experts, session.no_part = laid_out
                reading = [*ranks, *(experts.hosts + experts.members if experts else ())]
                involved = {participants[0].node.name, *(worker.node_name for worker in reading)}
                if loans:
                    loans.give(reading)
                    involved -= loans.borrowers
                check_copies(request.model, copies, dict.fromkeys(one.name for one in taking if one.name in involved))
                session.known = ModelKnown(spec, profiles, copies)
                holders = self._layouts.place_holders(ranks, caches, profile, aside)
                session.forecast = None if experts else forecast_of(ranks, profiles, request, self._nodes, self._links)
                commands = session.assign(spec, profile, ranks, caches, self._clock(), experts, holders)
                self._carrier.carry_out(session, commands)
            except BaseException:
                self._sessions.remove(session)
                raise
        except NameInUseError as error:
            raise refusal("name_in_use", str(error), "name") from error
        except LayoutError as error:
            raise refusal("invalid_request", str(error), "experts") from error
        except SetupError as error:
            raise refusal(error.code, str(error), "engine") from error
        except (PlanError, PlacementError) as error:
            raise refusal("insufficient_memory", str(error)) from error
        return session

    async def wait_ready(self, session: Session) -> None:
        """Wait until a session is ready.

        Raises:
            ServingError: it failed or was closed, or it is not ready after `READY_S`: it goes on coming up.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self._carrier.until(lambda: session.state is State.READY or session.explained)
        if not session.alive:
            raise ServingError(session.failure) if session.failure else self._carrier.closed(session)
        if session.state is not State.READY:
            message = f"session {session.id} ({session.name}) is {session.state}, not ready, after {READY_S:.0f} s;"
            raise refusal("timed_out", f"{message} it goes on: look at GET /api/sessions/{session.id}")

    async def close_for_good(self, session: Session) -> None:
        """Close a session that nobody wants any more.

        Raises:
            ServingError: the orchestrator stops, and begins it anew at its next start.
        """
        self._carrier.check_running()
        await self.close(session)

    async def close(self, session: Session) -> None:
        """Release a session's ranks and wait, at most `CLOSE_S`, until they are gone."""
        self._carrier.carry_out(session, session.close(self._clock()))
        self._descriptions.cancel(session, self._carrier.closed(session))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._carrier.until(lambda: session.over)

    async def close_all(self) -> None:
        """Close every session, for the orchestrator stops; requests under way are told so."""
        self._carrier.stopping = True
        await asyncio.gather(*(self.close(session) for session in self._sessions))
