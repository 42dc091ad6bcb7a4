"""A request's life on the leader: prompt, text deltas, finish reasons, usage."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.text.generation import Generation, RequestError
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.text.made_tokenizers import WriteFolder, bytes_tokenizer

TOKENIZER = Tokenizer.load(Path(__file__).parents[3] / "cli/models/shakespeare-2.6m")
EOS = 1
CONTEXT = 100


def sampling(**fields: Any) -> pb.Sampling:
    return pb.Sampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **fields})


def request(**fields: Any) -> pb.Generate:
    if not {"prompt", "prompt_tokens", "messages_json"} & fields.keys():
        fields["prompt"] = "ROMEO:"
    return pb.Generate(**{"request_id": "r1", "sampling": sampling(), **fields})


def tokens(text: str = "", *, ids: list[int] | None = None, **fields: Any) -> wp.Tokens:
    return wp.Tokens(request_id="r1", ids=TOKENIZER.encode(text) if ids is None else ids, **fields)


def on_tokens(generation: Generation, message: wp.Tokens) -> pb.Delta:
    delta = generation.on_tokens(message)
    assert delta is not None
    return delta


def test_a_prompt_becomes_an_order() -> None:
    order = Generation(request(max_tokens=7, sampling=sampling(seed=3), priority=-2), TOKENIZER, CONTEXT).start()
    assert order == wp.Decode(
        request_id="r1",
        prompt=TOKENIZER.encode("ROMEO:"),
        sampling=sampling(seed=3),
        max_tokens=7,
        stop_tokens=[EOS],
        priority=-2,
    )


def test_every_kind_of_input(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), "{{ messages[0].role }}: {{ messages[0].content }}"))
    expected = tokenizer.encode("user: Hi")
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    for fields in ({"messages_json": chat}, {"prompt": "user: Hi"}, {"prompt_tokens": pb.TokenIds(ids=expected)}):
        assert list(Generation(request(**fields), tokenizer, CONTEXT).start().prompt) == expected
    with pytest.raises(RequestError, match="non-empty list") as refusal:
        Generation(request(messages_json="[]"), tokenizer, CONTEXT)
    assert (refusal.value.code, refusal.value.param) == ("invalid_request", "messages")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "as it likes"),
        ({"reasoning_effort": "none"}, "False False none"),
        ({"reasoning_effort": "low"}, "True True low"),
        ({"template_json": '{"enable_thinking": false}'}, "False  "),
        ({"reasoning_effort": "high", "template_json": '{"enable_thinking": false}'}, "False True high"),
    ],
)
def test_a_template_is_told_whether_to_think(fields: dict[str, str], told: str, folder: WriteFolder) -> None:
    template = (
        "{% if enable_thinking is defined %}{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}{% else %}"
    )
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), template + "as it likes{% endif %}"))
    asked = request(messages_json=json.dumps([{"role": "user", "content": "Hi"}]), **fields)
    assert tokenizer.decode(list(Generation(asked, tokenizer, CONTEXT).start().prompt)) == told


@pytest.mark.parametrize("told", ['{"asked_at": "x"}', '{"asked_at": null}', '{"strftime_now": 5}'])
def test_a_client_does_not_tell_what_time_it_is(told: str, folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), "{{ strftime_now('%Y') }}"))
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    asked = request(messages_json=chat, asked_at="1999-12-31T23:59:59", template_json=told)
    assert tokenizer.decode(list(Generation(asked, tokenizer, CONTEXT).start().prompt)) == "1999"


def test_a_chat_with_a_base_model_is_refused() -> None:
    chat = json.dumps([{"role": "user", "content": "ROMEO:"}])
    with pytest.raises(RequestError, match="no chat template") as refusal:
        Generation(request(messages_json=chat), TOKENIZER, CONTEXT)
    assert (refusal.value.code, refusal.value.param) == ("no_chat_template", "messages")


@pytest.mark.parametrize(
    ("asked", "usual", "resolved"), [(0, 0, 96), (0, 16, 16), (0, 97, 96), (1, 16, 1), (96, 16, 96)]
)
def test_an_answer_fits_the_context(asked: int, usual: int, resolved: int) -> None:
    fields = {"prompt_tokens": pb.TokenIds(ids=[5, 6, 7, 8]), "max_tokens": asked, "usual_tokens": usual}
    assert Generation(request(**fields), TOKENIZER, 100).start().max_tokens == resolved


@pytest.mark.parametrize("asked", [97, 4_000_000_000])
def test_more_tokens_asked_for_than_the_context_has_room_for(asked: int) -> None:
    prompt = pb.TokenIds(ids=[5, 6, 7, 8])
    with pytest.raises(
        RequestError, match=rf"you requested {asked + 4} tokens \(4 in the prompt, {asked} in"
    ) as caught:
        Generation(request(prompt_tokens=prompt, max_tokens=asked), TOKENIZER, 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "it may have 96 tokens" in str(caught.value)


def test_a_prompt_must_leave_room_for_a_token() -> None:
    fitting = request(prompt_tokens=pb.TokenIds(ids=[5] * 99))
    assert Generation(fitting, TOKENIZER, 100).start().max_tokens == 1
    with pytest.raises(RequestError, match=r"maximum context length is 100 tokens.*resulted in 100 tokens") as caught:
        Generation(request(prompt_tokens=pb.TokenIds(ids=[5] * 100)), TOKENIZER, 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("fields", "what", "param"),
    [
        ({"prompt": ""}, "prompt is empty", "prompt"),
        ({"prompt_tokens": pb.TokenIds()}, "prompt is empty", "prompt"),
        ({"prompt_tokens": pb.TokenIds(ids=[1024])}, "token 1024 .* vocabulary of 1024", "prompt"),
        ({"messages_json": "{"}, "not valid JSON", "messages"),
        ({"messages_json": "[" * 100_000}, "not valid JSON", "messages"),
        ({"sampling": sampling(temperature=-1)}, "temperature must be between", ""),
        ({"sampling": sampling(logit_bias={5000: 1.0})}, "logit_bias names token 5000", "logit_bias"),
        ({"stop": ["a", ""]}, "stop string", "stop"),
    ],
)
def test_invalid_requests_are_refused(fields: dict[str, Any], what: str, param: str) -> None:
    with pytest.raises(RequestError, match=what) as caught:
        Generation(request(**fields), TOKENIZER, CONTEXT)
    assert (caught.value.code, caught.value.param) == ("invalid_request", param)


def test_an_answer_in_a_form_may_call_tools_instead_if_the_model_marks_calls(folder: WriteFolder) -> None:
    tool = json.dumps([{"function": {"name": "go", "parameters": {"type": "object"}}}])
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    form = pb.Constraint(regex="a+", param="response_format")

    def asked(template: str, **fields: Any) -> wp.Decode:
        tokenizer = Tokenizer.load(folder(bytes_tokenizer(), template + "{{ tools }}{{ messages[0].content }}"))
        generate = request(messages_json=chat, tools_json=tool, constraint=form, **fields)
        return Generation(generate, tokenizer, CONTEXT).start()

    for strict in ([], ["go"]):
        constraint = asked("{# <tool_call> #}", strict_tools=strict).constraint
        assert constraint.regex == "a+"
        assert re.search(r"start: .* \| @answer$", constraint.around, re.MULTILINE)
        assert "<tool_call>" in constraint.around
    assert asked("").constraint == form, "what an unmarked call is would be the form's to say"
    with pytest.raises(RequestError, match="cannot be strict beside response_format: the model marks no") as caught:
        asked("", strict_tools=["go"])
    assert caught.value.param == "tools"


def test_a_request_without_input_is_refused() -> None:
    with pytest.raises(RequestError, match="neither messages nor a prompt"):
        Generation(pb.Generate(request_id="r1", sampling=sampling()), TOKENIZER, CONTEXT)


def test_text_streams_and_usage_comes_with_the_end() -> None:
    generation = Generation(request(), TOKENIZER, CONTEXT)
    first = on_tokens(generation, tokens("But, ", prefill_s=0.25))
    assert (first.text, first.finish, first.prompt_tokens, first.prefill_s) == ("But, ", "", 0, 0.0)
    ids = [*TOKENIZER.encode("soft!"), EOS]
    last = on_tokens(generation, tokens(ids=ids, finish="stop"))
    assert (last.text, last.finish, list(last.ids)) == ("soft!", "stop", ids)
    assert last.prompt_tokens == len(TOKENIZER.encode("ROMEO:"))
    assert last.prefill_s == 0.25
    assert last.completion_tokens == len(first.ids) + len(last.ids)
    assert generation.finished
    assert not generation.cancel_worker
    assert generation.on_tokens(tokens("more")) is None


def test_the_time_per_token_is_of_tokens_not_of_pieces() -> None:
    """Some have no text, several may come at once; what was written before counts in no way."""
    arrivals = iter((10.0, 10.1, 10.5))
    asked = request(written=TOKENIZER.encode("But, "))
    generation = Generation(asked, TOKENIZER, CONTEXT, clock=lambda: next(arrivals))
    for ids in ([8, 9], [], [10]):
        assert on_tokens(generation, tokens(ids=ids)).token_s == 0.0
    assert on_tokens(generation, tokens(ids=[11, 12, 13, EOS], finish="stop")).token_s == pytest.approx(0.1)


@pytest.mark.parametrize("finish", ["length", "cancelled"])
def test_the_worker_may_end_it_and_held_text_comes_out(finish: str) -> None:
    generation = Generation(request(stop=["soft"]), TOKENIZER, CONTEXT)
    rocket = TOKENIZER.encode("so🚀")
    assert on_tokens(generation, tokens(ids=rocket[:-1])).text == ""
    assert on_tokens(generation, tokens(ids=rocket[-1:])).text == "so🚀"
    assert on_tokens(generation, tokens("so")).text == ""
    last = on_tokens(generation, tokens(finish=finish))
    assert (last.text, last.finish) == ("so", finish)


def test_a_failure_is_passed_on() -> None:
    generation = Generation(request(), TOKENIZER, CONTEXT)
    failure = pb.Failure(code="peer_lost", message="rank 1 is gone", lost_rank=2)
    delta = on_tokens(generation, tokens(finish="error", failure=failure))
    assert (delta.finish, delta.failure) == ("error", failure)


def test_a_stop_string_ends_it_and_cancels_the_worker() -> None:
    generation = Generation(request(stop=["\n\n", "light"]), TOKENIZER, CONTEXT)
    assert on_tokens(generation, tokens("what li")).text == "what "
    ids = TOKENIZER.encode("ght through")
    last = on_tokens(generation, tokens(ids=ids))
    assert (last.text, last.finish) == ("", "stop")
    assert len(last.ids) < len(ids)
    assert last.completion_tokens == len(TOKENIZER.encode("what li")) + len(last.ids)
    assert generation.cancel_worker
    assert generation.on_tokens(tokens(finish="cancelled")) is None


def test_a_stop_string_in_the_worker_s_last_tokens_wins_and_cancels_nothing() -> None:
    generation = Generation(request(stop=["light"]), TOKENIZER, CONTEXT)
    last = on_tokens(generation, tokens("what light", finish="length"))
    assert (last.text, last.finish) == ("what ", "stop")
    assert not generation.cancel_worker


def test_eos_may_be_ignored() -> None:
    generation = Generation(request(ignore_eos=True), TOKENIZER, CONTEXT)
    assert list(generation.start().stop_tokens) == []
    ids = [*TOKENIZER.encode("a"), EOS, *TOKENIZER.encode("b")]
    assert on_tokens(generation, tokens(ids=ids)).text == "ab"


def test_echo_sends_the_prompt_first_and_never_stops_on_it() -> None:
    generation = Generation(request(prompt="what light", echo=True, stop=["light"]), TOKENIZER, CONTEXT)
    assert on_tokens(generation, tokens(" through")).text == "what light through"
    assert on_tokens(generation, tokens("!")).text == "!"


def test_log_probabilities_get_their_texts() -> None:
    generation = Generation(request(), TOKENIZER, CONTEXT)
    (thou,) = TOKENIZER.encode(" the")
    row = pb.LogprobRow(chosen=pb.TokenLogprob(id=thou, logprob=-0.5), top=[pb.TokenLogprob(id=EOS, logprob=-2)])
    (named,) = on_tokens(generation, tokens(ids=[thou], logprobs=[row])).logprobs
    assert (named.chosen.text, named.chosen.logprob) == (" the", -0.5)
    assert [(entry.text, entry.logprob) for entry in named.top] == [("<|end|>", -2)]
    assert (named.chosen.raw, named.top[0].raw) == (b" the", b"<|end|>")


@given(st.text(max_size=40), st.lists(st.integers(0, 200), max_size=6), st.booleans())
def test_deltas_add_up_to_the_answer(text: str, cuts: list[int], stop: bool) -> None:
    ids = TOKENIZER.encode(text)
    generation = Generation(request(stop=["e"] if stop else []), TOKENIZER, 1000)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    messages = [tokens(ids=ids[a:b]) for a, b in pairwise(bounds)]
    deltas = [generation.on_tokens(message) for message in [*messages, tokens(ids=[EOS], finish="stop")]]
    shown = "".join(delta.text for delta in deltas if delta)
    assert shown == (text.split("e")[0] if stop else text)
    assert [delta.finish for delta in deltas if delta][-1] == "stop"


@given(cut=st.integers(0, 40), stop=st.sampled_from(["", "lord", "\n\n", "e th"]), echo=st.booleans())
def test_a_text_goes_on_elsewhere_from_the_tokens_that_were_told(cut: int, stop: str, echo: bool) -> None:
    """Whatever a stop string or a letter of several tokens has held back."""
    ids = TOKENIZER.encode("What says my lord? \N{SNOWMAN} the\n\nKING: the end of the world, my lord, is near.")
    asked = request(max_tokens=60, stop=[stop] if stop else [], echo=echo)

    def told(generation: Generation, tail: list[int]) -> tuple[str, list[int], str]:
        text, seen, finish = "", [], ""
        for index, token in enumerate(tail):
            last = {"finish": "length"} if index == len(tail) - 1 else {}
            if (delta := generation.on_tokens(tokens(ids=[token], **last))) is not None:
                text, finish = text + delta.text, delta.finish or finish
                seen += delta.ids
        return text, seen, finish

    whole = told(Generation(asked, TOKENIZER, CONTEXT), ids)
    first = Generation(asked, TOKENIZER, CONTEXT)
    before, seen = "", []
    for token in ids[:cut]:
        delta = first.on_tokens(tokens(ids=[token]))
        if first.finished:
            return  # it needs nobody to go on
        assert delta is not None
        before, seen = before + delta.text, [*seen, *delta.ids]
    if len(seen) == len(ids):
        return
    asked.written.extend(seen)
    again = Generation(asked, TOKENIZER, CONTEXT)
    assert list(again.start().written) == seen
    text, rest, finish = told(again, ids[len(seen) :])
    assert (before + text, seen + rest, finish) == whole


@pytest.mark.parametrize("cut", range(1, 22, 2))
def test_thoughts_go_on_elsewhere_as_thoughts(cut: int, folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), "{# <think></think> #}{{ messages[0].content }}"))
    chat = json.dumps([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode("<think>hm, well</think>yes")
    asked = request(messages_json=chat, max_tokens=60)

    def told(generation: Generation, tail: list[int]) -> tuple[str, str]:
        deltas = [on_tokens(generation, wp.Tokens(request_id="r1", ids=[token])) for token in tail]
        return "".join(delta.text for delta in deltas), "".join(delta.reasoning for delta in deltas)

    before = told(Generation(asked, tokenizer, CONTEXT), ids[:cut])
    asked.written.extend(ids[:cut])
    after = told(Generation(asked, tokenizer, CONTEXT), ids[cut:])
    assert (before[0] + after[0], before[1] + after[1]) == ("yes", "hm, well")


MARKED = '<|channel>thought\nhm<channel|>Yes.<|tool_call>call:go{to:<|"|>{Rome},<|"|>,n:2}<tool_call|>'


@pytest.mark.parametrize("prompt_thinks", [False, True])
def test_marks_of_gemma_are_special_tokens_that_say_what_is_what(prompt_thinks: bool, folder: WriteFolder) -> None:
    """Special tokens decode to nothing, and a text between two of them would lose its quotes."""
    backend = bytes_tokenizer()
    backend.add_special_tokens(["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'])
    begun = "<|channel>thought\n" if prompt_thinks else ""
    template = f"{{# <|channel><channel|><|tool_call>call: {{{{ tools }}}} #}}{{{{ messages[0].content }}}}{begun}"
    tokenizer = Tokenizer.load(folder(backend, template))
    parameters = {"type": "object", "properties": {"n": {"enum": [2]}, "to": {"enum": ["{Rome},"]}}}
    asked = request(
        messages_json=json.dumps([{"role": "user", "content": "Hi"}]),
        tools_json=json.dumps([{"function": {"name": "go", "parameters": parameters}}]),
        tool_choice="required",
        max_tokens=90,
    )
    generation = Generation(asked, tokenizer, 200)
    start = generation.start()
    ids = tokenizer.encode(MARKED.removeprefix(begun))
    deltas = [on_tokens(generation, wp.Tokens(request_id="r1", ids=[token])) for token in ids]
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == "Yes."
    calls = [call for delta in deltas for call in delta.calls]
    assert [call.name for call in calls if call.name] == ["go"]
    assert json.loads("".join(call.arguments for call in calls)) == {"to": "{Rome},", "n": 2}

    channel, end, quote = map(tokenizer.token, ("<|channel>", "<channel|>", '<|"|>'))
    assert start.constraint.thoughts == pb.Thoughts(begin=channel, end=[end], begun=prompt_thinks)
    assert f"<[{quote}]> " in start.constraint.grammar
