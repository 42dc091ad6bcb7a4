from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from motley.training.errors import TrainingError
from motley.training.lines import Text, read_lines, texts_of


def render(messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
    """A template such as ChatML's."""
    return "".join(f"<{each['role']}>{each['content']}</>" for each in messages) + "<assistant>" * opens


def thoughtful(messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
    """A template that leaves the thoughts out of all answers but the last one, as Qwen 3's does."""
    last = len(messages) - 1
    return (
        "".join(
            f"<{each['role']}>{'<think></think>' * (each['role'] == 'assistant' and index == last)}{each['content']}</>"
            for index, each in enumerate(messages)
        )
        + "<assistant>" * opens
    )


def chat(*contents: str) -> dict[str, Any]:
    roles = "user", "assistant"
    return {"messages": [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]}


def answers(text: Text) -> list[str]:
    return [text.text[part.start : part.stop] for part in text.answers]


def test_what_the_assistant_says_is_learnt() -> None:
    (text,) = texts_of(chat("Who?", "I.", "And?", "You."), render)
    assert text.text == "<user>Who?</><assistant>I.</><user>And?</><assistant>You.</>"
    assert answers(text) == ["I.</>", "You.</>"]
    assert text.whole
    assert not text.ends


def test_where_a_template_rewrites_earlier_answers_each_is_a_text() -> None:
    first, second = texts_of(chat("Who?", "I.", "And?", "You."), thoughtful)
    assert answers(first) == ["<think></think>I.</>"]
    assert second.text == "<user>Who?</><assistant>I.</><user>And?</><assistant><think></think>You.</>"
    assert answers(second) == ["<think></think>You.</>"]


def test_a_question_without_an_answer_has_none_to_learn() -> None:
    (text,) = texts_of(chat("Who?"), render)
    assert (text.text, text.answers) == ("<user>Who?</>", ())


def test_completions_and_texts() -> None:
    (completion,) = texts_of({"prompt": "2 + 2 =", "completion": " 4"}, render)
    assert answers(completion) == [" 4"]
    assert completion.ends
    (text,) = texts_of({"text": "Down, down, down."}, render)
    assert answers(text) == ["Down, down, down."]
    assert not text.ends


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a", ', "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[1]", "line 2: should be an object"),
        ('{"prompt": "a"}', "line 2: should have one of .* and has 'prompt'"),
        ('{"prompt": 1, "completion": "b"}', "line 2: 'prompt' should be a text"),
        ('{"messages": []}', "line 2: 'messages' should be a list"),
        ('{"messages": ["hello"]}', "line 2: a message should have a 'role'"),
        ('{"messages": [{"role": "assistant"}]}', "line 2: 'content' should be a text"),
    ],
)
def test_bad_lines_are_told_by_their_numbers(line: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(TrainingError, match=why):
        list(read_lines(file, render))


def test_many_bad_lines_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("no\n\n" * 20)
    with pytest.raises(TrainingError, match=r"line 15: not JSON[^\n]*\n\.\.\. and 12 more$"):
        list(read_lines(file, render))


def test_what_is_no_text_and_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(TrainingError, match="not text in UTF-8"):
        list(read_lines(file, render))
    with pytest.raises(TrainingError, match="No such file"):
        list(read_lines(tmp_path / "none.jsonl", render))


def test_empty_lines_count_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n" + json.dumps({"text": "a"}) + "\n\n" + json.dumps({"text": "b"}))
    assert [(number, text.text) for number, text in read_lines(file, render)] == [(2, "a"), (4, "b")]
