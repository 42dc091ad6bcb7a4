"""Shares given by hand: kept or refused, never changed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.planning.cutting.by_hand import keep_shares
from motley.orchestrator.planning.cutting.shares import Candidate, PlanError
from motley.protocol.mesh_pb2 import ModelProfile

from ..conftest import small_profile

WHOLE = 70_000
"""About what the small profile's weights and fixed bytes take."""


def offers(shares: list[float], memory: list[int]) -> list[Candidate]:
    return [
        Candidate(f"pc-{rank}", 1.0, own, share) for rank, (share, own) in enumerate(zip(shares, memory, strict=True))
    ]


def plan(shares: list[float], memory: list[int]) -> list[int]:
    """MLP units of every rank."""
    profiles: list[ModelProfile] = [small_profile()] * len(shares)
    plans = keep_shares(profiles, offers(shares, memory), 10)
    assert all(plan.memory_bytes <= own for plan, own in zip(plans, memory, strict=True))
    return [len(plan.mlp) for plan in plans]


def test_they_are_kept_where_there_is_room() -> None:
    assert plan([1, 1, 8], [WHOLE] * 3) == [2, 1, 13]
    assert plan([0, 1], [WHOLE, 2 * WHOLE]) == [0, 16]


def test_shares_that_do_not_fit_are_refused_with_the_nearest_that_do() -> None:
    memory = [40_000] * 3
    with pytest.raises(PlanError, match="does not fit in shares 1,1,8:") as refusal:
        plan([1, 1, 8], memory)
    message = str(refusal.value)
    assert re.search(r"pc-0: 40.00 kB available, .* needed$", message, re.MULTILINE)
    assert re.search(r"pc-2: 40.00 kB available, .* needed, .* missing$", message, re.MULTILINE)
    (told,) = re.findall(r"The nearest that fit: `--shares (\S+)`\.$", message)
    nearest = [float(share) for share in told.split(",")]
    assert nearest[0] == nearest[1] < nearest[2]
    plan(nearest, memory)


def test_what_fits_in_no_shares_is_refused_for_that() -> None:
    with pytest.raises(PlanError, match=r"are missing in total\. By shares:"):
        plan([1, 1], [WHOLE // 4] * 2)
    with pytest.raises(PlanError, match=r"By shares:(.|\n)*pc-1: 500 bytes available"):
        plan([1, 0], [2 * WHOLE, 500])


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, WHOLE)), min_size=1, max_size=4).filter(
        lambda offers: any(share for share, _ in offers)
    )
)
def test_what_is_told_to_fit_does(given: list[tuple[int, int]]) -> None:
    shares, memory = [float(share) for share, _ in given], [own for _, own in given]
    try:
        plan(shares, memory)
    except PlanError as error:
        for told in re.findall(r"`--shares (\S+)`\.$", str(error)):
            plan([float(share) for share in told.split(",")], memory)
