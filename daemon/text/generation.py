"""One request on the node of rank 0: its text becomes tokens for the worker, whose tokens become text again.

Messages in, messages out: nothing here waits or sends. The worker knows tokens only; stop strings, text, usage and the
texts of log-probabilities are made here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from motley.daemon.sampling.parameters import SamplingError, SamplingParams
from motley.daemon.text.answer_parts import AnswerParts, thought_marks
from motley.daemon.text.calls.formats import call_format, knows_tools
from motley.daemon.text.calls.values import mapping_of
from motley.daemon.text.harmony import MARKS, ChannelParts, has_channels
from motley.daemon.text.kept_to import KeptToError, constraint_of
from motley.daemon.text.messages import ChatError
from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.stops import StopChecker
from motley.daemon.text.streaming import IncrementalDecoder
from motley.daemon.text.templates import ASKED_AT
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import WHETHER_TO_THINK
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.protocol.wording import counted

_BEGUN_WITHIN = 256
"""Tokens at a prompt's end in which its answer may begin."""


class RequestError(Exception):
    """A request that cannot be served as it is.

    Attributes:
        code: ``context_length_exceeded``, ``no_chat_template`` or ``invalid_request``.
        param: what of the request is to blame; empty: no single parameter.
    """

    def __init__(self, code: str, message: str, param: str) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Generation:
    """A request that is being answered, from `start` to the `Delta` that carries a finish reason.

    Attributes:
        words: the tokens that rank 0's worker must know to keep the answer to its constraint; None: it has none.
        finished: whether the last delta was made; further tokens are ignored.
        cancel_worker: whether the worker must be told to stop, as the text came to a stop string, which it cannot know.

    Args:
        context: the longest sequence the session serves, prompt and answer together, in tokens.

    Raises:
        RequestError: the request cannot be served; nothing was started.
    """

    def __init__(
        self,
        request: pb.Generate,
        tokenizer: Tokenizer,
        context: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._prompt = _prompt(request, tokenizer)
        self._max_tokens = 0 if request.embed else _max_tokens(request, len(self._prompt), context)
        if request.embed:
            _check_length(len(self._prompt), context)
        self._stop_tokens = frozenset() if request.ignore_eos else tokenizer.stop_tokens
        _check(request, tokenizer)
        parts, self._marks = _parts(request, tokenizer, self._prompt)
        self._parts: AnswerParts | ChannelParts | ResponseParts | None = parts
        try:
            self._constraint = constraint_of(request, tokenizer, parts)
        except KeptToError as error:
            raise RequestError("invalid_request", str(error), error.param) from error
        if self._constraint is None and _reads_itself(request, tokenizer):
            self._parts, self._marks = _own_parts(request, tokenizer, self._prompt)
        self.words = tokenizer.words if self._constraint else None
        if request.sampling.logprobs:
            tokenizer.token_bytes(self._prompt[0])  # the first takes a while, which is none for where tokens come
        self._decoder = IncrementalDecoder(tokenizer, self._prompt)
        self._stops = StopChecker(request.stop)
        self._before = tokenizer.decode(self._prompt) if request.echo and not request.written else ""
        """Text that goes out ahead of the answer."""
        self._generated = len(request.written)
        self._replay(request.written)
        self._pace = _Pace(clock)
        self._prefill_s = 0.0
        self._cached = 0
        self.finished = False
        self.cancel_worker = False

    @property
    def name(self) -> str:
        """What the client and all logs call the request."""
        return self._request.name or self._request.request_id

    def start(self) -> wp.Decode:
        """What rank 0's worker is told to do."""
        adapter = self._request.adapter if self._request.HasField("adapter") else None
        return wp.Decode(
            request_id=self._request.request_id,
            prompt=self._prompt,
            sampling=self._request.sampling,
            max_tokens=self._max_tokens,
            stop_tokens=sorted(self._stop_tokens),
            without_drafts=self._request.without_drafts,
            written=self._request.written,
            constraint=self._constraint,
            adapter=adapter,
            priority=self._request.priority,
        )

    def _replay(self, written: Sequence[int]) -> None:
        """Come to where the text was after these tokens, all of which the client has been told of."""
        text = "".join(map(self._text_of, written))
        if self._parts is not None:
            for _ in self._parts.push(text):
                pass  # the client has it

    def _text_of(self, token: int) -> str:
        """What there is to say after another token: not just its own text, as some is held back for a while."""
        if token in self._stop_tokens:
            return ""
        return self._stops.push(self._marks.get(token, "") + self._decoder.push(token))

    def on_tokens(self, tokens: wp.Tokens) -> pb.Delta | None:
        """Make of new tokens what the orchestrator is told; None once finished.

        A stop token counts as generated, but has no text. Tokens after a stop string are dropped.
        """
        if self.finished:
            return None
        text, ids = self._before, []
        self._before = ""
        for token in tokens.ids:
            ids.append(token)
            text += self._text_of(token)
            if self._stops.stopped:
                break
        self._generated += len(ids)
        self._pace.count(len(ids))
        finish = tokens.finish
        if finish and not self._stops.stopped:
            text += self._stops.push(self._decoder.flush()) + self._stops.flush()
        if self._stops.stopped:
            finish = "stop"
        delta = pb.Delta(
            request_id=self._request.request_id,
            ids=ids,
            logprobs=[self._with_texts(row) for row in tokens.logprobs[: len(ids)]],
            finish=finish,
            stopped_by=self._stops.stopped_by if finish else "",
        )
        self._take_apart(delta, text, bool(finish))
        if self._request.one_call and self._parts is not None and self._parts.complete:
            finish = delta.finish = finish or "stop"
        self._prefill_s = self._prefill_s or tokens.prefill_s
        self._cached = self._cached or tokens.cached_tokens
        if finish:
            self.finished = True
            self.cancel_worker = not tokens.finish
            delta.prompt_tokens = len(self._prompt)
            delta.completion_tokens = self._generated
            delta.prefill_s = self._prefill_s
            delta.token_s = self._pace.token_s
            delta.cached_tokens = self._cached
            delta.accepted_drafts = tokens.accepted_drafts
            delta.embedding = tokens.embedding
            if finish == "error":
                delta.failure.CopyFrom(tokens.failure)
        return delta

    def _take_apart(self, delta: pb.Delta, text: str, last: bool) -> None:
        """Put new text into a delta, by what it is: said, thought, or a call of a tool."""
        if self._parts is None:
            delta.text = text
            return
        for part in (*self._parts.push(text), *(self._parts.flush() if last else ())):
            if self._request.one_call and part.call is not None and part.call.index:
                continue
            delta.text += part.content
            delta.reasoning += part.reasoning
            if part.call is not None:
                delta.calls.append(part.call)

    def _with_texts(self, row: pb.LogprobRow) -> pb.LogprobRow:
        named = pb.LogprobRow()
        named.CopyFrom(row)
        for entry in (named.chosen, *named.top):
            entry.text = self._tokenizer.token_text(entry.id)
            entry.raw = self._tokenizer.token_bytes(entry.id)
        return named


class _Pace:
    """How fast the tokens of an answer come from its worker. Its pieces of text are no measure: a token may have none,
    or half a character."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._first_at = self._last_at = 0.0
        self._later = 0
        """Tokens that came after those that came first."""

    def count(self, tokens: int) -> None:
        """So many have come just now."""
        if tokens:
            self._last_at = self._clock()
            if self._first_at:
                self._later += tokens
            else:
                self._first_at = self._last_at

    @property
    def token_s(self) -> float:
        """The mean time from a token to the next; 0: all came at once."""
        return (self._last_at - self._first_at) / self._later if self._later else 0.0


def told_prompt(request: pb.Generate, tokenizer: Tokenizer) -> pb.Delta:
    """What the orchestrator is told of a request's prompt alone.

    Raises:
        RequestError: it cannot be had.
    """
    prompt = _prompt(request, tokenizer)
    text = tokenizer.decode(prompt) if request.echo else ""
    return pb.Delta(request_id=request.request_id, text=text, ids=prompt, finish="stop", prompt_tokens=len(prompt))


def _prompt(request: pb.Generate, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a request's prompt; errors as `Generation`."""
    kind = request.WhichOneof("input")
    if kind == "messages_json":
        try:
            messages = json.loads(request.messages_json)
        except (ValueError, RecursionError) as error:
            raise RequestError("invalid_request", f"messages are not valid JSON: {error}", "messages") from error
        try:
            prompt = tokenizer.encode_chat(messages, _told_template(request))
        except ChatError as error:
            raise RequestError(error.code, str(error), "messages") from error
    elif kind == "prompt":
        prompt = tokenizer.encode(request.prompt)
    elif kind == "prompt_tokens":
        prompt = list(request.prompt_tokens.ids)
    else:
        raise RequestError("invalid_request", "the request has neither messages nor a prompt", "")
    if not prompt:
        why = "the prompt is empty: there is no token to continue from"
        raise RequestError("invalid_request", why, _input(request))
    if (largest := max(prompt)) >= tokenizer.vocabulary:
        raise RequestError(
            "invalid_request",
            f"token {largest} is not in the model's vocabulary of {tokenizer.vocabulary} tokens",
            _input(request),
        )
    return prompt


def _told_template(request: pb.Generate) -> dict[str, Any]:
    """What the chat template is told beside the messages; errors as `Generation`."""
    options = {"tools": json.loads(request.tools_json)} if request.tools_json else {}
    if request.reasoning_effort:
        thinks = request.reasoning_effort != "none"
        options |= {"reasoning_effort": request.reasoning_effort, **dict.fromkeys(WHETHER_TO_THINK, thinks)}
    if request.template_json:
        try:
            options |= json.loads(request.template_json)
        except (ValueError, RecursionError) as error:
            why = f"what the chat template is told is not valid JSON: {error}"
            raise RequestError("invalid_request", why, "chat_template_kwargs") from error
    options.pop(ASKED_AT, None)  # which is not a client's to say
    if request.asked_at:
        options[ASKED_AT] = request.asked_at
    return options


def _input(request: pb.Generate) -> str:
    """The parameter that the prompt is made of."""
    if request.embed:
        return "input"
    return "messages" if request.WhichOneof("input") == "messages_json" else "prompt"


def _max_tokens(request: pb.Generate, prompt: int, context: int) -> int:
    """How long the answer may become behind so many tokens of prompt; errors as `Generation`."""
    rest, what, asked = context - prompt, _input(request), request.max_tokens
    longest = f"This model's maximum context length is {context} tokens. However, "
    if rest < 1:
        raise RequestError(
            "context_length_exceeded",
            f"{longest}your {what} resulted in {prompt} tokens, and the answer needs at least 1. Please reduce the "
            f"length of the {what}.",
            what,
        )
    if asked > rest:
        raise RequestError(
            "context_length_exceeded",
            f"{longest}you requested {prompt + asked} tokens ({prompt} in the {what}, {asked} in the completion). "
            f"Please reduce the length of the {what} or of the completion: it may have {counted(rest, 'token')}.",
            what,
        )
    return asked or min(request.usual_tokens or rest, rest)


def _check_length(prompt: int, context: int) -> None:
    """Refuse a text of so many tokens that is to be embedded and that the context has no room for; errors as
    `Generation`."""
    if prompt > context:
        raise RequestError(
            "context_length_exceeded",
            f"This model's maximum context length is {context} tokens, and the input has {prompt}. Please reduce the"
            " length of the input.",
            "input",
        )


def _parts(
    request: pb.Generate, tokenizer: Tokenizer, prompt: Sequence[int]
) -> tuple[AnswerParts | ChannelParts | None, Mapping[int, str]]:
    """What takes the answer apart by what stands in the chat template, and the special tokens that it goes by; None:
    there is but one part."""
    if tokenizer.template is None or request.WhichOneof("input") != "messages_json":
        return None, {}
    source = tokenizer.template.source
    if has_channels(source):
        return ChannelParts(), tokenizer.marks(MARKS)
    calls = call_format(source) if request.tools_json else None
    thoughts = thought_marks(source)
    if calls is None and thoughts is None:
        return None, {}
    marks = tokenizer.marks([*([thoughts.begin, thoughts.end] if thoughts else []), *(calls.marks if calls else [])])
    ending = "".join(marks.get(token, "") or tokenizer.token_text(token) for token in prompt[-16:]).rstrip()
    thinking = thoughts is not None and ending.removesuffix(thoughts.title.rstrip()).endswith(thoughts.begin)
    return AnswerParts(calls, thoughts, thinking, _schemas(request)), marks


def _reads_itself(request: pb.Generate, tokenizer: Tokenizer) -> bool:
    """Whether an answer is taken apart by the model's own response template.

    None is once its patterns have taken too long. One that is kept to something is not, as it is written by what stands
    in the chat template; nor is one that may call tools of which either template does not know.
    """
    response, template = tokenizer.response_template, tokenizer.template
    if response is None or template is None or request.WhichOneof("input") != "messages_json":
        return False
    if tokenizer.patience.lost:
        return False
    return not request.tools_json or (response.has_calls and knows_tools(template.source))


def _own_parts(
    request: pb.Generate, tokenizer: Tokenizer, prompt: Sequence[int]
) -> tuple[ResponseParts, Mapping[int, str]]:
    """As `_parts`, by the model's own response template, which may go by any special token."""
    assert tokenizer.response_template is not None, "it reads itself"
    ending = tokenizer.decode(prompt[-_BEGUN_WITHIN:], with_special=True)
    parts = ResponseParts(tokenizer.response_template, ending, _schemas(request), tokenizer.patience)
    return parts, tokenizer.special_texts


def _schemas(request: pb.Generate) -> dict[str, Mapping[str, Any]]:
    """Of the arguments of the tools that a request has, by their names."""
    return {
        tool["function"]["name"]: mapping_of(mapping_of(tool["function"].get("parameters")).get("properties"))
        for tool in json.loads(request.tools_json or "[]")
    }


def _check(request: pb.Generate, tokenizer: Tokenizer) -> None:
    """Refuse sampling parameters and stop strings that make no sense; errors as `Generation`."""
    try:
        params = SamplingParams.from_proto(request.sampling)
    except SamplingError as error:
        raise RequestError("invalid_request", str(error), "") from error
    for token in params.logit_bias:
        if token >= tokenizer.vocabulary:
            raise RequestError(
                "invalid_request",
                f"logit_bias names token {token}; the model's vocabulary has {tokenizer.vocabulary}",
                "logit_bias",
            )
    if not all(request.stop):
        raise RequestError("invalid_request", "a stop string must not be empty", "stop")
