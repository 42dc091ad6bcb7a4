"""OpenAI's request bodies, checked completely and turned into what the leader is asked. Pure.

Nothing that would change the answer is ignored: a parameter is obeyed, or refused by name. Where OpenAI leaves room:

- ``max_tokens`` that the context has no room for are refused, by the leader, who knows how long the prompt is. Where
  none are asked for, an answer ends with the context at the latest, and a completion after 16 tokens, as at OpenAI. A
  completion whose ``max_tokens`` is null goes on until the context is full, as at vLLM.
- With ``n`` answers to a prompt, the k-th (from 0 on) is the one that a request for one answer gets with ``seed`` + k.
- ``best_of`` may be ``n``: the best of ``n`` answers are all of them. A choice among more is refused.
- The parts of a content given in parts are joined as they are, with nothing between them: OpenAI does not say, but the
  chat templates that take parts (of the models in `transformers`) write one after another, and whoever wants a line to
  end can say so in a part.
- The role ``developer`` is the model's ``system``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from motley.orchestrator.api.body import Fields, is_integer, is_number, is_text
from motley.protocol.mesh_pb2 import Generate, Sampling, TokenIds

MAX_STOPS = 4
USUAL_TOKENS = 16
"""Of a completion that does not say ``max_tokens``."""
MAX_ANSWERS = 128
"""To all prompts of a request together."""
MAX_BYTES = 8 * 1024 * 1024
"""Of prompts, each counted for every answer to it, as the leader is sent it as often."""
_UINT32 = 2**32 - 1
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_CHAT_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's parameters that are not supported, with the values that ask for nothing."""
_COMPLETION_NEUTRAL: Mapping[str, tuple[Any, ...]] = {"suffix": ("",)}
_MESSAGE_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


@dataclass(frozen=True)
class Parameters:
    """A checked request."""

    model: str
    generates: Sequence[Generate]
    """For each answer, without ids and session: `n` of each prompt follow each other."""
    n: int
    """Answers to each prompt."""
    stream: bool
    include_usage: bool
    """Tell the usage as the last chunk of a stream."""


def chat_parameters(body: object) -> Parameters:
    """The body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: 400, naming the parameter.
    """
    fields = Fields(body)
    generate = Generate(messages_json=_messages(fields))
    top_logprobs = fields.integer("top_logprobs", 0, 20)
    logprobs = fields.boolean("logprobs")
    if top_logprobs is not None and not logprobs:
        fields.refuse("top_logprobs", "needs logprobs to be true")
    newer = fields.integer("max_completion_tokens", 1, _UINT32)
    older = fields.integer("max_tokens", 1, _UINT32)
    if newer is not None and older is not None and newer != older:
        fields.refuse("max_tokens", "contradicts max_completion_tokens; give one of them")
    generate.max_tokens = newer or older or 0
    return _finish(fields, [generate], _CHAT_NEUTRAL, logprobs, top_logprobs or 0)


def completion_parameters(body: object) -> Parameters:
    """The body of ``POST /v1/completions``.

    Raises:
        ApiError: 400, naming the parameter.
    """
    fields = Fields(body)
    generates = _prompts(fields)
    echo = fields.boolean("echo")
    top_logprobs = fields.integer("logprobs", 0, 5)
    if top_logprobs is not None and echo:
        fields.refuse("logprobs", "of a prompt (with echo) are not supported", "unsupported_parameter")
    asked = fields.integer("max_tokens", 1, _UINT32)
    for generate in generates:
        generate.echo = echo
        generate.max_tokens = asked or 0
        generate.usual_tokens = 0 if fields.is_null("max_tokens") else USUAL_TOKENS
    best_of, n = fields.integer("best_of", 1, MAX_ANSWERS), fields.integer("n", 1, MAX_ANSWERS) or 1
    if best_of not in (None, n):
        fields.refuse("best_of", f"must be as n, which is {n}, or left out", "unsupported_value")
    return _finish(fields, generates, _COMPLETION_NEUTRAL, top_logprobs is not None, top_logprobs or 0)


def _prompts(fields: Fields) -> list[Generate]:
    """For each prompt of a completion, what is asked of the leader so far."""
    prompt = fields.take("prompt")
    several = isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt)
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_ANSWERS:
        fields.refuse("prompt", f"must not be more than {MAX_ANSWERS} prompts")
    return [_prompt(fields, each) for each in prompts]


def _prompt(fields: Fields, prompt: object) -> Generate:
    if is_text(prompt):
        return Generate(prompt=prompt)
    if isinstance(prompt, list) and prompt and all(is_integer(i) and 0 <= i <= _UINT32 for i in prompt):
        return Generate(prompt_tokens=TokenIds(ids=prompt))
    return fields.refuse("prompt", "must be a string, a list of token ids that is not empty, or a list of such prompts")


def _finish(
    fields: Fields,
    generates: Sequence[Generate],
    neutral: Mapping[str, tuple[Any, ...]],
    logprobs: bool,
    top_logprobs: int,
) -> Parameters:
    """What both kinds of request have in common. `generates` has one for each prompt."""
    model = fields.string("model")
    if not model:
        fields.refuse("model", "is missing; GET /v1/models lists what is served", "missing_parameter")
    n = fields.integer("n", 1, MAX_ANSWERS) or 1
    if len(generates) * n > MAX_ANSWERS:
        fields.refuse("n", f"of {len(generates)} prompts makes more than {MAX_ANSWERS} answers")
    if n > 1 and sum(generate.ByteSize() for generate in generates) * n > MAX_BYTES:
        fields.refuse("n", f"is too large for prompts that are so long: together they may have {MAX_BYTES} bytes")
    sampling, stop = _sampling(fields), _stop(fields)
    sampling.logprobs, sampling.top_logprobs = logprobs, top_logprobs
    ignore_eos, drafts = fields.boolean("ignore_eos"), fields.boolean("drafts", default=True)
    for generate in generates:
        generate.sampling.CopyFrom(sampling)
        generate.stop.extend(stop)
        generate.ignore_eos, generate.without_drafts = ignore_eos, not drafts
    stream = fields.boolean("stream")
    stream_options = fields.take("stream_options")
    include_usage = False
    if stream_options is not None:
        if not stream:
            fields.refuse("stream_options", "needs stream to be true")
        options = Fields(stream_options, "stream_options")
        include_usage = options.boolean("include_usage")
        options.boolean("include_obfuscation")  # there is none
        options.finish()
    _refuse_unsupported(fields, neutral)
    _accept_harmless(fields)
    fields.finish()
    return Parameters(
        model, [_seeded(generate, k) for generate in generates for k in range(n)], n, stream, include_usage
    )


def _seeded(generate: Generate, k: int) -> Generate:
    """For the k-th answer to a prompt, what is asked of the leader for the first."""
    seeded = Generate()
    seeded.CopyFrom(generate)
    seeded.sampling.seed = (seeded.sampling.seed + k) % 2**64
    return seeded


def _sampling(fields: Fields) -> Sampling:
    def number(name: str, default: float, low: float, high: float, above: bool = False) -> float:
        value = fields.number(name, low, high, above=above)
        return default if value is None else value

    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    return Sampling(
        temperature=number("temperature", 1.0, 0.0, 2.0),
        top_k=fields.integer("top_k", 0, _UINT32) or 0,
        top_p=number("top_p", 1.0, 0.0, 1.0) or _LEAST_TOP_P,
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1.0, 0.0, 10.0, above=True),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        logit_bias=_logit_bias(fields),
    )


_LEAST_TOP_P = 1e-9
"""What a top_p of 0 comes to: only the likeliest token passes."""


def _logit_bias(fields: Fields) -> dict[int, float]:
    bias = fields.take("logit_bias")
    if bias is None:
        return {}
    if not isinstance(bias, dict):
        fields.refuse("logit_bias", "must be an object from token ids to numbers")
    result = {}
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= _UINT32):
            fields.refuse("logit_bias", f"has a key that is no token id: {token!r}")
        if not is_number(value) or not -100 <= value <= 100:
            fields.refuse("logit_bias", f"of token {token} must be a number from -100 to 100")
        result[int(token)] = float(value)
    return result


def _stop(fields: Fields) -> list[str]:
    stop = fields.take("stop")
    stops = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if len(stops) > MAX_STOPS or not all(is_text(item) and item for item in stops):
        fields.refuse("stop", f"must be a string, or a list of at most {MAX_STOPS}; none may be empty")
    return stops


def _messages(fields: Fields) -> str:
    """The messages as the JSON that the leader takes: ``[{"role", "content"}]``."""
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", "must be a list with at least one message")
    parsed = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return json.dumps(parsed, ensure_ascii=False, separators=(",", ":"))


def _message(message: object, path: str) -> dict[str, str]:
    fields = Fields(message, path)
    role = fields.string("role")
    if role in ("tool", "function"):
        fields.refuse("role", f"{role!r} is not supported", "unsupported_value")
    if role not in _ROLES:
        fields.refuse("role", f"must be one of {', '.join(_ROLES)}")
    content = fields.take("content")
    if isinstance(content, list) and content:
        texts = [_text_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
        content = "".join(texts)
    elif not is_text(content):
        fields.refuse("content", "must be a string of valid Unicode, or a list of text parts")
    fields.string("name")  # chat templates have no place for it
    _refuse_unsupported(fields, _MESSAGE_NEUTRAL)
    fields.finish()
    return {"role": _ROLES[role], "content": content}


def _text_part(part: object, path: str) -> str:
    fields = Fields(part, path)
    kind = fields.string("type")
    if kind != "text":
        fields.refuse("type", f"must be 'text', not {kind!r}: this server takes text only", "unsupported_value")
    text = fields.string("text")
    if text is None:
        fields.refuse("text", "is missing", "missing_parameter")
    fields.finish()
    return text


def _accept_harmless(fields: Fields) -> None:
    """Take OpenAI's parameters that cannot change the answer of this server. What OpenAI would refuse is refused."""
    for name in ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"):
        fields.string(name)
    for name in ("store", "parallel_tool_calls"):
        fields.boolean(name)
    metadata = fields.take("metadata")
    if metadata is not None and not (
        isinstance(metadata, dict)
        and len(metadata) <= 16
        and all(is_text(key) and len(key) <= 64 for key in metadata)
        and all(is_text(value) and len(value) <= 512 for value in metadata.values())
    ):
        fields.refuse("metadata", "must be an object of at most 16 strings, of 512 characters, by names of 64")
    prediction = fields.take("prediction")
    if prediction is not None and not isinstance(prediction, dict):
        fields.refuse("prediction", "must be an object")


def _refuse_unsupported(fields: Fields, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, values in neutral.items():
        value = fields.take(name)
        if value is not None and not any(type(value) is type(same) and value == same for same in values):
            hint = f"; leave it out or give {json.dumps(values[0])}" if values else "; leave it out"
            fields.refuse(name, f"is not supported{hint}", "unsupported_parameter")
