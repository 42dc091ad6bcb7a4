"""Small tokenizers made for the tests, and what streaming makes of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from motley.daemon.text.streaming import IncrementalDecoder
from motley.daemon.text.tokenizer import Tokenizer

SHAKESPEARE = Path(__file__).parents[3] / "cli/models/shakespeare-2.6m"
WriteFolder = Callable[..., Path]
"""Writes a model folder: of a tokenizer, a chat template if there is one, and JSON files by name."""

BOS, EOS, FIRST_BYTE = 0, 1, 3


def bytes_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level, every byte a token of its own: id = 3 + byte; 0 begins, 1 ends, 2 is a special separator."""
    alphabet = {bytes_char(byte): FIRST_BYTE + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "<sep>": 2, **alphabet}, []))
    backend.add_special_tokens(["<s>", "</s>", "<sep>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def bytes_char(byte: int) -> str:
    """The character that stands for a byte in byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte if byte in printable else 256 + [b for b in range(256) if b not in printable].index(byte))


def sentencepiece_tokenizer() -> tokenizers.Tokenizer:
    """Like Llama 2: a space is U+2581, one is put before the text and taken off again, unknown ones are bytes."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁Hello", "▁world", "ly", "!"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return backend


def stream(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    decoder = IncrementalDecoder(tokenizer, context)
    return "".join([decoder.push(token) for token in ids]) + decoder.flush()


def bytes_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]
