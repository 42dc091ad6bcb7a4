"""Response templates are read, or refused by the name of what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.responses.template import InvalidResponseTemplate, read_response_template
from tests.daemon.text.responses.taking import CALLS, changed

LARGE = [r"(?:a{0,4000000000}){4000000000}", r"(?:(?:a{900}){900}){900}", "a" * 1001, f"a{{{'9' * 5000}}}"]

BACK = [r"(?=abc\K)", r"\\\K", r"(?r)abc"]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("text", "valid dictionary"),
        ([], "valid dictionary"),
        ({}, "fields: Field required"),
        (changed("version", 2), "version"),
        (changed("fields", {}), "fields"),
        (changed("fields", {str(at): {"open": "x"} for at in range(33)}), "fields"),
        (changed("closes", 1), "closes: Extra inputs"),
        (changed("defaults", []), "defaults"),
        (changed("defaults", {"role": "assistant", "content": "Hm"}), "defaults.content: not supported"),
        (changed("start_anchor", None), "neither start_anchor nor"),
        (changed("start_anchor_pattern", "x"), "start_anchor beside"),
        (changed("start_anchor", ""), "start_anchor: a text is empty"),
        (changed("start_anchor", "x" * 1001), "start_anchor: the texts are too long"),
        (changed("fields/x", 5), "fields.x"),
        (changed("fields/content/opens", "x"), "fields.content.opens: Extra inputs"),
        (changed("fields/content/close", []), "fields.content.close: a text is empty, or there is none"),
        (changed("fields/content/close", [1]), "fields.content.close"),
        (changed("fields/content/content", "yaml"), "fields.content.content"),
        (changed("fields/content/content", "json"), "fields.content: is no plain text"),
        (changed("fields/content/content_args", {"stripe": True}), "fields.content.content_args.stripe: Extra"),
        (changed("fields/content/join", ""), "fields.content: join without repeats"),
        (changed("fields/thinking/content", "text"), "several fields that nothing opens: content, thinking"),
        (changed(f"{CALLS}/open_pattern", "("), "fields.tool_calls.open_pattern: not a valid pattern"),
        (changed(f"{CALLS}/open_pattern", "(" * 500 + ")" * 500), "open_pattern: not a valid pattern"),
        *((changed(f"{CALLS}/open_pattern", pattern), "open_pattern: the pattern is too large") for pattern in LARGE),
        *((changed(f"{CALLS}/open_pattern", pattern), r"open_pattern: \\K and \(\?r\) are not") for pattern in BACK),
        (changed(f"{CALLS}/content_args/tag_pattern", r"(?P<key>a)\K(?P<value>b)", "qwen3.5"), r"tag_pattern: \\K and"),
        (changed(f"{CALLS}/repeats", "yes"), "fields.tool_calls.repeats"),
        (changed(f"{CALLS}/transform", None), "fields.tool_calls.transform: calls are not made"),
        (changed(f"{CALLS}/transform", "{content}"), "fields.tool_calls.transform: calls are not made"),
        (changed(f"{CALLS}/transform/function/name", "f {name}"), "transform: calls are not made"),
        (changed(f"{CALLS}/transform/function/name", "{other}"), "json with this transform is not supported"),
        (changed(f"{CALLS}/transform/function/strict", True), "transform: calls are not made"),
        (changed(f"{CALLS}/transform/index", 1), "transform: calls are not made"),
        (changed(f"{CALLS}/transform/function", "{content}"), "json with this transform is not supported"),
        (changed(f"{CALLS}/content", "text"), "fields.tool_calls.content: text are no arguments"),
        (changed(f"{CALLS}/content_args/string_delims", [["«", "»"]]), "string_delims: .* is not supported"),
        (changed(f"{CALLS}/content_args/string_delims", [["'"]]), "content_args.string_delims.0"),
        (changed(f"{CALLS}/content_args/tag_pattern", "x", "qwen3.5"), "tag_pattern: no groups 'key' and 'value'"),
        (changed(f"{CALLS}/content_args/value_parser", {"name": "xml-inline"}, "qwen3.5"), "value_parser.name"),
        (
            changed(f"{CALLS}/content_args/value_parser", {"args": {"strip": "no"}}, "qwen3.5"),
            "value_parser.args.strip",
        ),
        (
            changed(f"{CALLS}/content_args/value_parser", {"name": "json", "args": {"unquoted_keys": True}}, "lines"),
            "value_parser.args.unquoted_keys: Extra inputs",
        ),
        (changed(f"{CALLS}/content_args", {"strip": True}, "lfm"), "tool_calls.content_args.strip: Extra inputs"),
        (changed(f"{CALLS}/content_args/kv_sep", "", "lines"), "content_args.kv_sep"),
        (changed(f"{CALLS}/transform/function/name", "{fn.name}", "cohere"), "with this transform is not supported"),
    ],
)
def test_what_is_malformed_or_not_supported_is_refused_by_name(written: object, why: str) -> None:
    with pytest.raises(InvalidResponseTemplate, match=why):
        read_response_template(written)


def test_what_changes_nothing_is_taken() -> None:
    read_response_template(changed("defaults", {"role": "model", "content": "", "tool_calls": []}))
    read_response_template(changed("fields/content/optional", False))
    read_response_template(changed("fields/content/repeats", True))


def test_a_backslash_before_a_k_is_no_k_of_a_pattern() -> None:
    read_response_template(changed(f"{CALLS}/open_pattern", r"(?P<name>x)\\K"))


def test_patterns_are_nested_as_deeply_as_can_be_read_and_used() -> None:
    for depth in range(499, 0, -1):
        try:
            read_response_template(changed("fields/content", {"close_pattern": "(" * depth + ")" * depth}))
        except InvalidResponseTemplate:
            continue
        assert depth > 50
        return


KEYS = ["open", "close", "content", "transform", "content_args", "function", "open_pattern"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from(["{content}", "json", "(?:a|b)*"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=9,
)


@given(JSON, st.sampled_from(["content", "tool_calls", "fields", "start_anchor", "x"]))
def test_any_json_is_read_or_refused(value: object, place: str) -> None:
    written = changed(place if place in ("fields", "start_anchor") else f"fields/{place}", value)
    try:
        template = read_response_template(written)
    except InvalidResponseTemplate:
        return
    parts = ResponseParts(template)
    for _ in (*parts.push("<|turn>model\nx<channel|>"), *parts.flush()):
        pass
