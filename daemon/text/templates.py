"""Chat templates: Jinja as Hugging Face writes it, which turns a chat into the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from motley.daemon.text.messages import Chat, ChatError

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
ASKED_AT = "asked_at"
"""An option: when the client asked, in ISO 8601. A template that tells the date writes the same text by it when the
request is answered anew, on another machine or after midnight."""


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class InvalidTemplate(ValueError):
    """A chat template that Jinja cannot read."""


class ChatWriter(Protocol):
    """Writes chats as a model knows them, by the template whose text is `source`: see `ChatTemplate`."""

    source: str

    def render(self, chat: Chat, special: Mapping[str, str], options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """See `ChatTemplate.render`."""


class ChatTemplate:
    """A model's chat template. It comes from strangers, so it runs in a sandbox.

    The sandbox keeps it from everything but time and memory: a template may never end, and so may compiling it, which
    computes what is constant in it. `motley.daemon.node.answering.rendering` has both done in another process.

    Attributes:
        source: the template as text.
    """

    def __init__(self, source: str) -> None:
        """
        Raises:
            InvalidTemplate: it is no template.
        """
        self._environment = environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson  # jinja2's own escapes HTML
        environment.globals.update(raise_exception=_raise_exception)
        self.source = source
        try:
            environment.parse(source)
        except TemplateError as error:
            raise InvalidTemplate(str(error)) from error

    @cached_property
    def _template(self) -> Template:
        return self._environment.from_string(self.source)

    def render(self, chat: Chat, special: Mapping[str, str], options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """Write a chat as the model knows chats, up to where the assistant's answer starts.

        Args:
            chat: as `messages.check_messages` returns it.
            special: the texts of ``bos_token``, ``eos_token``, ..., which templates refer to by these names.
            options: what else the template may know: ``tools``, as OpenAI has them, or ``reasoning_effort``; and
                `ASKED_AT`, the time that it takes for now.

        Raises:
            ChatError: the template refuses the chat, or fails.
        """
        asked_at = options.get(ASKED_AT)
        now = datetime.fromisoformat(asked_at) if asked_at else datetime.now()
        known = {"tools": None, "documents": None, **options, "strftime_now": now.strftime, **special}
        try:
            return self._template.render(known, messages=chat, add_generation_prompt=True)
        except TemplateError as error:
            raise ChatError(f"the model's chat template refuses these messages: {error}") from error
        except MemoryError as error:
            raise ChatError("the model's chat template wants too much memory") from error
        except Exception as error:  # the template is foreign code: it can raise anything
            raise ChatError(f"the model's chat template fails: {type(error).__name__}: {error}") from error
