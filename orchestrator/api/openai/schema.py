"""OpenAI's request bodies as this server takes them: every field is obeyed, harmless, or refused by name.

Harmless are those that cannot change an answer here: ``user``, ``safety_identifier``, ``prompt_cache_key``,
``prompt_cache_retention``, ``service_tier``, ``store``, ``metadata``, ``prediction``, and ``name`` of a message.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from motley.orchestrator.api.schema import Body, Neutral, Text, refuse

MAX_STOPS = 4
MAX_ANSWERS = 128
"""To all prompts of a request together."""
_UINT32 = 2**32 - 1
_PRIORITIES = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=_UINT32)]
TokenCount = Annotated[int, Field(ge=1, le=_UINT32)]


def _one_text_part(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextPart(Body):
    """A piece of a message's content. Pieces are joined as they are, with nothing between them."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    list[TextPart],
    Field(min_length=1),
    BeforeValidator(_one_text_part, json_schema_input_type=str | Annotated[list[TextPart], Field(min_length=1)]),
]


class CalledFunction(Body):
    """What a call calls."""

    name: Text
    arguments: Text
    """JSON."""


class Call(Body):
    """A call of a tool, as an answer had it."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One of a chat's messages. The role ``developer`` is the model's ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    """Of an assistant that calls tools, it may be left out."""
    name: str = ""
    """Accepted; chat templates have no place for it."""
    refusal: Annotated[Any, Neutral()] = None
    annotations: Annotated[Any, Neutral([])] = None
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None
    tool_calls: list[Call] = Field(default_factory=list)
    tool_call_id: Text = ""
    """Of the call that a tool answers."""
    reasoning_content: Text = ""
    """What an assistant has thought, as an answer had it."""

    @model_validator(mode="after")
    def _has_what_its_role_has(self) -> Message:
        if self.content is None and not self.tool_calls:
            refuse("is missing", "content")
        if self.tool_calls and self.role != "assistant":
            refuse("are an assistant's alone", "tool_calls")
        if bool(self.tool_call_id) != (self.role == "tool"):
            refuse("is missing" if self.role == "tool" else "is a tool's alone", "tool_call_id")
        return self


class Function(Body):
    """What a model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: Text = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """A JSON schema of its arguments."""
    strict: bool = False
    """Arguments are kept to the schema also where the model chooses whether it calls a tool; where a call is asked for
    (``tool_choice``), they are in any case."""


class Tool(Body):
    """Something that a model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function, by its name."""

    name: Text


class NamedTool(Body):
    """A tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


def named_choice(choice: Any) -> Any:
    """A choice is a word or an object; said as one, as a union would tell of both what is wrong."""
    if not isinstance(choice, dict) and choice not in ("none", "auto", "required"):
        refuse("must be none, auto, required, or an object that names a function")
    return choice


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedTool, BeforeValidator(named_choice)]


class StreamOptions(Body):
    """How a stream is told."""

    include_usage: bool = False
    """Tell the usage as the last chunk."""
    include_obfuscation: bool = False
    """Accepted; there is none."""


def _stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _token_ids(biases: dict[str, float]) -> dict[str, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= _UINT32):
            refuse(f"has a key that is no token id: {token!r}")
    return biases


Stop = Annotated[Text, Field(min_length=1)]
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_stops, json_schema_input_type=Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]),
]
Bias = Annotated[float, Field(ge=-100, le=100)]


class TextFormat(Body):
    """An answer that may be anything."""

    type: Literal["text"]


class JsonFormat(Body):
    """An answer that is a JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema, by which an answer is valid whether or not it is strict."""

    name: str
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    """Features that are not supported are refused by name."""
    strict: bool = False


class JsonSchemaFormat(Body):
    """An answer that is valid by a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Request(Body):
    """What chats and completions have in common."""

    model: Annotated[Text, Field(min_length=1)]
    """The name of a model that is served; ``GET /v1/models`` lists them. With an adapter: ``model:adapter``."""
    adapter: Text = ""
    """The name of an adapter of the model, instead of one behind the model's name. Not part of OpenAI's API."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """This and the next four, left out: as the model's makers have it (``generation_config.json``), else OpenAI."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=_UINT32)] | None = None
    """Only the k likeliest tokens; 0: all. Not part of OpenAI's API."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Only tokens this likely, relative to the likeliest. Not part of OpenAI's API."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """As Hugging Face has it. Not part of OpenAI's API."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Equal seeds give equal answers; the k-th of ``n`` answers (from 0 on) has this seed + k."""
    logit_bias: Annotated[dict[str, Bias], AfterValidator(_token_ids)] = Field(default_factory=dict)
    stop: Stops = Field(default_factory=list)
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Annotated[TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    """What an answer is kept to; log-probabilities are told as without. For completions, not part of OpenAI's API."""
    regex: Annotated[Text, Field(min_length=1)] | None = None
    """The whole answer matches it. Not part of OpenAI's API."""
    grammar: Annotated[Text, Field(min_length=1)] | None = None
    """The answer is of this grammar, in Lark's notation or llama.cpp's (GBNF). Not part of OpenAI's API."""
    ignore_eos: bool = False
    """Go on behind tokens that end an answer. Not part of OpenAI's API."""
    drafts: bool = True
    """Whether tokens may be guessed ahead, which changes no text. Not part of OpenAI's API."""
    priority: Annotated[int, Field(ge=-_PRIORITIES, le=_PRIORITIES)] = 0
    """Of those that wait, requests with a lower one begin earlier, as at vLLM. Not part of OpenAI's API."""
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    prompt_cache_retention: str = ""
    service_tier: str = ""
    store: bool = False
    metadata: Annotated[
        dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
    ] = Field(default_factory=dict)
    prediction: dict[str, Any] = Field(default_factory=dict)

    @property
    def kept_to(self) -> list[str]:
        """The fields that say what an answer must be."""
        asked = {
            "response_format": not isinstance(self.response_format, TextFormat | None),
            "regex": self.regex is not None,
            "grammar": self.grammar is not None,
        }
        return [name for name, asks in asked.items() if asks]

    @model_validator(mode="after")
    def _may_be_together(self) -> Request:
        kept_to = self.kept_to
        if len(kept_to) > 1:
            refuse(f"contradicts {kept_to[0]}; give one of them", kept_to[1])
        if kept_to and self.ignore_eos:
            refuse(f"contradicts {kept_to[0]}, with which an answer ends", "ignore_eos")
        if self.stream_options is not None and not self.stream:
            refuse("needs stream to be true", "stream_options")
        return self


_TOLD_ANYWAY = {"messages", "tools", "add_generation_prompt"}
"""What a chat template is always told, of the parameters of these names or by Motley itself."""


class ChatRequest(Request):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    """Refused if the context has no room for them; left out: as many as the model's makers say, else as
    there is room for."""
    max_tokens: TokenCount | None = None
    """The older name of ``max_completion_tokens``."""
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[Tool] = Field(default_factory=list)
    """What the model may call; its chat template must know of tools."""
    tool_choice: ToolChoice = "auto"
    """With ``required``, or a function's name, the answer is calls whose arguments are valid by their schemas."""
    parallel_tool_calls: bool = True
    """Whether there may be several calls; otherwise the answer ends with the first."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Told to the chat template, which may know it or not; with ``none``, it is told that the model is not to think."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What the chat template is told by its own names, as at vLLM and llama.cpp: ``{"enable_thinking": false}``."""
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    functions: Annotated[Any, Neutral([])] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    verbosity: Annotated[Any, Neutral()] = None
    web_search_options: Annotated[Any, Neutral()] = None

    @model_validator(mode="after")
    def _agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            refuse("needs logprobs to be true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            refuse("contradicts max_completion_tokens; give one of them", "max_tokens")
        if told := _TOLD_ANYWAY & self.chat_template_kwargs.keys():
            refuse("is told of the request itself", "chat_template_kwargs", min(told))
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            refuse("have several functions of one name", "tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            refuse(f"is none of the tools: {self.tool_choice.function.name!r}", "tool_choice", "function", "name")
        if self.tool_choice == "required" and not names:
            refuse("needs tools", "tool_choice")
        if not self.calls_freely and self.tool_choice != "none" and self.kept_to:
            refuse("contradicts tool_choice, by which the answer is calls; leave it out", self.kept_to[0])
        strict = any(tool.function.strict for tool in self.tools)
        if self.ignore_eos and self.tool_choice != "none" and (strict or not self.calls_freely):
            refuse("contradicts tools that are strict or must be called, with which an answer ends", "ignore_eos")

    @property
    def calls_freely(self) -> bool:
        """Whether the model decides if it calls a tool."""
        return self.tool_choice == "auto"


TokenIds = Annotated[list[TokenId], Field(min_length=1)]


def _several(prompt: Any) -> Any:
    several = isinstance(prompt, list) and prompt and all(isinstance(each, str | list) for each in prompt)
    return prompt if several else [prompt]


ONE_OR_SEVERAL = BeforeValidator(
    _several, json_schema_input_type=str | TokenIds | Annotated[list[str | TokenIds], Field(min_length=1)]
)
"""A prompt by itself is a list of one."""


def prompt_or_list(prompt: Any) -> Any:
    """A prompt is a string or a list; said as one, as a union would tell of both what is wrong."""
    if not isinstance(prompt, str | list) or (not prompt and isinstance(prompt, list)):
        refuse("must be a string, a list of token ids that is not empty, or a list of such prompts")
    return prompt


class CompletionRequest(Request):
    """The body of ``POST /v1/completions``."""

    nulls: ClassVar[frozenset[str]] = frozenset({"max_tokens"})

    prompt: Annotated[
        list[Annotated[Text | TokenIds, BeforeValidator(prompt_or_list)]],
        Field(max_length=MAX_ANSWERS),
        ONE_OR_SEVERAL,
    ]
    max_tokens: TokenCount | None = None
    """Left out: 16, as at OpenAI; null: as many as the model's makers say, else as there is room for, as at vLLM."""
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    """As ``n``: the best of n answers are all of them. A choice among more is refused."""
    suffix: Annotated[Any, Neutral("")] = None

    @model_validator(mode="after")
    def _agrees(self) -> CompletionRequest:
        if self.logprobs is not None and self.echo:
            refuse("of a prompt (with echo) are not supported", "logprobs")
        if self.best_of not in (None, self.n):
            refuse(f"must be as n, which is {self.n}, or left out", "best_of")
        if len(self.prompt) * self.n > MAX_ANSWERS:
            refuse(f"of {len(self.prompt)} prompts makes more than {MAX_ANSWERS} answers", "n")
        return self
