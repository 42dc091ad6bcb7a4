"""How models write calls of tools, which the chat templates tell that taught them."""

# ruff: noqa: RUF001  # DeepSeek's marks have wide bars

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameters:
    """How a model writes the arguments of a call one by one, if they are no JSON object.

    Attributes:
        before, after: stand around the value of one, whose name is ``{key}``.
        joint: stands between two.
        quote: stands around texts; empty: nothing does, so a text is all up to `after`. Texts between ``"`` are written
            as JSON has them, others as they are.
        words: how ``true``, ``false`` and ``null`` are spelt.
        by_name: whether arguments, and members of objects, are in the order of their names.
    """

    before: str
    after: str = ""
    joint: str = ""
    quote: str = ""
    words: tuple[str, str, str] = ("true", "false", "null")
    by_name: bool = False


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls of tools.

    Attributes:
        begin, end: the marks around calls; an empty `begin`: the answer is the call; an empty `end`: nothing follows.
        before, after: stand around the arguments of a call; ``{name}`` is the tool's, ``{index}`` the call's number.
        parameters: how arguments are written; None: as a JSON object.
        joint: stands between two calls.
        listed: whether calls are a list within the marks; else each has marks of its own.
        lead, tail: stand behind `begin` and before `end`.
    """

    begin: str
    end: str
    before: str = '{"name": "{name}", "arguments": '
    after: str = "}"
    parameters: Parameters | None = None
    joint: str = "\n"
    listed: bool = False
    lead: str = ""
    tail: str = ""

    @property
    def is_json(self) -> bool:
        """Whether a call is a JSON object, which has the name and the arguments."""
        return self.before.startswith('{"')

    @property
    def marks(self) -> list[str]:
        """What may be special tokens of the model's."""
        quote = self.parameters.quote if self.parameters and len(self.parameters.quote) > 1 else ""
        inner = _SPECIAL.findall(self.before + self.after)
        return [*dict.fromkeys(filter(None, (self.begin, self.end, *inner, quote)))]


_SPECIAL = re.compile(r"<[|｜][^<>]*[|｜]>|\[[A-Z_]+\]")
"""How special tokens within a call look."""

HERMES = CallFormat("<tool_call>", "</tool_call>", lead="\n", tail="\n")
"""Of Hermes, Qwen 2.5 and 3, and many others."""
MISTRAL = CallFormat("[TOOL_CALLS]", "", joint=", ", listed=True, lead="[", tail="]")
"""Of Mistral's models before the tokenizer of version 11."""
MISTRAL_NAMED = CallFormat("[TOOL_CALLS]", "", before="{name}[ARGS]", after="", joint="")
"""Of Mistral's models since."""
QWEN_CODER = CallFormat(
    "<tool_call>",
    "</tool_call>",
    before="<function={name}>\n",
    after="</function>",
    parameters=Parameters("<parameter={key}>\n", "\n</parameter>\n"),
    lead="\n",
    tail="\n",
)
"""Of Qwen3-Coder, Qwen3.5 and Nemotron 3."""
SEED = CallFormat(
    "<seed:tool_call>",
    "</seed:tool_call>",
    before="<function={name}>\n",
    after="</function>",
    parameters=Parameters("<parameter={key}>", "</parameter>\n"),
    lead="\n",
    tail="\n",
)
GLM = CallFormat(
    "<tool_call>",
    "</tool_call>",
    before="{name}\n",
    after="",
    parameters=Parameters("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
)
"""Of GLM-4.5 and 4.6."""
GLM_DENSE = CallFormat(
    "<tool_call>",
    "</tool_call>",
    before="{name}",
    after="",
    parameters=Parameters("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
)
"""Of GLM-4.7 and later ones."""
MINIMAX = CallFormat(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    before='<invoke name="{name}">\n',
    after="</invoke>",
    parameters=Parameters('<parameter name="{key}">', "</parameter>\n"),
    listed=True,
    lead="\n",
    tail="\n",
)
DEEPSEEK = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    joint="",
    listed=True,
)
"""Of DeepSeek V3.1."""
DEEPSEEK_FENCED = CallFormat(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    listed=True,
)
"""Of DeepSeek V3 and R1."""
KIMI = CallFormat(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    before="<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
    after="<|tool_call_end|>",
    joint="",
    listed=True,
)
GEMMA = CallFormat(
    "<|tool_call>",
    "<tool_call|>",
    before="call:{name}{",
    after="}",
    parameters=Parameters("{key}:", joint=",", quote='<|"|>', by_name=True),
    joint="",
)
"""Of Gemma 4."""
FUNCTION_GEMMA = CallFormat(
    "<start_function_call>",
    "<end_function_call>",
    before="call:{name}{",
    after="}",
    parameters=Parameters("{key}:", joint=",", quote="<escape>", by_name=True),
    joint="",
)
"""Of FunctionGemma, which is made of Gemma 3's smallest."""
_PYTHON = Parameters("{key}=", joint=", ", quote='"', words=("True", "False", "None"))
LFM2 = CallFormat(
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    before="{name}(",
    after=")",
    parameters=_PYTHON,
    joint=", ",
    listed=True,
    lead="[",
    tail="]",
)
"""Of LFM2 and LFM2.5."""
OLMO = CallFormat(
    "<function_calls>",
    "</function_calls>",
    before="{name}(",
    after=")",
    parameters=Parameters("{key}=", joint=", ", quote='"'),
    listed=True,
)
"""Of OLMo 3: Python, a call a line, but for the words of JSON."""
PYTHONIC = CallFormat(
    "", "", before="{name}(", after=")", parameters=_PYTHON, joint=", ", listed=True, lead="[", tail="]"
)
"""Of templates that have Llama 3.2, Llama 4, Gemma 3 and others answer with a list of calls in Python."""
BARE = CallFormat("", "", before='{"name": "{name}", "parameters": ')
"""Of Llama 3 and 4, and of all templates with tools that have no marks which are known here."""
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
    (("<|tool_call>call:",), GEMMA),
    (("<start_function_call>",), FUNCTION_GEMMA),
    (("<function_calls>", "<functions>"), OLMO),
    (("<|tool_call_start|>",), LFM2),
    # Templates of LFM2 that write no calls themselves say so much of the tools.
    (("<|tool_list_start|>",), LFM2),
    (("<|im_start|>", "List of tools: ["), LFM2),
    (("[func_name1(",), PYTHONIC),
)
"""By what stands in a template, the first of which it has all."""
FORMATS = (*dict.fromkeys(form for _, form in _BY_WORDS), BARE)


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
