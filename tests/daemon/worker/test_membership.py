"""What workers prove to each other before they connect."""

from __future__ import annotations

from motley.daemon.rank.blocks.kept_file import IRRELEVANT
from motley.daemon.worker.membership import OWN, membership
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.rank.test_loading import CASE, assignment


def test_ranks_agree_on_how_each_of_them_holds_the_model() -> None:
    def agreement(order: pb.Assignment) -> bytes:
        return membership(wp.Start(session="s", epoch=1, rank=0, assignment=order)).agreement

    order = assignment(CASE, "int4")
    first = agreement(order)
    order.engine = "reference"
    assert agreement(order) == first  # may differ from rank to rank
    order.shares[0].quantisation = "int8"
    other = agreement(order)
    order.model.beside.append("int8")
    assert len({first, other, agreement(order)}) == 3


def test_of_every_field_it_was_thought_about_whether_it_may_differ() -> None:
    """From rank to rank, and between two starts of which the second reads the caches of the first: a new field goes
    into this list, or into one of those, or into both."""
    neither = {
        *("model", "fingerprint", "size", "shares", "context", "wire", "expert_slices", "cache_blocks"),
        *("cache_block_tokens", "windowed_blocks", "window", "adapters", "adapter_rank", "expert_engine"),
        *("embeddings", "one_wave", "snapshots"),
    }
    fields = {field.name for field in pb.Assignment.DESCRIPTOR.fields}
    assert neither | OWN | IRRELEVANT == fields
    assert not neither & (OWN | IRRELEVANT)
