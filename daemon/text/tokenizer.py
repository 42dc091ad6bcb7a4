"""Text in, token ids out, and back, with a model's conventions for special tokens and chats.

Reads the files of a Hugging Face folder: ``tokenizer.json`` (required), ``tokenizer_config.json``,
``chat_template.jinja``, ``config.json`` and ``generation_config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLTokenizer

from motley.daemon.text.calls.formats import knows_tools, wants_arguments_as_text
from motley.daemon.text.messages import Chat, ChatError, check_messages, with_arguments_as_text
from motley.daemon.text.responses.patience import Patience
from motley.daemon.text.responses.template import InvalidResponseTemplate, ResponseTemplate, read_response_template
from motley.daemon.text.templates import NO_OPTIONS, ChatTemplate, ChatWriter, InvalidTemplate
from motley.daemon.text.told_tools import with_told_tools
from motley.daemon.text.tool_results import Way, first_that_tells, has_results, ways
from motley.daemon.weights.git_lfs import pointer_told
from motley.protocol import worker_pb2 as wp

_NO_TEMPLATE = (
    "the model has no chat template, so it knows no roles (base models have none): let it continue a text, with POST"
    " /v1/completions or `motley run --raw`; if it was trained to chat, put its chat_template.jinja beside its"
    " tokenizer.json and start the session again"
)


_NEVER_SAID = "<|never said|>"
"""A token that ends answers in a tokenizer that has none."""


_ENDINGS = ("bos_token", "eos_token")
"""What begins and ends texts, as ``tokenizer_config.json`` calls it."""


class TokenizerError(Exception):
    """A model's text files are missing or broken; the message names the file."""


class Tokenizer:
    """A model's tokenizer with its conventions for special tokens and chats.

    Attributes:
        vocabulary: ids are below this; the smaller of the tokenizer's and the model's vocabulary.
        stop_tokens: ids that end an answer, of all files that name any.
        special_tokens: ids that decode to nothing.
        template: what writes chats; None: the model is a base model, which knows none.
        response_template: what takes answers apart; None: the model's files have none that can be used.
        patience: the time that is left for its patterns; lost: it is used no longer.
        notice: what whoever starts a session should know of these files; empty: nothing.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocabulary: int,
        stop_tokens: frozenset[int] = frozenset(),
        special: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        template: ChatWriter | None = None,
        response_template: ResponseTemplate | None = None,
        notice: str = "",
    ) -> None:
        """
        Args:
            backend: what turns text into tokens; its truncation and padding are switched off.
            special: the texts of ``bos_token``, ``eos_token``, ..., as chat templates call them.
            add_bos: whether raw text begins with ``bos_token``; None: as the backend's post-processor has it.
            template, response_template, notice: see the attributes.
        """
        backend.no_truncation()
        backend.no_padding()
        self.vocabulary = vocabulary
        self.stop_tokens = stop_tokens
        self._backend = backend
        self._special = dict(special or {})
        self.template = template
        self.response_template = response_template
        self.patience = Patience()
        self.notice = notice
        self._results: Way | None = None
        """How the template takes what calls of tools came to; None: nobody has asked yet."""
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
            TokenizerError: ``tokenizer.json`` is absent or another model's, or a file cannot be understood.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} is missing. Motley reads tokenizers in that form only; write it once with "
                "transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        if told := pointer_told(path):  # those of large vocabularies are kept in LFS too
            raise TokenizerError(told)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        settings = read_json(folder / "tokenizer_config.json")
        config = read_json(folder / "config.json")
        generation = read_json(folder / "generation_config.json")

        vocabulary = 1 + max(backend.get_vocab().values(), default=-1)
        rows, known = _rows(config, "vocab_size"), _rows(config, "output_vocab_size", "vocab_size")
        special = {
            name: text
            for name in (*_ENDINGS, "unk_token", "pad_token")
            if (text := _token_text(folder / "tokenizer_config.json", name, settings.get(name)))
        }
        ends = {
            folder / name: _token_ids(folder / name, values.get("eos_token_id"))
            for name, values in (("config.json", config), ("generation_config.json", generation))
        }
        _refuse_words_beyond(path, backend, special, folder / "config.json", rows)
        _refuse_unknown_ends(path, backend, ends)
        stop = {token for tokens in ends.values() for token in tokens}
        if (end := backend.token_to_id(special.get("eos_token", ""))) is not None:
            stop.add(end)
        add_bos = settings.get("add_bos_token")
        response_template, notice = _load_response_template(folder / "tokenizer_config.json", settings)
        return cls(
            backend,
            vocabulary=vocabulary if known is None else min(vocabulary, known),
            stop_tokens=frozenset(stop),
            special=special,
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            template=_load_template(folder, settings),
            response_template=response_template,
            notice=notice,
        )

    @property
    def tokens(self) -> dict[int, str]:
        """All tokens as the tokenizer's files write them, by id."""
        return {token: text for text, token in self._backend.get_vocab().items()}

    @cached_property
    def words(self) -> wp.Vocabulary:
        """The tokens as constraints of answers need them: with one that ends answers, which the model never says if it
        has none."""
        backend, stop = self._backend, sorted(token for token in self.stop_tokens if token < self.vocabulary)
        if not stop:
            backend = tokenizers.Tokenizer.from_str(backend.to_str())
            backend.add_special_tokens([_NEVER_SAID])
            stop = [backend.get_vocab()[_NEVER_SAID]]
        return wp.Vocabulary(tokenizer_json=backend.to_str(), size=self.vocabulary, stop=stop)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, begun as the model expects (``add_bos_token``, or its post-processor)."""
        return [*self._prefix, *self._encode(text, self._post_process)]

    def token(self, text: str) -> int | None:
        """The token that is just this text, special or not; None: there is none."""
        token: int | None = self._backend.token_to_id(text)
        return token

    def marks(self, texts: Collection[str]) -> dict[int, str]:
        """Find, among these texts, the special tokens, which decode to nothing; by id."""
        found = {self._backend.token_to_id(text): text for text in texts if text}
        return {token: text for token, text in found.items() if token in self.special_tokens}

    def encode_chat(self, messages: object, options: Mapping[str, Any] = NO_OPTIONS) -> list[int]:
        """Token ids of a chat, up to where the assistant's answer starts. All special tokens come from the template.

        Args:
            messages: a non-empty list of messages, see `messages.check_messages`.
            options: see `ChatTemplate.render`.

        Raises:
            ChatError: the model has no chat template, the messages are malformed, or the template refuses them.
        """
        if self.template is None:
            raise ChatError(_NO_TEMPLATE, "no_chat_template")
        chat = check_messages(messages)
        if not knows_tools(self.template.source):
            chat = with_told_tools(chat, options.get("tools") or ())
        elif wants_arguments_as_text(self.template.source):
            chat = with_arguments_as_text(chat)
        return self._encode(self._written(chat, options), False)

    def _written(self, chat: Chat, options: Mapping[str, Any]) -> str:
        """A chat as the template writes it; errors as `encode_chat`."""
        template = self.template
        assert template is not None, "who has none has been told"

        def write(chat: Chat) -> str:
            return template.render(chat, self._special, options)

        if not has_results(chat):
            return write(chat)
        if self._results is not None:
            return write(self._results(chat))
        text, self._results = first_that_tells(chat, ways(template.source), write)
        return text

    def _encode(self, text: str, post_process: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can spell what UTF-8 cannot
            raise ChatError(f"the text holds half of a surrogate pair at character {error.start}") from error
        try:
            # As a batch of one, as `encode` alone holds the interpreter's lock, for seconds where the text is long.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=post_process)
        except BaseException as error:
            _tell_panic(error)
            raise
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def special_texts(self) -> dict[int, str]:
        """The texts of the special tokens, by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token: added[token].content for token in self.special_tokens}

    def decode(self, ids: Sequence[int], with_special: bool = False) -> str:
        """The text of ids.

        Args:
            with_special: whether special tokens are in it.
        """
        return self._decode(ids, not with_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token in the middle of a text: with its leading space, special tokens by name. The first
        call takes a while."""
        if self._bytes is not None:
            return bytes(self._bytes.decode_bytes([token]))
        return self.token_text(token).encode()

    @cached_property
    def _bytes(self) -> LLTokenizer | None:
        """What knows tokens as bytes; None: it does not know tokenizers of this kind."""
        try:
            return LLTokenizer(self._backend.to_str())
        except ValueError:
            return None

    def token_text(self, token: int) -> str:
        """How one token reads in the middle of a text: with its leading space, special tokens by name."""
        before = self._decode(self._anchor, False)
        return self._decode([*self._anchor, token], False).removeprefix(before)

    def _decode(self, ids: Sequence[int], skip_special: bool) -> str:
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
        except BaseException as error:
            _tell_panic(error)
            raise
        return text

    @cached_property
    def _anchor(self) -> list[int]:
        """Ids of some ordinary text that a token is put behind, as decoders strip spaces at the start of a text."""
        return self._encode("a", False)


def _tell_panic(error: BaseException) -> None:
    """Raise a panic of the library, which is no `Exception` and would end whoever calls, as a `RuntimeError`."""
    if type(error).__name__ == "PanicException":
        raise RuntimeError(f"the tokenizer panicked: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
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


def _rows(config: Mapping[str, Any], *keys: str) -> int | None:
    """How many tokens a model has, by the first of some keys of its ``config.json``; None: that is not said there."""
    text = config.get("text_config")
    told = [part.get(key) for key in keys for part in (config, text) if isinstance(part, dict)]
    return next((rows for rows in told if isinstance(rows, int)), None)


def _refuse_words_beyond(
    path: Path, backend: tokenizers.Tokenizer, special: Mapping[str, str], config: Path, rows: int | None
) -> None:
    """Refuse a tokenizer with tokens beyond a model's vocabulary, which another model's has.

    Added tokens may be there, as those of images are in published text models (Gemma 3's), or one for padding in
    training: a text has them only where it spells them, and such a request is refused. What begins and ends texts may
    not. Fewer tokens than the model has are fine, for vocabularies are padded.
    """
    if rows is None:
        return
    known = backend.get_vocab()
    free = backend.get_added_tokens_decoder().keys() - {known.get(special.get(name, "")) for name in _ENDINGS}
    beyond = {token: text for text, token in known.items() if token >= rows and token not in free}
    if beyond:
        last = max(beyond)
        raise TokenizerError(
            f"{path} is another model's: it has token {last}, {beyond[last]!r}, but {config} has vocab_size {rows}."
            " Take the tokenizer that was published with the weights"
        )


def _refuse_unknown_ends(path: Path, backend: tokenizers.Tokenizer, ends: Mapping[Path, Sequence[int]]) -> None:
    """Refuse a tokenizer in which nothing that ends a model's answers is a special token: it is another model's.

    One of them is enough, as files of published models name some that their tokenizers do not have.
    """
    known = {token: text for text, token in backend.get_vocab().items()}
    special = backend.get_added_tokens_decoder() or known
    for file, tokens in ends.items():
        if tokens and not any(token in special for each in ends.values() for token in each):
            found = f"{known[tokens[0]]!r}, a word" if tokens[0] in known else f"none of its {len(known)} tokens"
            raise TokenizerError(
                f"{path} is another model's: answers end with token {tokens[0]} (eos_token_id in {file}), which is"
                f" {found} there. Take the tokenizer that was published with the weights, or correct that id"
            )


def _load_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
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
        return ChatTemplate(source)
    except InvalidTemplate as error:
        raise TokenizerError(f"{path}: the chat template is not valid: {error}") from error


def _load_response_template(path: Path, settings: Mapping[str, Any]) -> tuple[ResponseTemplate | None, str]:
    """How a model's answers are taken apart, if that is said and can be used, and what is to be told of it."""
    if (written := settings.get("response_template")) is None:
        return None, ""
    try:
        template = read_response_template(written)
    except InvalidResponseTemplate as error:
        instead = "answers are taken apart by what stands in the chat template"
        return None, f"{path}: response_template is not used, {instead}: {error}"
    if template.left_out:
        return template, f"{path}: answers have no place for these fields of response_template: {template.left_out}"
    return template, ""
