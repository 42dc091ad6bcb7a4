"""What each worker of a session is started with: its share of the model, its certificate, its place in a group."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from motley.orchestrator.experts.hosts import ExpertHost, Member
from motley.orchestrator.experts.messages import to_message
from motley.orchestrator.experts.registry import ExpertMap
from motley.orchestrator.planning.caches import Caches, blocks_of
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.trust.certificates import SessionAuthority, issue_credentials
from motley.orchestrator.workers import CacheHolder, Rank, Worker
from motley.protocol import SNAPSHOTS
from motley.protocol.mesh_pb2 import Assignment, Group, ModelProfile, ModelSpec


def model_spec(request: SessionRequest, quantisation: str, beside: Sequence[str] = ()) -> ModelSpec:
    """The model that a client asks for.

    Args:
        quantisation: as engines hold it: of every rank that says no other, and of expert hosts.
        beside: other quantisations in which ranks hold it.
    """
    return ModelSpec(
        source=request.model,
        quantisation=quantisation,
        block=request.block,
        exact=request.exact,
        beside=beside,
        cache_format=request.cache_format,
    )


def draft_spec(request: SessionRequest, quantisation: str) -> ModelSpec:
    """The draft model that a client asks for, as its engine holds it."""
    return ModelSpec(
        source=request.model if request.has_own_head else request.draft_model,
        quantisation=quantisation,
        block=request.block,
        cache_format=request.cache_format,
        ahead=request.has_own_head,
    )


class Assignments:
    """The assignments of one session's workers, whenever these start."""

    def __init__(
        self,
        session_id: str,
        request: SessionRequest,
        spec: ModelSpec,
        profile: ModelProfile,
        ranks: Sequence[Rank],
        caches: Caches,
        experts: ExpertMap | None,
        holders: Sequence[CacheHolder],
    ) -> None:
        """
        Args:
            spec: the model with every quantisation that units must suit.
            profile: what the model costs in the first of these.
            caches: what those of every rank hold.
            experts: None where they are not on hosts.
            holders: of far cache blocks; there are either none, or one for each rank.
        """
        self._session_id = session_id
        self._request = request
        blocks = blocks_of(caches, profile, [rank.setup for rank in ranks])
        self._common = Assignment(
            model=spec,
            fingerprint=profile.fingerprint,
            size=len(ranks),
            shares=[rank.plan.to_share(rank.setup.quantisation) for rank in ranks],
            context=caches.context,
            cache_blocks=blocks.count,
            cache_block_tokens=blocks.tokens,
            far_blocks=blocks.on_disk + blocks.on_nodes,
            far_blocks_on_disk=blocks.on_disk if holders else 0,
            windowed_blocks=blocks.windowed,
            window=blocks.window,
            sequences=blocks.slots or request.sequences,
            wire=request.wire,
            threads=request.threads,
            secret=secrets.token_bytes(32),
            expert_slices=experts.slices if experts else 0,
            cache_holders=len(holders),
            keep_prefixes=request.keep_prefixes,
            embeddings=request.embeddings,
            snapshots=SNAPSHOTS,
            adapters=request.adapters,
            adapter_rank=request.adapter_rank if request.adapters else 0,
            expert_engine=request.expert_engine if experts else "",
        )
        """What the assignments of all workers have in common."""
        self._authority = SessionAuthority(session_id)
        """Of all ranks, cache holders and hosts, by the index of the worker; also of hosts that are still to join."""
        self._groups: dict[int, Group] = {}
        """By the index of a worker of a group: its place there."""
        self._experts = experts
        for host in experts.hosts if experts else ():
            self.form_group(host)

    def form_group(self, host: ExpertHost) -> None:
        """Give every worker of a host its place in the host's group; a host of one worker has no group."""
        if not host.others:
            return
        secret = secrets.token_bytes(32)
        issued = issue_credentials(f"{self._session_id}.h{host.number}", len(host.group))
        for member, worker in enumerate(host.group):
            self._groups[worker.index] = Group(
                host=host.number,
                member=member,
                slices=[len(each.slices) for each in host.group],
                ranks=[each.index for each in host.group],
                secret=secret,
                tls=issued[member],
            )

    def of(self, worker: Worker) -> Assignment:
        """What a worker is started with now; of a group's workers, only the leader is known to the trunk."""
        assignment = Assignment(group=self._groups.get(worker.index))
        assignment.MergeFrom(self._common)
        assignment.engine = worker.setup.engine if isinstance(worker, Rank) else self._request.expert_engine
        if isinstance(worker, Rank):
            assignment.engine_options.update(self._request.options_of(worker.setup.engine))
            if worker.draft:
                assignment.draft.CopyFrom(worker.draft.assignment())
                assignment.draft.engine_options.update(self._request.options_of(worker.draft.setup.engine))
        if worker.loan:
            assignment.loan.CopyFrom(worker.loan)
        if isinstance(worker, CacheHolder):
            assignment.holder_bytes = worker.blocks_bytes
        if isinstance(worker, Member):
            assignment.ClearField("secret")
        else:
            assignment.tls.CopyFrom(self._authority.of(worker.index))
        if self._experts:
            assignment.hosts.extend(to_message(host.first) for host in self._experts.hosts)
        return assignment
