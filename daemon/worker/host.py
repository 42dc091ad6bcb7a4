"""A worker that is an expert host, alone or as one of a group: it loads experts, and computes them for the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from motley.daemon.experts.group import Group, GroupMember
from motley.daemon.experts.holding import Holding
from motley.daemon.experts.host import ExpertHost, prepare_process
from motley.daemon.experts.keys import keys_of
from motley.daemon.experts.loading import ExpertLoader
from motley.daemon.worker.membership import group_membership, group_protection, membership, protection, with_hosts
from motley.daemon.worker.worker import CONNECT_S, Worker
from motley.transport import Listener, Messenger, WireFormat, connect_mesh


def run_host(worker: Worker, listener: Listener, addresses: Sequence[str]) -> None:
    """Be an expert host, or a worker of its group, until the end.

    Args:
        listener: where the ranks reach this host; between the workers of a group, where the others reach this one.
        addresses: ``host:port`` of every worker of the group, by its place there; empty: the host is this worker alone.

    Raises:
        Released, PipeClosed: the daemon is done with this worker, or is gone.
        Exception: anything else that ends it, see `motley.daemon.worker.failures.failure_of`.
    """
    daemon, assignment = worker.daemon, worker.start.assignment
    group = assignment.group if assignment.HasField("group") else None
    number = group.host if group is not None else worker.start.rank - assignment.size
    leads = group is None or group.member == len(addresses) - 1
    prepare_process()
    with contextlib.ExitStack() as stack:
        communicator = None
        if group is not None:  # the one that leads dials all: its listener is for the ranks
            own = stack.enter_context(contextlib.closing(worker.listen())) if leads else listener
            communicator = stack.enter_context(
                connect_mesh(
                    own,
                    group_membership(worker.start),
                    addresses,
                    timeout=CONNECT_S,
                    all_listen=True,
                    security=group_protection(assignment),
                )
            )
            stack.enter_context(worker.parting(communicator))
        loader = stack.enter_context(
            ExpertLoader(assignment, models=worker.models, cache=worker.cache, threads=worker.threads)
        )
        holding = stack.enter_context(Holding(keys_of(assignment.hosts[number]), loader, tell=daemon.tell))
        wire_format = WireFormat(assignment.wire)
        if communicator is not None and not leads:
            GroupMember(communicator, holding, wire_format=wire_format, commands=daemon.commands).run()
            return
        messenger = Messenger(
            with_hosts(membership(worker.start)),
            protection(assignment),
            listener=listener,
            accepts=range(assignment.size),
            wrap=worker.wrap,
        )
        stack.callback(messenger.close)
        ExpertHost(
            messenger,
            holding,
            trunk=assignment.size,
            wire_format=wire_format,
            daemon=daemon,
            commands=daemon.commands,
            group=Group(communicator, assignment.group.slices) if communicator is not None else None,
        ).run()
