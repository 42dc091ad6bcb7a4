"""Whether two models have the same tokens, so that the one can guess what the other writes by token ids alone."""

from __future__ import annotations

from motley.daemon.text.tokenizer import Tokenizer


class UnlikeTokenizersError(Exception):
    """Two tokenizers differ; the message says in which token first."""


def check_alike(draft: Tokenizer, draft_name: str, model: Tokenizer, model_name: str) -> None:
    """Make sure that every token of a draft model is the same token of the model that it guesses for.

    Raises:
        UnlikeTokenizersError: a token is another one, is missing, or is special in only one of them.
    """
    own, others = draft.tokens, model.tokens
    for token in range(max([-1, *own, *others]) + 1):
        mine, theirs = own.get(token), others.get(token)
        if mine != theirs:
            differs = f"token {token} is {_told(mine)} there and {_told(theirs)} in {model_name}"
        elif (token in draft.special_tokens) != (token in model.special_tokens):
            only = draft_name if token in draft.special_tokens else model_name
            differs = f"token {token}, {_told(mine)}, is a special one in {only} only"
        else:
            continue
        raise UnlikeTokenizersError(
            f"{draft_name} cannot guess for {model_name}, as it has another tokenizer: {differs}. Take a draft model of"
            " the same family, or do without"
        )


def _told(text: str | None) -> str:
    return "none" if text is None else repr(text)
