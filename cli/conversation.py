"""A conversation with a model: what was said, what it is asked next, and how it is kept in a file. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Conversation:
    """What a person and a model have said to each other.

    Attributes:
        system: what the model is told before all else; empty: nothing.
        turns: each question with its answer, in order.
    """

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """What a model that knows roles is sent for its answer to a question."""
        said = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answer in self.turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return [*said, {"role": "user", "content": question}]

    def text(self, question: str) -> str:
        """The same for a model that only continues texts: each question is on lines of its own."""
        text = f"{self.system}\n" if self.system else ""
        for asked, answer in self.turns:
            text = f"{_on_new_line(text, asked)}{answer}"
        return _on_new_line(text, question)

    def take_back(self) -> str | None:
        """Forget the last turn; its question, None if there is none."""
        return self.turns.pop()[0] if self.turns else None

    def to_markdown(self) -> str:
        """The conversation for people."""
        parts = [("System", self.system)] if self.system else []
        for asked, answer in self.turns:
            parts += [("You", asked), ("Model", answer)]
        return "\n".join(f"## {who}\n\n{said.strip()}\n" for who, said in parts)

    def to_json(self) -> str:
        """The conversation as OpenAI's clients have one: a list of messages."""
        messages: list[dict[str, Any]] = self.messages("")[:-1]
        return json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"


def _on_new_line(text: str, question: str) -> str:
    return f"{text}\n{question}" if text and not text.endswith("\n") else f"{text}{question}"
