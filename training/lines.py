"""A file of examples, a JSON object on every line, read and turned into texts of which some parts are answers.

A line is a chat, ``{"messages": [{"role": ..., "content": ...}, ...]}``, whose answers are what the assistant says; or
``{"prompt": ..., "completion": ...}``, whose answer is the completion; or ``{"text": ...}``, all of which is learnt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motley.training.errors import TrainingError, refuse_all

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Writes a chat as a model knows chats; with True, up to where the assistant's next answer starts."""

KINDS = '{"messages": [...]}, {"prompt": ..., "completion": ...} or {"text": ...}'


@dataclass(frozen=True)
class Text:
    """What a model reads in training.

    Attributes:
        text: all of it.
        answers: the parts that it learns to say, as ranges of characters, in order.
        whole: the text has its own special tokens, as a chat template writes them; otherwise the tokenizer adds its
            own.
        ends: a token that ends the text is learnt after it.
    """

    text: str
    answers: tuple[range, ...]
    whole: bool = False
    ends: bool = False


def read_lines(file: Path, render: Render) -> Iterator[tuple[int, Text]]:
    """Read a file of examples: the number of each line, from 1 on, and what is to be read. Empty lines are passed over.

    Args:
        render: writes chats.

    Raises:
        TrainingError: the file cannot be read, or lines are not what they should be; the message has their numbers.
    """
    texts: list[tuple[int, Text]] = []
    problems: list[str] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    texts += [(number, text) for text in texts_of(json.loads(line), render)]
                except TrainingError as error:
                    problems.append(f"{file}, line {number}: {error}")
                except (ValueError, RecursionError) as error:
                    problems.append(f"{file}, line {number}: not JSON: {error}")
    except UnicodeDecodeError as error:
        raise TrainingError(f"{file}: not text in UTF-8: {error}") from error
    except OSError as error:
        raise TrainingError(f"{file}: cannot be read: {error.strerror or error}") from error
    refuse_all(problems)
    yield from texts


def texts_of(entry: Any, render: Render) -> list[Text]:
    """Turn a line's value into what a model reads: one text, or one for each answer where `_chat` says why.

    Raises:
        TrainingError: it is none of `KINDS`.
    """
    if not isinstance(entry, dict):
        raise TrainingError(f"should be an object, {KINDS}")
    if "messages" in entry:
        return _chat(_messages(entry["messages"]), render)
    if "completion" in entry:
        prompt, completion = _string(entry, "prompt"), _string(entry, "completion")
        end = len(prompt) + len(completion)
        return [Text(prompt + completion, (range(len(prompt), end),), ends=True)]
    if "text" in entry:
        text = _string(entry, "text")
        return [Text(text, (range(len(text)),))]
    raise TrainingError(f"should have one of {KINDS}, and has {', '.join(map(repr, entry)) or 'nothing'}")


def _string(entry: Mapping[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise TrainingError(f"{key!r} should be a text, and is {str(value)[:80]!r}")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise TrainingError("'messages' should be a list of messages")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TrainingError(f"a message should have a 'role' and a 'content', and is {str(message)[:80]}")
        if message["role"] == "assistant":
            _string(message, "content")
    return value


def _chat(messages: list[dict[str, Any]], render: Render) -> list[Text]:
    """Find the answers in a chat: each is what is added to the text up to where the assistant starts.

    A template may write an answer otherwise once more follows (it leaves out what was thought before the last one):
    then there is a text for each answer, as it is written when it is the last one.
    """
    answers: list[range] = []
    texts: list[Text] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(messages[:index], True), render(messages[: index + 1], False)
        if not after.startswith(before):
            raise TrainingError("the chat template writes an answer otherwise than it begins one, so none can be found")
        answers.append(range(len(before), len(after)))
        texts.append(Text(after, (answers[-1],), whole=True))
    if not answers:
        return [Text(render(messages, False), (), whole=True)]
    if all(texts[-1].text.startswith(text.text) for text in texts):
        return [Text(texts[-1].text, tuple(answers), whole=True)]
    return texts
