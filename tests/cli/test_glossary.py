"""Words that `motley status` shows are explained, as far as they occur."""

from __future__ import annotations

from typing import Any

from motley.cli.shown.glossary import of_nodes, of_sessions


def session(**changed: Any) -> dict[str, Any]:
    return {"ranks": [], "hosts": [], "activity": None, "forecast": None, "quantisation": "int8"} | changed


def test_only_what_is_shown_is_explained() -> None:
    assert of_sessions([]) == []
    assert [line.partition(":")[0] for line in of_sessions([session()])] == ["context"], "it has no plan yet"
    doing = {"tried_drafts": 0, "far_tiers": []}
    rank = {"timing": None}
    made = session(ranks=[rank], activity=doing)
    assert [line.partition(":")[0] for line in of_sessions([made])] == ["context", "rank", "caches"]
    busy = session(
        ranks=[{"timing": {"wait_ms": 1.0}}],
        hosts=[{}],
        activity={"tried_drafts": 3, "far_tiers": [{}]},
        forecast={},
        quantisation="stored",
    )
    told = [line.partition(":")[0] for line in of_sessions([made, busy])]
    assert told == [
        "context",
        "stored",
        "rank",
        "experts",
        "step",
        "compute, wire, wait",
        "caches",
        "far blocks",
        "guesses",
    ]
    assert of_nodes([]) == []
    node = {"speeds": [], "memory_reserved_bytes": 0}
    assert [len(of_nodes([node | more])) for more in ({}, {"speeds": [{}]}, {"memory_reserved_bytes": 1})] == [1, 2, 2]
