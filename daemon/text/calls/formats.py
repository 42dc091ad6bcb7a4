"""How models write calls of tools, which the chat templates tell that taught them."""

# ruff: noqa: RUF001  # DeepSeek's marks have wide bars

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls of tools.

    Attributes:
        begin, end: the marks around calls; an empty `begin`: the answer is the call; an empty `end`: nothing follows.
        before, after: stand around the arguments of a call; ``{name}`` is the tool's, ``{index}`` the call's number.
        parameter: stands before the value of an argument, whose name is ``{key}``; empty: arguments are a JSON object.
        value_end: stands behind it.
        joint: stands between two calls within the marks; None: each has marks of its own.
        lead, tail: stand behind `begin` and before `end`.
    """

    begin: str
    end: str
    before: str = '{"name": "{name}", "arguments": '
    after: str = "}"
    parameter: str = ""
    value_end: str = ""
    joint: str | None = None
    lead: str = ""
    tail: str = ""

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object, which has the name and the arguments."""
        return self.before.startswith('{"')

    @property
    def marks(self) -> list[str]:
        """What may be special tokens of the model's."""
        inner = _SPECIAL.findall(self.before + self.after)
        return [*dict.fromkeys(filter(None, (self.begin, self.end, *inner)))]


_SPECIAL = re.compile(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]")
"""How special tokens within a call look."""

HERMES = CallFormat("<tool_call>", "</tool_call>", lead="\n", tail="\n")
"""Of Hermes, Qwen 2.5 and 3, and many others."""
MISTRAL = CallFormat("[TOOL_CALLS]", "", joint=", ", lead="[", tail="]")
"""Of Mistral's models before the tokenizer of version 11."""
MISTRAL_NAMED = CallFormat("[TOOL_CALLS]", "", before="{name}[ARGS]", after="")
"""Of Mistral's models since."""
QWEN_CODER = CallFormat(
    "<tool_call>",
    "</tool_call>",
    before="<function={name}>\n",
    after="</function>",
    parameter="<parameter={key}>\n",
    value_end="\n</parameter>\n",
    lead="\n",
    tail="\n",
)
"""Of Qwen3-Coder, Qwen3.5 and Nemotron 3."""
SEED = CallFormat(
    "<seed:tool_call>",
    "</seed:tool_call>",
    before="<function={name}>\n",
    after="</function>",
    parameter="<parameter={key}>",
    value_end="</parameter>\n",
    lead="\n",
    tail="\n",
)
GLM = CallFormat(
    "<tool_call>",
    "</tool_call>",
    before="{name}\n",
    after="",
    parameter="<arg_key>{key}</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
)
"""Of GLM-4.5 and 4.6."""
GLM_DENSE = CallFormat(
    "<tool_call>",
    "</tool_call>",
    before="{name}",
    after="",
    parameter="<arg_key>{key}</arg_key><arg_value>",
    value_end="</arg_value>",
)
"""Of GLM-4.7 and later ones."""
MINIMAX = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    before='<invoke name="{name}">\n',
    after="</invoke>",
    parameter='<parameter name="{key}">',
    value_end="</parameter>\n",
    joint="\n",
    lead="\n",
    tail="\n",
)
DEEPSEEK = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    joint="",
)
"""Of DeepSeek V3.1."""
DEEPSEEK_FENCED = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    joint="\n",
)
"""Of DeepSeek V3 and R1."""
KIMI = CallFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    before="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    joint="",
)
BARE = CallFormat("", "", before='{"name": "{name}", "parameters": ')
"""Of Llama 3, and of all templates with tools that have no marks which are known here."""
TOLD = HERMES
"""What models are told whose templates know of no tools: most have seen it in what they were trained on."""

_BY_WORDS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    (("<|tool_call_argument_begin|>",), KIMI),
    (("<｜tool▁sep｜>", "```json"), DEEPSEEK_FENCED),
    (("<｜tool▁sep｜>",), DEEPSEEK),
    (("<minimax:tool_call>",), MINIMAX),
    (("<seed:tool_call>",), SEED),
    (("<tool_call>", "<arg_key>", "</arg_key>\n"), GLM),
    (("<tool_call>", "<arg_key>"), GLM_DENSE),
    (("<tool_call>", "<function="), QWEN_CODER),
    (("<tool_call>",), HERMES),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_NAMED),
    (("[TOOL_CALLS]",), MISTRAL),
)
"""By what stands in a template, the first of which it has all."""
FORMATS = tuple(form for _, form in _BY_WORDS)


def call_format(template: str) -> CallFormat:
    """How a model with this chat template calls tools."""
    if not knows_tools(template):
        return TOLD
    return next((form for words, form in _BY_WORDS if all(word in template for word in words)), BARE)


def knows_tools(template: str) -> bool:
    """Whether a chat template writes the tools itself."""
    return bool(re.search(r"\btools\b", template))


def wants_arguments_as_text(template: str) -> bool:
    """Whether a chat template takes the arguments of an earlier call for a text of JSON, to which it adds others, where
    most take them for an object."""
    return bool(re.search(r"\+\s*[\w.'\"\[\]]*\barguments\b['\"]?\]?\s*[+~}]", template))
