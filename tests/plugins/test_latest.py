"""What was used latest is kept, and no more of it than there may be."""

from __future__ import annotations

from motley.plugins.latest import Latest


def test_what_was_not_asked_for_longest_goes_and_is_made_again() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    kept = Latest[str, str](2)
    for key in ("a", "b", "a", "c", "a", "b"):
        assert kept.get(key, lambda key=key: make(key)) == key.upper()  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]
    assert list(kept.values()) == ["A", "B"]
    kept.clear()
    assert not list(kept.values())
