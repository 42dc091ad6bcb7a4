"""Tokenizers of two models, token by token."""

from __future__ import annotations

import pytest
import tokenizers

from motley.daemon.text.alike import UnlikeTokenizersError, check_alike
from motley.daemon.text.tokenizer import Tokenizer


def a_tokenizer(*words: str, special: str = "") -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, words[0]))
    if special:
        backend.add_special_tokens([special])
    return Tokenizer(backend, vocabulary=len(words))


MODEL = a_tokenizer("a", "b", "c")


def test_equal_tokens_are_alike() -> None:
    check_alike(a_tokenizer("a", "b", "c"), "small", MODEL, "large")


@pytest.mark.parametrize(
    ("draft", "differs"),
    [
        (a_tokenizer("a", "x", "y"), "token 1 is 'x' there and 'b' in large"),
        (a_tokenizer("a", "b"), "token 2 is none there and 'c' in large"),
        (a_tokenizer("a", "b", "c", "d"), "token 3 is 'd' there and none in large"),
        (a_tokenizer("a", "b", "c", special="b"), "token 1, 'b', is a special one in small only"),
    ],
)
def test_the_first_token_that_differs_is_told(draft: Tokenizer, differs: str) -> None:
    with pytest.raises(UnlikeTokenizersError, match=f"small cannot guess for large, .*{differs}"):
        check_alike(draft, "small", MODEL, "large")
