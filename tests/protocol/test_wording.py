"""Sizes and counts in words."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.protocol.wording import counted, human_bytes, short_bytes

SIZES = {"byte": 1, "bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
COUNTS = st.integers(-(10**16), 10**16) | st.sampled_from([10**power for power in range(16)]).flatmap(
    lambda size: st.integers(-(size // 100), size // 100).map(lambda off: size + off)
)
"""Any, and many that are close to where a unit begins."""


@pytest.mark.parametrize(
    ("count", "long", "short"),
    [
        (0, "0 bytes", "0 bytes"),
        (1, "1 byte", "1 byte"),
        (999, "999 bytes", "999 bytes"),
        (1000, "1.00 kB", "1 kB"),
        (13_340, "13.34 kB", "13.3 kB"),
        (983_040, "983.04 kB", "983 kB"),
        (999_996, "1.00 MB", "1 MB"),
        (1_500_000_000, "1.50 GB", "1.5 GB"),
        (153_200_000, "153.20 MB", "153 MB"),
        (999_600_000, "999.60 MB", "1 GB"),
        (7_004_000_000_000, "7.00 TB", "7 TB"),
        (-2_000_000, "-2.00 MB", "-2 MB"),
    ],
)
def test_sizes_have_two_decimals_or_few_digits(count: int, long: str, short: str) -> None:
    assert human_bytes(count) == long
    assert short_bytes(count) == short


@given(COUNTS)
@example(983_040)
@example(999_999_999)
def test_sizes_can_be_read_back(count: int) -> None:
    long = re.fullmatch(r"(-?(?:0|[1-9]\d*)) (bytes?)|(-?[1-9]\d*\.\d\d) ([kMGT]B)", human_bytes(count))
    short = re.fullmatch(r"(-?(?:0|[1-9]\d*)) (bytes?)|(-?[1-9]\d*(?:\.\d?[1-9])?) ([kMGT]B)", short_bytes(count))
    for said, error in ((long, 0.005), (short, 0.005)):
        assert said is not None, (human_bytes(count), short_bytes(count))
        amount, unit = (part for part in said.groups() if part is not None)
        assert abs(float(amount)) < 1000 or unit == "TB"
        assert (unit == "byte") == (abs(count) == 1)
        off = abs(float(amount) * SIZES[unit] - count)
        assert off <= (0 if unit.startswith("byte") else error * max(SIZES[unit], abs(count) if said is short else 0))


def test_things_are_counted() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
