"""What the leader is asked for a request of OpenAI's API. Pure.

Where OpenAI leaves room:

- ``max_tokens`` that the context has no room for are refused, by the leader, who knows how long the prompt is. Where
  none are asked for, an answer ends with the context at the latest, and a completion after 16 tokens, as at OpenAI.
- With ``n`` answers to a prompt, the k-th (from 0 on) is the one that a request for one answer gets with ``seed`` + k.
- The parts of a content given in parts are joined as they are, with nothing between them: OpenAI does not say, but the
  chat templates that take parts (of the models in `transformers`) write one after another, and whoever wants a line to
  end can say so in a part.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from motley.orchestrator.api.openai.schema import (
    ChatRequest,
    CompletionRequest,
    JsonFormat,
    JsonSchemaFormat,
    Message,
    NamedTool,
    Request,
)
from motley.orchestrator.api.schema import FieldError, read
from motley.protocol.mesh_pb2 import Constraint, Generate, Sampling, TokenIds

USUAL_TOKENS = 16
"""Of a completion that does not say ``max_tokens``."""
MAX_BYTES = 8 * 1024 * 1024
"""Of prompts, each counted for every answer to it, as the leader is sent it as often."""
LEAST_TOP_P = 1e-9
"""What a top_p of 0 comes to: only the likeliest token passes."""

CHAT = TypeAdapter(ChatRequest)
COMPLETION = TypeAdapter(CompletionRequest)


@dataclass(frozen=True)
class Generates:
    """A checked request, as the leader is asked it.

    Attributes:
        model: the name that the client calls it by.
        adapter: the name of the model's adapter, where it is given by itself; else empty.
        each: for each answer, without ids and session: `n` of each prompt follow each other.
        n: answers to each prompt.
        stream: whether the answers are streamed.
        include_usage: whether the usage is the last chunk of a stream.
    """

    model: str
    adapter: str
    each: Sequence[Generate]
    n: int
    stream: bool
    include_usage: bool


def chat_generates(body: object) -> Generates:
    """Read the body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: 400, naming the parameter.
    """
    chat = read(CHAT, body)
    messages = json.dumps([message_of(each) for each in chat.messages], ensure_ascii=False, separators=(",", ":"))
    generate = Generate(
        messages_json=messages,
        max_tokens=chat.max_completion_tokens or chat.max_tokens or 0,
        reasoning_effort=chat.reasoning_effort or "",
        template_json=json.dumps(chat.chat_template_kwargs) if chat.chat_template_kwargs else "",
    )
    if chat.tools and chat.tool_choice != "none":
        generate.tools_json = json.dumps([tool.model_dump(exclude_unset=True) for tool in chat.tools])
        generate.one_call = not chat.parallel_tool_calls
        generate.strict_tools.extend(tool.function.name for tool in chat.tools if tool.function.strict)
        if isinstance(chat.tool_choice, NamedTool):
            generate.tool_choice = f"={chat.tool_choice.function.name}"
        elif not chat.calls_freely:
            generate.tool_choice = chat.tool_choice
    return _generates(chat, [generate], chat.logprobs, chat.top_logprobs or 0)


def completion_generates(body: object) -> Generates:
    """Read the body of ``POST /v1/completions``.

    Raises:
        ApiError: 400, naming the parameter.
    """
    completion = read(COMPLETION, body)
    generates = [
        Generate(
            max_tokens=completion.max_tokens or 0,
            usual_tokens=0 if "max_tokens" in completion.model_fields_set else USUAL_TOKENS,
            echo=completion.echo,
            **({"prompt": prompt} if isinstance(prompt, str) else {"prompt_tokens": TokenIds(ids=prompt)}),
        )
        for prompt in completion.prompt
    ]
    return _generates(completion, generates, completion.logprobs is not None, completion.logprobs or 0)


def _generates(request: Request, prompts: Sequence[Generate], logprobs: bool, top_logprobs: int) -> Generates:
    """What both kinds of request have in common. `prompts` has one for each prompt."""
    n = request.n
    if n > 1 and sum(prompt.ByteSize() for prompt in prompts) * n > MAX_BYTES:
        raise FieldError("n", f"is too large for prompts that are so long: together they may have {MAX_BYTES} bytes")
    sampling = _sampling(request, logprobs, top_logprobs)
    constraint = _constraint(request)
    each = []
    for prompt in prompts:
        if constraint is not None:
            prompt.constraint.CopyFrom(constraint)
        prompt.stop.extend(request.stop)
        prompt.ignore_eos, prompt.without_drafts = request.ignore_eos, not request.drafts
        prompt.priority = request.priority
        for k in range(n):
            generate = Generate()
            generate.CopyFrom(prompt)
            generate.sampling.CopyFrom(sampling)
            generate.sampling.seed = (sampling.seed + k) % 2**64
            each.append(generate)
    usage = request.stream_options is not None and request.stream_options.include_usage
    return Generates(request.model, request.adapter, each, n, request.stream, usage)


def _sampling(request: Request, logprobs: bool, top_logprobs: int) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=least_top_p(request.top_p),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
        logit_bias={int(token): bias for token, bias in request.logit_bias.items()},
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


class Function(NamedTuple):
    """A tool, as an API that is not chat completions has it: `strict`, whether its arguments are always kept to the
    schema of its parameters."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool


def offer(generate: Generate, functions: Sequence[Function]) -> None:
    """Let the model call functions, which chat templates are told in the form of chat completions."""
    told = [{"name": each.name, "description": each.description, "parameters": each.parameters} for each in functions]
    generate.tools_json = json.dumps([{"type": "function", "function": function} for function in told])
    generate.strict_tools.extend(each.name for each in functions if each.strict)


def least_top_p(top_p: float | None) -> float | None:
    """A top_p that lets at least one token pass; None: the request does not say."""
    return None if top_p is None else max(top_p, LEAST_TOP_P)


def _constraint(request: Request) -> Constraint | None:
    """What the answers must be; None: anything."""
    if request.regex is not None:
        return Constraint(regex=request.regex, param="regex")
    if request.grammar is not None:
        return Constraint(grammar=request.grammar, param="grammar")
    match request.response_format:
        case JsonFormat():
            return Constraint(json_schema='{"type": "object"}', param="response_format")
        case JsonSchemaFormat(json_schema=named):
            return Constraint(json_schema=json.dumps(named.schema_), param="response_format.json_schema.schema")
    return None


def message_of(message: Message) -> dict[str, Any]:
    """A message as the leader takes it."""
    role = "system" if message.role == "developer" else message.role
    said: dict[str, Any] = {"role": role, "content": "".join(part.text for part in message.content or ())}
    if message.tool_calls:
        said["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    if message.tool_call_id:
        said["tool_call_id"] = message.tool_call_id
    if message.reasoning_content:
        said["reasoning_content"] = message.reasoning_content
    return said
