"""Patterns of a response template have a deadline."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.responses.template import read_response_template
from tests.daemon.text.responses.cases import TEMPLATES
from tests.daemon.text.responses.taking import CALLS, Taken, changed, taken


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?R)", r"(a|aa)+\1b", r"\s*x"])
@pytest.mark.parametrize("key", ["close_pattern", "open_pattern"])
def test_patterns_that_never_end_are_given_up(pattern: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"content": {"close_pattern": pattern}} if key == "close_pattern" else {"x": {key: pattern}, "content": {}}
    evil = {"start_anchor": "S", "fields": fields}
    answer = (" " if "s" in pattern else "a") * 30_000 + "b"
    begun = time.thread_time()
    with caplog.at_level(logging.WARNING):
        said, _, _ = taken(evil, [answer, "more"])
    assert time.thread_time() - begun < 2
    assert said.endswith("bmore")
    assert "patterns take too long" in caplog.text


def test_patterns_have_a_deadline_for_a_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Of these searches each takes milliseconds."""
    evil = {"start_anchor": "S", "fields": {"content": {"close_pattern": "(?:[,;]*,){4}y"}}}
    parts = ResponseParts(read_response_template(evil))
    begun = time.thread_time()
    told = "".join(part.content for _ in range(150) for part in parts.push(","))
    assert time.thread_time() - begun < 1
    assert told == 150 * ","
    assert caplog.text.count("take too long") == 1


def test_a_call_whose_tags_never_end_is_a_text(caplog: pytest.LogCaptureFixture) -> None:
    """For without its arguments it may do something else."""
    evil = changed(f"{CALLS}/content_args/tag_pattern", r"(?P<key>(a+)+)(?P<value>$)", "qwen3.5")
    body = "a" * 30_000 + "b"
    said, thought, calls = taken(evil, ["<tool_call><function=f>" + body + "</function></tool_call>Well."])
    assert (said.replace("\n", ""), thought, calls) == (body + "Well.", "", [])
    assert "patterns take too long" in caplog.text


EVIL, SLOW = "(a+)+$", 30_000 * "a" + "c"


@pytest.mark.parametrize(
    ("fields", "begun", "before"),
    [
        ({"score": {"open": "<s>", "close_pattern": EVIL}, "content": {}}, "Hi <s>", "Hi"),
        ({"score": {"close_pattern": EVIL}, "content": {"open": "<c>"}}, "Hi ", ""),
        ({"content": {"open": "<c>"}, "thinking": {"open_pattern": EVIL}}, "Hi ", "Hi "),
    ],
)
def test_what_comes_behind_slow_patterns_is_not_left_out(fields: dict[str, Any], begun: str, before: str) -> None:
    answer = taken({"start_anchor": "S", "fields": fields}, [begun, SLOW, " more"])
    assert answer == (f"{before}{SLOW} more", "", [])


@pytest.mark.parametrize(
    ("template", "begun", "expected"),
    [
        ("lines", "#call c1 f\na: b\n", (f"a: b\n{SLOW} more: c", "", [])),
        ("gemma4", "<|tool_call>call:f{a:1}", (f"{SLOW} more: c", "", [("f", '{"a": 1}')])),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>{}", ("", "", [("f", f"{{}}{SLOW} more: c")])),
    ],
)
def test_what_comes_behind_slow_patterns_is_no_argument_that_can_be_read(
    template: str, begun: str, expected: Taken
) -> None:
    evil = changed(f"{CALLS}/close_pattern", EVIL, template)
    del evil["fields"]["tool_calls"]["close"]
    assert taken(evil, [begun, SLOW, " more: c"]) == expected


def test_long_answers_are_read_in_time() -> None:
    parts = ResponseParts(read_response_template(TEMPLATES["qwen3"]))
    begun, told = time.thread_time(), 0
    for piece in ["<think>", *["thought and "] * 5_000, "</think>", *["answer "] * 5_000]:
        told += sum(len(part.reasoning + part.content) for part in parts.push(piece))
    assert told == len("thought and " * 5_000) + len("answer " * 5_000) - 2
    assert time.thread_time() - begun < 5
