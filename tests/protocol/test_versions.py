"""Which versions of the protocol have one in common, and which side is the older where there is none."""

import pytest

from motley.protocol.versions import NEWEST, OLDEST, PROTOCOL, VERSION, disagreement, told


def test_what_a_node_tells_is_taken() -> None:
    metadata = dict(told())
    assert disagreement(metadata[PROTOCOL], metadata[NEWEST]) == ""


@pytest.mark.parametrize(
    ("oldest", "newest", "older"),
    [
        (OLDEST, None, ""),
        (VERSION, None, ""),
        (OLDEST - 3, OLDEST, ""),
        (VERSION, VERSION + 5, ""),
        (OLDEST - 3, VERSION + 5, ""),
        (OLDEST - 2, OLDEST - 1, "this node has the older one; update this machine"),
        (VERSION + 1, None, "the orchestrator has the older one; update its machine"),
        (VERSION + 1, VERSION + 2, "the orchestrator has the older one; update its machine"),
    ],
)
def test_versions_in_common(oldest: int, newest: int | None, older: str) -> None:
    why = disagreement(str(oldest), "" if newest is None else str(newest))
    assert (why == "") == (older == "")
    assert older in why


@pytest.mark.parametrize(
    ("oldest", "newest"), [("", ""), ("", "10"), ("x", "10"), ("9", "x"), ("-9", ""), ("9" * 50, "")]
)
def test_what_is_no_number_is_too_old(oldest: str, newest: str) -> None:
    assert "this node has the older one" in disagreement(oldest, newest)
