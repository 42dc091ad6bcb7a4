"""Text of an answer while its tokens come one by one."""

from __future__ import annotations

from collections.abc import Sequence

from motley.daemon.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
"""What bytes that are no UTF-8, or not yet, decode to."""


class IncrementalDecoder:
    """Turns token ids into text one by one, each as soon as its text is certain; the pieces add up to what decoding all
    ids at once gives.

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
        """`context`: the ids before the first one that comes, such as the prompt's."""
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
