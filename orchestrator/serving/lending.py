"""Has a node that has a model's files lend them to the workers of a session whose nodes have none."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.planning.draft import Draft
from motley.orchestrator.serving.errors import refusal
from motley.orchestrator.serving.node_questions import NodeQuestions, Unanswered
from motley.orchestrator.serving.plans.copies import Copies, has_files, is_missing
from motley.orchestrator.trust.certificates import issue_credentials
from motley.orchestrator.workers import Worker
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import Credentials, Lend, Lent, Loan, ModelSpec, OrchestratorMessage

A_NODE = 2
"""Workers of one session that a node may have, which borrow: a rank, and an expert host."""
MOST = MAX_RANKS - 1
"""Workers that a node lends to at a time: it is a member of the loan, too."""
LEND_S = 70.0
"""A node that has not said that it lends so long after it was asked is given up; it has 60 s to open the model."""


@dataclass(frozen=True)
class Loans:
    """A model that is lent to workers of one session, and the nodes that have none of their own.

    Attributes:
        lent: by whom and where, without what is a borrower's own.
        borrowers: names of these nodes.
        credentials: of the members of the loan: the lender, then whoever borrows.
    """

    lent: Loan
    borrowers: frozenset[str]
    credentials: Sequence[Credentials]

    def give(self, workers: Iterable[Worker]) -> None:
        """Tell the workers on these nodes where to read the model.

        Raises:
            ServingError: they are too many.
        """
        borrowing = [worker for worker in workers if worker.node_name in self.borrowers]
        _check_not_too_many(len(borrowing), len(self.credentials) - 1)
        for member, worker in enumerate(borrowing, start=1):
            worker.loan = _to(member, self.lent, self.credentials)


class Lending:
    """Who is asked to lend a model, until it says where."""

    def __init__(self, control: Control) -> None:
        self._questions = NodeQuestions[Lent](control)
        self.on_lost = self._questions.on_lost

    async def begin(
        self,
        spec: ModelSpec,
        fingerprint: str,
        copies: Copies,
        there: Iterable[Node],
        taking: Sequence[Node],
        *,
        surely: bool,
    ) -> Loans | None:
        """Have a model lent to the nodes that are to take part and have none of its files.

        Args:
            fingerprint: of the files.
            copies: what nodes have of the model.
            there: the nodes that may lend it.
            taking: those that are to have ranks, one for each rank.
            surely: all of these will have one; otherwise, those that the plan chooses.

        Returns:
            None: all of these have it, or nobody does.

        Raises:
            ServingError: the nodes that have it cannot lend it, or they are surely too many who borrow.
        """
        borrowers = frozenset(node.name for node in taking if is_missing(copies, node.name, fingerprint))
        lenders = [node for node in there if node.alive and has_files(copies, node.name, fingerprint)]
        if not borrowers or not lenders:
            return None
        borrowing = sum(node.name in borrowers for node in taking)
        if surely:
            _check_not_too_many(borrowing, MOST)  # before somebody waits for a lender, and that for borrowers
        refused = []
        for lender in lenders:
            loans = await self.ask(lender, spec.source, fingerprint, min(A_NODE * borrowing, MOST))
            if not isinstance(loans, Lent):
                lent, credentials = loans
                return Loans(lent, borrowers, credentials)
            refused.append(f"\n  {lender.name}: {loans.failure}")
        names = ", ".join(sorted(borrowers))
        raise refusal(
            "model_missing",
            f"{names}: no files of model {spec.source!r}, and nobody lends them:{''.join(refused)}",
            "model",
        )

    async def lend_draft(self, draft: Draft, owner: Node, borrower: Node) -> Draft:
        """Have a draft model lent to the node that is to compute it, unless it is that node's own.

        Raises:
            ServingError: its owner cannot lend it.
        """
        if owner is borrower:
            return draft
        loans = await self.ask(owner, draft.spec.source, draft.profile.fingerprint, 1)
        if isinstance(loans, Lent):
            message = f"node {owner.name!r} does not lend the draft model to {borrower.name!r}: {loans.failure}"
            raise refusal("model_missing", message, "draft_model")
        return replace(draft, loan=_to(1, *loans))

    async def ask(
        self, lender: Node, source: str, fingerprint: str, borrowers: int
    ) -> tuple[Loan, Sequence[Credentials]] | Lent:
        """Have a node lend a model.

        Args:
            fingerprint: of the files; empty: whatever it has.
            borrowers: how many may borrow.

        Returns:
            by whom and where it is lent, and credentials of the members, the lender first; or why it is not.
        """
        number = f"loan-{secrets.token_hex(8)}"
        credentials = issue_credentials(number, borrowers + 1)
        order = Lend(
            id=number,
            source=source,
            fingerprint=fingerprint,
            members=len(credentials),
            secret=secrets.token_bytes(32),
            tls=credentials[0],
        )
        try:
            lent = await self._questions.ask(lender, number, OrchestratorMessage(lend=order), LEND_S)
        except Unanswered as unanswered:
            return Lent(failure=f"it {unanswered}")
        if lent.failure:
            return lent
        loan = Loan(
            id=number,
            node=lender.name,
            address=lent.listening,
            files=lent.files,
            members=order.members,
            secret=order.secret,
        )
        return loan, credentials

    def on_lent(self, node: Node, lent: Lent) -> None:
        """A node says that it lends a model, or why not; ignored if it was not asked."""
        self._questions.on_answer(node, lent.id, lent)


def _check_not_too_many(borrowing: int, most: int) -> None:
    """
    Raises:
        ServingError: more workers borrow than a node lends to.
    """
    if borrowing > most:
        raise refusal(
            "model_missing",
            f"{borrowing} ranks and expert hosts are on nodes without files of the model; a node lends them to"
            f" {most} at most: put the files on some of these nodes",
            "model",
        )


def _to(member: int, lent: Loan, credentials: Sequence[Credentials]) -> Loan:
    """A loan as one of its members is told of it."""
    own = Loan(member=member, tls=credentials[member])
    own.MergeFrom(lent)
    return own
