"""What a worker proves to its peers: who it is in which session, and that all of them go by the same plan."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from motley.protocol import MAX_RANKS
from motley.protocol import mesh_pb2 as pb
from motley.protocol.worker_pb2 import Start
from motley.transport import Membership, Plain, Tls

OWN = {
    *("secret", "tls", "plain", "engine", "engine_options", "threads"),
    *("hosts", "group", "draft", "holder_bytes", "loan"),
}
"""Fields of an assignment that may differ from rank to rank."""


def membership(start: Start) -> Membership:
    """What a rank proves to the other ranks, and what all of them must agree on, before the first tensor."""
    assignment = start.assignment
    return Membership(
        session=start.session,
        epoch=start.epoch,
        rank=start.rank,
        size=assignment.size,
        secret=assignment.secret,
        agreement=_agreement(assignment),
    )


def with_hosts(trunk: Membership) -> Membership:
    """What ranks and those who serve them, expert hosts or cache holders, prove to each other: there is room for hosts
    that are still to join."""
    return replace(trunk, size=MAX_RANKS)


def group_membership(start: Start) -> Membership:
    """What the workers of an expert host's group prove to each other; each is called by its place in the group."""
    group = start.assignment.group
    agreed = pb.Group(host=group.host, slices=group.slices, ranks=group.ranks)
    return Membership(
        session=f"{start.session}.h{group.host}",
        epoch=start.epoch,
        rank=group.member,
        size=len(group.ranks),
        secret=group.secret,
        agreement=_agreement(start.assignment, agreed),
    )


def protection(assignment: pb.Assignment) -> Tls | Plain:
    """How the links of a session are protected: by its certificates unless plain ones were asked for by name.

    Raises:
        UsageError: the certificates cannot be used.
    """
    return _protection(assignment, assignment.tls)


def group_protection(assignment: pb.Assignment) -> Tls | Plain:
    """How the links between the workers of a group are protected, see `protection`."""
    return _protection(assignment, assignment.group.tls)


def _protection(assignment: pb.Assignment, mine: pb.Credentials) -> Tls | Plain:
    plain = assignment.WhichOneof("links") == "plain"
    return Plain() if plain else Tls(mine.certificate, mine.key, mine.authority)


def _agreement(assignment: pb.Assignment, group: pb.Group | None = None) -> bytes:
    """A digest of all that must be the same for everyone who meets."""
    agreed = pb.Assignment()
    agreed.CopyFrom(assignment)
    for own in OWN:
        agreed.ClearField(own)
    if assignment.hosts:  # others may have joined: that there are some is agreed on
        agreed.hosts.add()
    agreed.model.ClearField("source")  # the fingerprint tells whether the files are equal
    if group is not None:
        agreed.group.CopyFrom(group)
    return hashlib.sha256(agreed.SerializeToString(deterministic=True)).digest()
