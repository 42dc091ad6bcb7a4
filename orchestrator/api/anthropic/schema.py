"""Anthropic's request bodies as this server takes them: every field is obeyed, harmless, or refused by name.

Harmless are those that cannot change an answer here: ``cache_control``, ``metadata``, ``service_tier``, ``speed``,
``inference_geo``, ``diagnostics``, ``citations`` that are not wanted, what is told of a tool for the sake of others
(``allowed_callers``, ``defer_loading``, ``eager_input_streaming``, ``input_examples``), and the signatures of thoughts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from motley.orchestrator.api.schema import Body, Neutral, Text, refuse

Count = Annotated[int, Field(ge=1, le=2**32 - 1)]
BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class Block(Body):
    """A piece of a message's content."""

    cache_control: Any = None


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: Any = None


class ThinkingBlock(Block):
    """What the model has thought, as an answer had it."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class RedactedThinkingBlock(Block):
    """Thoughts of another server's; they are left out."""

    type: Literal["redacted_thinking"]
    data: Text


class ToolUseBlock(Block):
    """A call of a tool, as an answer had it."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Any = None


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Texts = Annotated[list[TextBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]


class ToolResultBlock(Block):
    """What a tool has answered."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts = Field(default_factory=list)
    is_error: bool = False


def _kind(block: Any) -> Any:
    """Says what is read here, which a union would not."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(block, dict) and kind not in BLOCKS:
        known = ", ".join(BLOCKS)
        refuse(f"must be one of {known}, not {kind!r}: images, documents and searches cannot be read here", "type")
    return block


AnyBlock = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    BeforeValidator(_kind),
]


class Message(Body):
    """A turn of a chat. Turns of the same role that follow each other are one."""

    role: Literal["user", "assistant"]
    content: Annotated[list[AnyBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[AnyBlock])]

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> Message:
        of_assistants = (ThinkingBlock, RedactedThinkingBlock, ToolUseBlock)
        for index, block in enumerate(self.content):
            if isinstance(block, of_assistants) and self.role == "user":
                refuse("is an assistant's alone", "content", index)
            if isinstance(block, ToolResultBlock) and self.role == "assistant":
                refuse("is a user's alone", "content", index)
        return self


def _own(type_: Any) -> Any:
    if type_ not in (None, "custom"):
        refuse(f"{type_!r} is a tool of Anthropic's servers; this one has only those that the client carries out")
    return type_


class Tool(Body):
    """Something that the model may call, and the client carries out."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_own)] = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text = ""
    input_schema: dict[str, Any]
    strict: bool = False
    """Arguments are kept to the schema also where the model chooses whether it calls a tool; where a call is asked for
    (``tool_choice``), they are in any case."""
    cache_control: Any = None
    allowed_callers: Any = None
    defer_loading: bool = False
    eager_input_streaming: bool = False
    input_examples: Any = None


class ToolChoice(Body):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text = ""
    """Of the tool to call, with type ``tool``."""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> ToolChoice:
        if bool(self.name) != (self.type == "tool"):
            refuse("is missing" if self.type == "tool" else "needs the type 'tool'", "name")
        return self


class Thinking(Body):
    """Whether what the model thinks is told."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None
    """Accepted; thoughts count among ``max_tokens`` and have no limit of their own."""
    display: Any = None


class JsonFormat(Body):
    """An answer that is valid by a JSON schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """How an answer is to be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """Told to the chat template, which may know it or not."""
    format: JsonFormat | None = None


class Prompt(Body):
    """What the model is given to answer."""

    model: Annotated[Text, Field(min_length=1)]
    """The name of a model that is served; ``GET /v1/models`` lists them."""
    adapter: Text = ""
    """The name of an adapter of the model, which may also stand behind the model's: ``model:adapter``."""
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Texts = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    mcp_servers: Annotated[Any, Neutral([])] = None
    context_management: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _can_be_answered(self) -> Prompt:
        if self.messages[-1].role != "user":
            refuse(
                "must be a user's: an answer that has begun cannot be gone on with", "messages", len(self.messages) - 1
            )
        if self.tool_choice is not None and self.tool_choice.type != "none":
            if not self.tools:
                refuse("needs tools", "tool_choice")
            if self.tool_choice.name and self.tool_choice.name not in [tool.name for tool in self.tools]:
                refuse(f"names {self.tool_choice.name!r}, which is no tool of the request", "tool_choice", "name")
        return self


class MessagesRequest(Prompt):
    """The body of ``POST /v1/messages``."""

    max_tokens: Count
    """Refused if the context has no room for them."""
    stop_sequences: Annotated[list[Annotated[Text, Field(min_length=1)]], Field(max_length=16)] = Field(
        default_factory=list
    )
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """This, top_p and top_k, left out: as the model's makers have it, else 1, 1 and 0."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = None
    metadata: Any = None
    service_tier: Any = None
    speed: Any = None
    inference_geo: Any = None
    diagnostics: Any = None
    container: Annotated[Any, Neutral()] = None
    prefill: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _may_be_together(self) -> MessagesRequest:
        formatted = self.output_config is not None and self.output_config.format is not None
        if formatted and self.tool_choice is not None and self.tool_choice.type in ("any", "tool"):
            refuse("contradicts output_config.format", "tool_choice")
        return self


class CountRequest(Prompt):
    """The body of ``POST /v1/messages/count_tokens``."""
