"""Text in, token ids out, and back: a model folder's tokenizer, its chat template, streaming and stop strings.

Reads the files of a Hugging Face folder: ``tokenizer.json`` (required), ``tokenizer_config.json``,
``chat_template.jinja``, ``config.json`` and ``generation_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

REPLACEMENT = "\ufffd"
"""What bytes that are no UTF-8, or not yet, decode to."""


class TokenizerError(Exception):
    """A model's text files are missing or broken; the message names the file."""


class ChatError(ValueError):
    """Messages that are malformed, or that the model's chat template refuses."""


class Tokenizer:
    """A model's tokenizer with its conventions for special tokens and chats.

    Attributes:
        vocabulary: ids are below this; the smaller of the tokenizer's and the model's vocabulary.
        stop_tokens: ids that end an answer, of all files that name any.
        special_tokens: ids that decode to nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocabulary: int,
        stop_tokens: frozenset[int] = frozenset(),
        special: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        template: Template | None = None,
    ) -> None:
        """`special`: texts of ``bos_token``, ...; `add_bos`: None leaves that to the tokenizer's post-processor."""
        backend.no_truncation()
        backend.no_padding()
        self.vocabulary = vocabulary
        self.stop_tokens = stop_tokens
        self._backend = backend
        self._special = dict(special or {})
        self._template = template
        self._post_process = add_bos is None
        begin = backend.token_to_id(self._special.get("bos_token", ""))
        self._prefix = [begin] if add_bos and begin is not None else []
        self.special_tokens = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a model folder.

        Raises:
            TokenizerError: ``tokenizer.json`` is absent, or a file cannot be understood.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} is missing. Motley reads tokenizers in that form only; write it once with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")

        vocabulary = 1 + max(backend.get_vocab().values(), default=-1)
        rows = config.get("vocab_size")
        special = {
            name: text
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(folder / "tokenizer_config.json", name, settings.get(name)))
        }
        stop = {
            *_token_ids(folder / "generation_config.json", generation.get("eos_token_id")),
            *_token_ids(folder / "config.json", config.get("eos_token_id")),
        }
        if (end := backend.token_to_id(special.get("eos_token", ""))) is not None:
            stop.add(end)
        add_bos = settings.get("add_bos_token")
        return cls(
            backend,
            vocabulary=min(vocabulary, rows) if isinstance(rows, int) else vocabulary,
            stop_tokens=frozenset(stop),
            special=special,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            template=_load_template(folder, settings),
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, begun as the model expects (``add_bos_token``, or its post-processor)."""
        return [*self._prefix, *self._encode(text, self._post_process)]

    def encode_chat(self, messages: object) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer starts.

        With a chat template all special tokens come from the template. A model without one is a base model that
        knows no roles: it continues the contents of the messages, one per line.

        Args:
            messages: a non-empty list of ``{"role": str, "content": str | [{"type": "text", "text": str}]}``.

        Raises:
            ChatError: the messages are malformed, or the template refuses them.
        """
        chat = _check_messages(messages)
        if self._template is None:
            return self.encode("\n".join(message["content"] for message in chat))
        return self._encode(self._render(self._template, chat), False)

    def _encode(self, text: str, post_process: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell what UTF-8 cannot
            raise ChatError(f"the text holds half of a surrogate pair at character {error.start}") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=post_process).ids
        return ids

    def _render(self, template: Template, chat: list[dict[str, str]]) -> str:
        try:
            return template.render(
                messages=chat, add_generation_prompt=True, tools=None, documents=None, **self._special
            )
        except TemplateError as error:
            raise ChatError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # the template is foreign code: it can raise anything
            raise ChatError(f"the model's chat template fails: {type(error).__name__}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens left out."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def token_text(self, token: int) -> str:
        """How one token reads in the middle of a text: with its leading space, special tokens by name."""
        before: str = self._backend.decode(self._anchor, skip_special_tokens=False)
        both: str = self._backend.decode([*self._anchor, token], skip_special_tokens=False)
        return both.removeprefix(before)

    @cached_property
    def _anchor(self) -> list[int]:
        """Any ordinary text to stand before a token: decoders strip spaces at the start."""
        return self._encode("a", False)

    def decoder(self, context: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder for the ids that follow `context`."""
        return IncrementalDecoder(self, context)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return value


def _token_text(path: Path, name: str, value: object) -> str | None:
    """A special token: a string, or an object with its ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{path}: {name} is neither a string nor an object with a content")


def _token_ids(path: Path, value: object) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    checked = [token for token in ids if isinstance(token, int) and token >= 0]
    if len(checked) < len(ids):
        raise TokenizerError(f"{path}: eos_token_id is neither a token id nor a list of them: {value!r}")
    return checked


# ---------------------------------------------------------------- chat templates


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> Template:
    """A template in the dialect of Hugging Face, sandboxed: it comes from strangers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # jinja2's own escapes HTML
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment.from_string(source)


def _load_template(folder: Path, settings: Mapping[str, Any]) -> Template | None:
    """The template file if there is one, else the setting: a string, or a list of named ones."""
    path = folder / "chat_template.jinja"
    try:
        source: object = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        path = folder / "tokenizer_config.json"
        source = settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        if "default" not in named:
            raise TokenizerError(f"{path}: no chat template is named 'default', only {sorted(map(str, named))}")
        source = named["default"]
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(f"{path}: chat_template is not text")
    try:
        return compile_template(source)
    except TemplateError as error:
        raise TokenizerError(f"{path}: the chat template is not valid: {error}") from error


def _check_messages(messages: object) -> list[dict[str, str]]:
    """The chat with every content as one string."""
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a non-empty list")
    chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatError(f"{where} must be an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{where}.role must be a non-empty string")
        # Clients send an answer back with all its fields, most of them empty.
        unknown = [key for key, value in message.items() if key not in ("role", "content", "name") and value]
        if unknown:
            raise ChatError(f"{where} has keys that are not supported: {', '.join(map(str, unknown))}")
        checked = {"role": role, "content": _check_content(where, message.get("content"))}
        if message.get("name"):
            checked["name"] = str(message["name"])
        chat.append(checked)
    return chat


def _check_content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where}.content must be a string or a list of text parts")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatError(
                f'{where}.content: this model reads text only, parts like {{"type": "text", "text": "..."}}'
            )
        texts.append(part["text"])
    return "".join(texts)


# ---------------------------------------------------------------- streaming


class IncrementalDecoder:
    """Ids in, text out, as soon as it is certain: the pieces add up to what decoding all ids at once gives.

    A character can be spread over several tokens, and decoders treat the start of a text differently (leading
    spaces), so a token cannot be decoded alone. This decodes a short window: the latest tokens whose text is
    complete, as context, and those after them. Tokens enter and leave the window once, so the cost per token does
    not grow with the text.
    """

    _CONTEXT = 6
    """Tokens of what came before that start the window."""
    _LONGEST = 32
    """Tokens that may wait for a character to end. More are no UTF-8 and are given up as they are."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        recent = [token for token in context[-self._LONGEST :] if token not in tokenizer.special_tokens]
        length = min(self._CONTEXT, len(recent))
        while length < len(recent) and tokenizer.decode(recent[-length:]).startswith(REPLACEMENT):
            length += 1  # it began within a character
        self._window = recent[len(recent) - length :]
        self._complete = length
        """Tokens at the head of the window that serve as context only."""
        self._sent = len(tokenizer.decode(self._window))
        """Characters of the window's text that were sent or are context."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        if token in self._tokenizer.special_tokens:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._complete < self._LONGEST:
            return self._send(text.rstrip(REPLACEMENT))
        new = self._send(text)
        latest = self._window[self._complete :]
        if context := self._tokenizer.decode(latest):  # a lone space may decode to nothing: no context
            self._window, self._complete, self._sent = latest, len(latest), len(context)
        return new

    def flush(self) -> str:
        """What is left at the end: incomplete characters, as U+FFFD."""
        return self._send(self._tokenizer.decode(self._window))

    def _send(self, text: str) -> str:
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new


class StopChecker:
    """Cuts a stream of text before the first stop string that comes to its end; sends no part of one.

    Text that may be the start of a stop string is held back until that is decided. What comes out depends on the
    text alone, not on how it was cut into pieces: of several stop strings the one that ends first wins, and of
    those that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that may be shown now. Empty once `stopped`."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        first = max(0, len(text) + 1 - max(map(len, self._stops), default=0))
        show = next(
            (at for at in range(first, len(text)) if any(stop.startswith(text[at:]) for stop in self._stops)),
            len(text),
        )
        self._held = text[show:]
        return text[:show]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
