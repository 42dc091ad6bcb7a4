"""Sizes and counts in words."""

from __future__ import annotations

import pytest

from motley.protocol.wording import counted, human_bytes, short_bytes


@pytest.mark.parametrize(
    ("count", "long", "short"),
    [
        (0, "0 bytes", "0 bytes"),
        (999, "999 bytes", "999 bytes"),
        (1000, "1.00 kB", "1 kB"),
        (13_340, "13.34 kB", "13.3 kB"),
        (1_500_000_000, "1.50 GB", "1.5 GB"),
        (153_200_000, "153.20 MB", "153 MB"),
        (999_600_000, "999.60 MB", "1000 MB"),
        (7_004_000_000_000, "7004.00 GB", "7004 GB"),
    ],
)
def test_sizes_have_two_decimals_or_few_digits(count: int, long: str, short: str) -> None:
    assert human_bytes(count) == long
    assert short_bytes(count) == short


def test_missing_bytes_keep_their_sign() -> None:
    assert human_bytes(-2_000_000) == "-2.00 MB"


def test_things_are_counted() -> None:
    assert [counted(count, "rank") for count in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
