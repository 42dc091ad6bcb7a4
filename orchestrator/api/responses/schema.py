"""Request bodies of OpenAI's Responses API as this server takes them, which keeps nothing between requests.

Harmless are the fields that cannot change an answer here: ``user``, ``safety_identifier``, ``prompt_cache_*``,
``service_tier``, ``store`` (nothing is stored), ``metadata``, ``truncation`` (nothing is cut off), and what items that
an answer had tell of themselves (``id``, ``status``, ``annotations``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from motley.orchestrator.api.openai.schema import JsonFormat, StreamOptions, TextFormat, TokenCount, named_choice
from motley.orchestrator.api.schema import Body, Neutral, Text, refuse

ITEMS = ("message", "function_call", "function_call_output", "reasoning")
PARTS = ("input_text", "output_text", "refusal", "text", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"


def _known_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in PARTS:
        refuse(f"must be one of {', '.join(PARTS)}, not {part.get('type')!r}: only text can be read here", "type")
    return part


class Part(Body):
    """A piece of text."""

    type: Literal["input_text", "output_text", "refusal", "text", "reasoning_text", "summary_text"]
    text: Text = ""
    refusal: Text = ""
    annotations: Any = None
    logprobs: Any = None
    prompt_cache_breakpoint: Any = None


def _parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


Parts = Annotated[
    list[Annotated[Part, BeforeValidator(_known_part)]],
    BeforeValidator(_parts, json_schema_input_type=str | list[Part]),
]


class Item(Body):
    """What there was before the answer: a turn, a call, what it came to, or thoughts."""

    id: Any = None
    status: Any = None


class MessageItem(Item):
    """A turn. The role ``developer`` is the model's ``system``."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Any = None


class CallItem(Item):
    """A call of a tool, as an answer had it."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    namespace: Any = None


class ResultItem(Item):
    """What a tool has answered."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Parts


class ReasoningItem(Item):
    """What the model has thought, as an answer had it."""

    type: Literal["reasoning"]
    summary: Parts = Field(default_factory=list)
    content: Parts = Field(default_factory=list)
    encrypted_content: Any = None


def _known_item(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type", "message")
    if kind not in ITEMS:
        refuse(f"must be one of {', '.join(ITEMS)}, not {kind!r}", "type")
    return {**item, "type": kind}


AnyItem = Annotated[
    Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_known_item),
]


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _own(type_: Any) -> Any:
    if type_ != "function":
        refuse(f"{type_!r} is a tool of OpenAI's servers; this one has only functions, which the client carries out")
    return type_


class FunctionTool(Body):
    """A function that the model may call, and the client carries out."""

    type: Annotated[Literal["function"], BeforeValidator(_own)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    strict: bool = False
    """Arguments are kept to the schema also where the model chooses whether it calls a tool; where a call is asked for
    (``tool_choice``), they are in any case."""
    defer_loading: Any = None


class NamedTool(Body):
    """A function that is to be called."""

    type: Literal["function"]
    name: Text


class JsonSchemaFormat(Body):
    """An answer that is valid by a JSON schema."""

    type: Literal["json_schema"]
    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool = False


class TextConfig(Body):
    """What the answer must be."""

    format: Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class Reasoning(Body):
    """How the model thinks."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Told to the chat template, which may know it or not."""
    summary: Any = None
    generate_summary: Any = None
    context: Any = None


class ResponseRequest(Body):
    """The body of ``POST /v1/responses``."""

    model: Annotated[Text, Field(min_length=1)]
    """The name of a model that is served; ``GET /v1/models`` lists them."""
    adapter: Text = ""
    """The name of an adapter of the model, which may also stand behind the model's: ``model:adapter``."""
    input: Annotated[
        list[AnyItem], Field(min_length=1), BeforeValidator(_items, json_schema_input_type=str | list[AnyItem])
    ]
    instructions: Text = ""
    """What the model is told first."""
    max_output_tokens: TokenCount | None = None
    """Refused if the context has no room for them; left out: as many as the model's makers say, else as
    there is room for."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """This and top_p, left out: as the model's makers have it, else 1."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    include: list[str] = Field(default_factory=list)
    """``message.output_text.logprobs`` is told; all else is nothing that this server has."""
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(named_choice)] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    store: bool = True
    truncation: Literal["auto", "disabled"] = "disabled"
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    previous_response_id: Annotated[Any, Neutral()] = None
    conversation: Annotated[Any, Neutral()] = None
    background: Annotated[Any, Neutral(False)] = None
    prompt: Annotated[Any, Neutral()] = None
    context_management: Annotated[Any, Neutral([])] = None
    max_tool_calls: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _may_be_together(self) -> ResponseRequest:
        chosen = self.tool_choice
        if chosen not in ("none", "auto") and not self.tools:
            refuse("needs tools", "tool_choice")
        if isinstance(chosen, NamedTool) and chosen.name not in [tool.name for tool in self.tools]:
            refuse(f"names {chosen.name!r}, which is no tool of the request", "tool_choice", "name")
        kept = self.text is not None and not isinstance(self.text.format, TextFormat | None)
        if kept and chosen not in ("none", "auto"):
            refuse("contradicts text.format", "tool_choice")
        return self
