"""Sizes as people type them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cli.typed.sizes import parse_size

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5g", 1_500_000_000),
        (" 2 GiB ", 2 * 2**30),
        ("0.5tib", 2**39),
        (".25k", 250),
        ("1000000", 1000000),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "6XB", "-1GB", "1e9", "6 G B", "1.2.3g", "nan", "0", "0.4b", "٣k", "6", "999999"]
)
def test_what_is_no_size_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is"):
        parse_size(text)


@given(st.integers(10**6, 2**60))
def test_plain_bytes_come_back(size: int) -> None:
    assert parse_size(str(size)) == size
