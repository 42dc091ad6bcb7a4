"""The grammar that an answer must obey: what its client wants, in the model's own way of thinking and calling tools."""

from __future__ import annotations

import json
from collections.abc import Mapping

from motley.daemon.sampling.constraint import ANSWER, ConstraintError, grammar_of
from motley.daemon.text.answer_parts import AnswerParts
from motley.daemon.text.calls.formats import CallFormat, call_format
from motley.daemon.text.calls.grammar import calls_grammar
from motley.daemon.text.harmony import CHANNEL, MARKS, MESSAGE, ChannelParts, channel_grammar
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb


class KeptToError(ValueError):
    """An answer cannot be kept to what its client wants.

    Attributes:
        param: of the request, which is to blame.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def constraint_of(
    request: pb.Generate, tokenizer: Tokenizer, parts: AnswerParts | ChannelParts | None
) -> pb.Constraint | None:
    """What the answer must be behind what the model thinks; None: anything.

    That is calls of tools, if the client asks for them; else what `request.constraint` says, or calls of tools instead,
    if there are tools and the model marks its calls; else any text, in which calls of strict tools are valid by their
    schemas.

    Args:
        parts: what takes the answer apart; None: it has but one part.

    Raises:
        KeptToError: it is malformed, or has a feature that is not supported.
    """
    constraint = None
    if parts is not None and (request.tool_choice or request.strict_tools):
        constraint = pb.Constraint(grammar=_grammar(request, tokenizer, parts), param="tools")
        _check(constraint)
    if request.HasField("constraint"):
        constraint = request.constraint
        if parts is not None and _tells_calls_apart(request, tokenizer, parts):
            constraint.around = _grammar(request, tokenizer, parts, f"@{ANSWER}")
        elif request.strict_tools:
            why = f"cannot be strict beside {constraint.param}: the model marks no calls, by which they were told apart"
            raise KeptToError(why, "tools")
        _check(constraint)
    # Channels have the thoughts in them.
    if constraint is not None and isinstance(parts, AnswerParts) and (thoughts := parts.thoughts(tokenizer)):
        constraint.thoughts.CopyFrom(thoughts)
    return constraint


def _tells_calls_apart(request: pb.Generate, tokenizer: Tokenizer, parts: AnswerParts | ChannelParts) -> bool:
    """Whether an answer's marks say whether it is what the client wants, or calls tools."""
    if isinstance(parts, ChannelParts):
        return _channel_marks(tokenizer).keys() >= {CHANNEL, MESSAGE}
    return bool(request.tools_json) and _call_format(tokenizer).begin != ""


def _grammar(request: pb.Generate, tokenizer: Tokenizer, parts: AnswerParts | ChannelParts, said: str = "") -> str:
    """The grammar of an answer that calls tools, or is `said` where the client does not ask for calls."""
    tools = json.loads(request.tools_json or "[]")
    named = request.tool_choice.removeprefix("=")
    if named != request.tool_choice:
        tools = [tool for tool in tools if tool["function"]["name"] == named]
    one = request.one_call or bool(request.tool_choice and named != request.tool_choice)
    strict = None if request.tool_choice else set(request.strict_tools)
    if isinstance(parts, ChannelParts):
        return channel_grammar(tools, _channel_marks(tokenizer), strict, said)
    calls = _call_format(tokenizer)
    marks = {text: token for token, text in tokenizer.marks(calls.marks).items()}
    try:
        return calls_grammar(calls, tools, one, marks, strict, said)
    except ConstraintError as error:
        raise KeptToError(f"tools: {error}", "tools") from error


def _call_format(tokenizer: Tokenizer) -> CallFormat:
    """How the model calls tools, of which a request has some."""
    assert tokenizer.template is not None, "there are messages"
    return call_format(tokenizer.template.source)


def _channel_marks(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The marks of channels that a tokenizer knows as tokens, and those."""
    return {text: token for token, text in tokenizer.marks(MARKS).items()}


def _check(constraint: pb.Constraint) -> None:
    try:
        grammar_of(constraint)
    except ConstraintError as error:
        raise KeptToError(f"{constraint.param} {error}", constraint.param) from error
