"""OpenAI's request bodies: what is obeyed, what is refused and how it is named. No server needed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motley.orchestrator.api.anthropic.generates import MESSAGES
from motley.orchestrator.api.anthropic.generates import generate_of as messages_of
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.openai.generates import Generates, chat_generates, completion_generates
from motley.orchestrator.api.responses.generates import RESPONSE
from motley.orchestrator.api.responses.generates import generate_of as response_of
from motley.orchestrator.api.schema import read
from motley.orchestrator.usual_sampling import fill, usual
from motley.protocol.mesh_pb2 import Sampling

USER = {"role": "user", "content": "Hi"}


def chat(**fields: Any) -> Generates:
    return chat_generates({"model": "bard", "messages": [USER], **fields})


def completion(**fields: Any) -> Generates:
    return completion_generates({"model": "bard", "prompt": "Hi", **fields})


def messages(**fields: Any) -> Any:
    return json.loads(chat(**fields).each[0].messages_json)


def test_defaults_are_the_models_else_openais() -> None:
    parameters = chat()
    sampling = parameters.each[0].sampling
    of_model = Sampling(temperature=0.6, top_k=20)
    own = Sampling(temperature=0, top_p=0.5)
    fill(own, of_model)
    assert (own.temperature, own.top_k, own.top_p) == (0, 20, 0.5)
    assert usual(of_model) == {"temperature": 0.6, "top_k": 20, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    fill(sampling, Sampling())
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1, 0, 0)
    assert not sampling.logprobs
    assert (parameters.each[0].max_tokens, list(parameters.each[0].stop)) == (0, [])
    assert not parameters.stream
    assert (completion().each[0].max_tokens, completion().each[0].usual_tokens) == (0, 16)
    until_the_context_is_full = completion(max_tokens=None).each[0]
    assert (until_the_context_is_full.max_tokens, until_the_context_is_full.usual_tokens) == (0, 0)
    assert chat().each[0].sampling.seed != chat().each[0].sampling.seed


def test_a_chat_template_is_told_what_a_client_says_to_it() -> None:
    told = chat(chat_template_kwargs={"enable_thinking": False, "custom": [1]}).each[0].template_json
    assert json.loads(told) == {"enable_thinking": False, "custom": [1]}
    assert chat().each[0].template_json == ""


def test_everything_asked_for_arrives() -> None:
    parameters = chat(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        repetition_penalty=1.5,
        presence_penalty=-2,
        frequency_penalty=2,
        seed=-1,
        logit_bias={"50256": -100, "7": 2.5},
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=9,
        stop=["a", "b"],
        ignore_eos=True,
        priority=-3,
        stream=True,
        stream_options={"include_usage": True},
    )
    sampling = parameters.each[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 7, 0.1)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -2, 2)
    assert (sampling.seed, dict(sampling.logit_bias)) == (2**64 - 1, {50256: -100, 7: 2.5})
    assert (sampling.logprobs, sampling.top_logprobs) == (True, 3)
    assert (parameters.each[0].max_tokens, list(parameters.each[0].stop)) == (9, ["a", "b"])
    assert parameters.each[0].ignore_eos
    assert parameters.each[0].priority == -3
    assert parameters.stream
    assert parameters.include_usage


def test_null_is_the_same_as_absent() -> None:
    names = ("temperature", "top_p", "max_tokens", "stop", "logit_bias", "n", "tools", "stream_options", "seed")
    assert chat(**dict.fromkeys(names)).each[0].max_tokens == 0


def test_messages_are_normalised() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": " and\n"}, {"type": "text", "text": "two"}]
    given_messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "Ünïcode", "tool_calls": None, "refusal": None},
    ]
    assert messages(messages=given_messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one and\ntwo"},
        {"role": "assistant", "content": "Ünïcode"},
    ]


def test_prompts_come_as_text_or_token_ids() -> None:
    assert completion(prompt="").each[0].WhichOneof("input") == "prompt"
    assert list(completion(prompt=[1, 0, 70000]).each[0].prompt_tokens.ids) == [1, 0, 70000]
    assert completion(echo=True).each[0].echo
    assert completion(logprobs=0).each[0].sampling.logprobs


def test_several_answers_to_several_prompts_differ_in_their_seeds() -> None:
    parameters = completion(prompt=["one", [1, 2]], n=2, seed=2**64 - 1, max_tokens=3, stop="x", best_of=2)
    assert parameters.n == 2
    assert [each.prompt or list(each.prompt_tokens.ids) for each in parameters.each] == ["one"] * 2 + [[1, 2]] * 2
    assert [each.sampling.seed for each in parameters.each] == [2**64 - 1, 0] * 2
    assert all((each.max_tokens, list(each.stop)) == (3, ["x"]) for each in parameters.each)
    assert len(chat(n=3).each) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a" * 100_000, "n": 100}, "n"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
    ],
)
def test_more_answers_than_are_given(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "ann", "prediction": {"type": "content", "content": "text"}},
        {"store": True, "metadata": {"a": "b"}},
        {"service_tier": "auto", "safety_identifier": "x", "prompt_cache_key": "y"},
        {"n": 1, "tools": [], "tool_choice": "none", "parallel_tool_calls": False},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
    ],
)
def test_what_cannot_change_the_answer_is_accepted(harmless: dict[str, Any]) -> None:
    chat(**harmless)


COMMON = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -1),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("seed", 1.5),
    ("seed", 2**64),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 2**32),
    ("max_tokens", "ten"),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 5),
    ("stop", [1]),
    ("stop", 1),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": None}),
    ("logit_bias", {str(2**32): 1}),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("ignore_eos", 1),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("model", ""),
    ("model", None),
    ("model", 7),
    ("model", "\ud800"),
    ("temprature", 1),
    ("user", 5),
    ("service_tier", ["auto"]),
    ("store", "yes"),
    ("priority", "high"),
    ("priority", 2**31),
    ("priority", "high"),
    ("priority", 2**31),
    ("parallel_tool_calls", 0),
    ("metadata", "a"),
    ("metadata", {"a": 1}),
    ("metadata", {"a" * 65: "b"}),
    ("metadata", dict.fromkeys(map(str, range(17)), "")),
    ("prediction", "text"),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *COMMON,
        ("messages", None),
        ("messages", []),
        ("messages", "Hi"),
        ("top_logprobs", 5),
        ("logprobs", 3),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "yaml"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("regex", ""),
        ("grammar", 1),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "most"),
        ("chat_template_kwargs", "enable_thinking"),
        ("chat_template_kwargs", {"enable_thinking": False, "messages": []}),
        ("prompt", "Hi"),
        ("suffix", "x"),
    ],
)
def test_a_chat_is_refused_by_parameter(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**{name: value})
    assert caught.value.status == 400
    assert re.split(r"[.[]", str(caught.value.param))[0] == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *COMMON,
        ("prompt", None),
        ("prompt", []),
        ("prompt", ["one"] * 129),
        ("prompt", ["one", []]),
        ("prompt", [[1], [-2]]),
        ("prompt", [1, -1]),
        ("prompt", [1, "a"]),
        ("prompt", [True]),
        ("prompt", {"text": "Hi"}),
        ("prompt", "\udfff"),
        ("logprobs", 6),
        ("logprobs", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("messages", [USER]),
        ("top_logprobs", 3),
        ("max_completion_tokens", 3),
    ],
)
def test_a_completion_is_refused_by_parameter(name: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{name: value})
    assert caught.value.status == 400
    assert re.split(r"[.[]", str(caught.value.param))[0] == name


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("Hi", "messages[1]"),
        ({"content": "Hi"}, "messages[1].role"),
        ({"role": "wizard", "content": "Hi"}, "messages[1].role"),
        ({"role": "tool", "content": "Hi"}, "messages[1].tool_call_id"),
        ({"role": "user", "content": "Hi", "tool_call_id": "x"}, "messages[1].tool_call_id"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": "\ud800"}, "messages[1].content[0].text"),
        ({"role": "user", "content": "Hi", "mood": "good"}, "messages[1].mood"),
        ({"role": "assistant", "content": "Hi", "tool_calls": [{}]}, "messages[1].tool_calls[0].id"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": ["Hi"]}, "messages[1].content[0]"),
    ],
)
def test_a_message_is_refused_by_its_place(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[USER, message])
    assert caught.value.param == param


def test_contradictions_are_refused() -> None:
    with pytest.raises(ApiError, match="contradicts"):
        chat(max_tokens=3, max_completion_tokens=4)
    assert chat(max_tokens=3, max_completion_tokens=3).each[0].max_tokens == 3
    with pytest.raises(ApiError, match="logprobs of a prompt"):
        completion(echo=True, logprobs=1)
    with pytest.raises(ApiError) as caught:
        chat(stream=True, stream_options={"verbose": True})
    assert caught.value.param == "stream_options.verbose"


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("choice", "arrives"), [(None, ""), ("auto", ""), ("required", "required"), (NAMED, "=look"), ("none", None)]
)
def test_tools_arrive(choice: Any, arrives: str | None) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
    ]
    generate = chat(messages=history, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).each[0]
    assert json.loads(generate.messages_json) == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [called], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
    ]
    if arrives is None:
        assert not generate.tools_json
    else:
        assert (json.loads(generate.tools_json), generate.tool_choice, generate.one_call) == ([TOOL], arrives, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {**NAMED, "function": {"name": "b"}}}, "tool_choice.function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{**TOOL, "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
    ],
)
def test_tools_that_cannot_be_are_refused_by_their_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "kind", "text", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}', "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [None]}}}},
            "json_schema",
            '{"enum": [null]}',
            "response_format.json_schema.schema",
        ),
        ({"regex": "a+"}, "regex", "a+", "regex"),
        ({"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"', "grammar"),
    ],
)
def test_what_an_answer_must_be_arrives(fields: dict[str, Any], kind: str, text: str, param: str) -> None:
    for parameters in (chat(**fields, n=2), completion(**fields, n=2)):
        for each in parameters.each:
            assert each.constraint.WhichOneof("kind") == kind
            assert (getattr(each.constraint, kind), each.constraint.param) == (text, param)
    assert not chat(response_format={"type": "text"}).each[0].HasField("constraint")
    for other in ({"ignore_eos": True}, {"regex": "b", "grammar": "c"}):
        with pytest.raises(ApiError, match="contradicts"):
            chat(**{**fields, **other})


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"regex": "a+"}, {"grammar": 'root ::= "a"'}]
)
def test_strict_tools_may_be_called_in_place_of_an_answer_that_is_kept_to_something(fields: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "go", "strict": True}}
    (generate,) = chat(**fields, tools=[tool]).each
    assert (generate.HasField("constraint"), list(generate.strict_tools)) == (True, ["go"])
    with pytest.raises(ApiError, match="contradicts"):
        chat(**fields, tools=[tool], tool_choice="required")


def test_strict_tools_are_not_dropped_without_a_word() -> None:
    free, strict = ({"type": "function", "function": {"name": "go", "strict": own}} for own in (False, True))
    chat(ignore_eos=True, tools=[free])
    chat(ignore_eos=True, tools=[strict], tool_choice="none")
    with pytest.raises(ApiError) as caught:
        chat(ignore_eos=True, tools=[free, {**strict, "function": {**strict["function"], "name": "stay"}}])
    assert caught.value.param == "ignore_eos"


def test_codes_tell_kinds_of_refusal_apart() -> None:
    for fields, code in (
        ({"temprature": 1}, "unknown_parameter"),
        ({"functions": [{}]}, "unsupported_parameter"),
        ({"temperature": 3}, "invalid_value"),
        ({"model": None}, "missing_parameter"),
    ):
        with pytest.raises(ApiError) as caught:
            chat(**fields)
        assert caught.value.code == code


def test_parameters_that_are_always_refused_are_not_told_as_known() -> None:
    for ask in (chat, completion):
        with pytest.raises(ApiError, match="temprature is not a known parameter; known: ") as caught:
            ask(temprature=1)
        known = str(caught.value).partition("known: ")[2].split(", ")
        assert {"temperature", "stop", "stream", "n"} <= set(known)
        assert not {"suffix", "audio", "functions", "modalities", "verbosity"} & set(known)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = """model messages prompt stop logit_bias temperature seed max_tokens logprobs stream stream_options n tools
response_format echo suffix"""


@given(values | st.dictionaries(st.sampled_from(NAMES.split()), values))
def test_no_json_makes_it_stumble(body: Any) -> None:
    """Whatever comes in, it is read or refused with a reason."""
    for parse in (chat_generates, completion_generates):
        try:
            parse(body).each[0].SerializeToString()
        except ApiError as error:
            json.dumps(error.body)
            event(f"refused with {error.status}")


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_strict_tools_are_named_whoever_decides_about_calls(choice: str) -> None:
    loose = {"type": "function", "function": {"name": "loose"}}
    strict = {"type": "function", "function": {"name": "strict", "strict": True}}
    generates = [chat(tools=[loose, strict], tool_choice=choice).each[0]]
    named = [{"type": "function", "name": own, "strict": own == "strict"} for own in ("loose", "strict")]
    asked: dict[str, Any] = {"model": "bard", "input": "Hi", "tools": named, "tool_choice": choice}
    generates.append(response_of(read(RESPONSE, asked)))
    tools = [{"name": own, "input_schema": {}, "strict": own == "strict"} for own in ("loose", "strict")]
    asked = {"model": "bard", "messages": [USER], "max_tokens": 9, "tools": tools}
    asked |= {"tool_choice": {"type": "any"}} if choice == "required" else {}
    generates.append(messages_of(read(MESSAGES, asked)))
    for generate in generates:
        assert list(generate.strict_tools) == ["strict"]
        assert generate.tool_choice == choice.replace("auto", "")
        assert [tool["function"]["name"] for tool in json.loads(generate.tools_json)] == ["loose", "strict"]
