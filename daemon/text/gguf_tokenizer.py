"""The tokenizer that a GGUF file carries in its metadata.

Two kinds: byte-level BPE (``tokenizer.ggml.model = "gpt2"``) with its merges and, by name, the rule that cuts text
into words; and SentencePiece BPE (``"llama"``, ``"gemma4"``) with merges, or a score per token that tells them, and
tokens for bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from motley.daemon.text.templates import ChatTemplate, InvalidTemplate
from motley.daemon.text.tokenizer import Tokenizer, TokenizerError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.header import read_header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The kinds of tokens, as ``tokenizer.ggml.token_type`` has them."""

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>")
"""Control tokens that end an answer in any model that has them: a file names only one or two of its ends by id."""


@dataclass(frozen=True)
class _Words:
    """How text is cut before merging, and what comes with it.

    Attributes:
        patterns: of a word, one after another: each cuts what those before have left whole; none: GPT-2's, which the
            library knows.
        digits: each is a word.
        compose: text is in Unicode's form NFC first.
        whole: a word that is a token stays one, whatever the merges say.
        begin: texts begin with the begin token unless the file says otherwise.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    compose: bool = False
    whole: bool = False
    begin: bool = False


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_EXAONE_MOE = (  # words between which there is one space stay together
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_JAIS2 = _LLAMA3.replace(  # spaces in runs of powers of two
    r"\s+(?!\S)|\s+",
    "|".join(rf"\s{{{run}}}(?!\S)" for run in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s",
)
_LING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OF_ANY_CASE = r"\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER, _LOWER = rf"[\p{{Lu}}\p{{Lt}}{_OF_ANY_CASE}", rf"[\p{{Ll}}{_OF_ANY_CASE}"
_KIMI = (
    rf"\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_EAST_ASIAN = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_LLAMA_WORDS = _Words((_LLAMA3,), whole=True, begin=True)
_LING_WORDS = _Words((_LING,))
_AYA_WORDS = _Words((r"\d{1,3}(?=(?:\d{3})*\b)", _O200K))
_QWEN_WORDS = _Words((_QWEN2,), compose=True)
_O200K_WORDS = _Words((_O200K,))
WORDS: Mapping[str, _Words] = {
    "gpt-2": _Words(),
    "exaone4": _Words(),
    "granite-docling": _Words(),
    "phi-2": _Words(),
    "gigachat": _Words(),
    "a.x-4.0": _Words(),
    "mellum": _Words(),
    "trillion": _Words(),
    "smollm": _Words(digits=True),
    "refact": _Words(digits=True),
    "starcoder": _Words(digits=True),
    "codeshell": _Words(digits=True),
    "exaone": _Words(digits=True),
    "mellum2": _Words(digits=True),
    "command-r": _Words(digits=True, compose=True),
    "llama3": _LLAMA_WORDS,
    "llama-v3": _LLAMA_WORDS,
    "llama-bpe": _LLAMA_WORDS,
    "pixtral": _LLAMA_WORDS,
    "lfm2": _LLAMA_WORDS,
    "falcon3": _LLAMA_WORDS,
    "falcon-h1": _LLAMA_WORDS,
    "midm-2.0": _LLAMA_WORDS,
    "dbrx": _Words((_LLAMA3,)),
    "jais-2": _Words((_JAIS2,)),
    "qwen2": _QWEN_WORDS,
    "deepseek-r1-qwen": _QWEN_WORDS,
    "qwen35": _Words((_QWEN35,), compose=True),
    "deepseek-v3": _Words(_DEEPSEEK3),
    "hunyuan-dense": _Words(_DEEPSEEK3),
    "hunyuan": _Words((_QWEN2,)),
    "stablelm2": _Words((_QWEN2,)),
    "solar-open": _Words((_QWEN2,)),
    "laguna": _Words((r"\n+|[^\n]+", _QWEN2)),
    "bailingmoe": _LING_WORDS,
    "bailingmoe2": _LING_WORDS,
    "seed-coder": _Words((_SEED,)),
    "kimi-k2": _Words((_KIMI,)),
    "deepseek-llm": _Words(_DEEPSEEK_2),
    "deepseek-coder": _Words(_DEEPSEEK_CODER),
    "exaone-moe": _Words((_EXAONE_MOE,)),
    "gpt-4o": _O200K_WORDS,
    "llama4": _O200K_WORDS,
    "kanana2": _O200K_WORDS,
    "tiny_aya": _AYA_WORDS,
    "cohere2moe": _AYA_WORDS,
    "minimax-m2": _O200K_WORDS,
    "glm4": _Words((_LLAMA3,)),
    "chatglm-bpe": _Words((_LLAMA3,)),
    "tekken": _Words((_TEKKEN,), whole=True, begin=True),
    "olmo": _Words(compose=True),
}
"""How text is cut, by ``tokenizer.ggml.pre``: the patterns are those of the models' own ``tokenizer.json``, and which
names stand for the same is llama.cpp's."""


def load_gguf_tokenizer(file: Path) -> Tokenizer:
    """Build the tokenizer of a GGUF file (of a split model: of its first part).

    Raises:
        TokenizerError: there is none, one that is not supported, or the file cannot be read.
    """
    try:
        header = read_header(file)
    except CheckpointError as error:
        raise TokenizerError(str(error)) from error
    tokenizer = gguf_tokenizer(header.metadata, file)
    embedding = header.tensors.get("token_embd.weight")
    if embedding and embedding.shape[:1] < (tokenizer.vocabulary,):
        raise TokenizerError(f"{file}: {tokenizer.vocabulary} tokens, but token_embd.weight is {list(embedding.shape)}")
    return tokenizer


def gguf_tokenizer(metadata: Mapping[str, Any], file: Path) -> Tokenizer:
    """Build the tokenizer that metadata describe; `file` is for messages, errors as `load_gguf_tokenizer`."""
    keys = _TokenizerKeys(metadata, file)
    kind = keys.text("model")
    tokens, types = keys.tokens()
    if kind == "gpt2":
        words = keys.words()
        backend = _byte_level(keys, tokens, words)
        begin = words.begin
    elif kind in ("llama", "gemma4"):
        backend = _sentence_piece(keys, tokens, types, prefix=kind == "llama")
        begin = True
    else:
        raise keys.refusal("model", "gpt2, llama, gemma4")
    added = (CONTROL, UNKNOWN, USER_DEFINED)
    backend.add_tokens(
        [
            AddedToken(token, special=type_ != USER_DEFINED, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in added and token
        ]
    )
    if keys.flag("add_eos_token", False):
        raise keys.refusal("add_eos_token", "only false: an end token after a prompt leaves nothing to say")
    ids = {
        name: keys.token(key, len(tokens))
        for name, key in {
            "bos_token": "bos_token_id",
            "eos_token": "eos_token_id",
            "unk_token": "unknown_token_id",
            "pad_token": "padding_token_id",
        }.items()
    }
    stop = {ids["eos_token"], keys.token("eot_token_id", len(tokens)), keys.token("eom_token_id", len(tokens))}
    ends = {index for index, token in enumerate(tokens) if token in _ENDS and types[index] == CONTROL}
    return Tokenizer(
        backend,
        vocabulary=1 + max((index for index, type_ in enumerate(types) if type_ != UNUSED), default=-1),
        stop_tokens=frozenset(token for token in stop if token is not None) | ends,
        special={name: tokens[token] for name, token in ids.items() if token is not None},
        add_bos=keys.flag("add_bos_token", begin),
        template=keys.template(),
    )


def _bpe(
    keys: _TokenizerKeys, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the library raises plain Exception
        raise keys.error(f"tokens and merges that make no tokenizer: {error}") from error


def _byte_level(keys: _TokenizerKeys, tokens: list[str], words: _Words) -> tokenizers.Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = _bpe(keys, vocabulary, keys.merges(), ignore_merges=words.whole)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if words.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in words.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.patterns))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if words.compose:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentence_piece(keys: _TokenizerKeys, tokens: list[str], types: list[int], prefix: bool) -> tokenizers.Tokenizer:
    """Make a tokenizer like Llama 2's ``tokenizer.json``: a space is U+2581, and with `prefix` one goes before the text
    unless the file says otherwise."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    missing = next((name for name in (f"<0x{byte:02X}>" for byte in range(256)) if name not in vocabulary), None)
    if missing:
        raise keys.error(f"no token {missing}: SentencePiece vocabularies without a token per byte are not supported")
    unknown = next((token for token, type_ in zip(tokens, types, strict=True) if type_ == UNKNOWN), None)
    if keys.has("merges"):  # then scores may be made up
        merges = keys.merges()
    else:
        scores = zip(tokens, keys.scores(len(tokens)), types, strict=True)
        merges = _merges({token: score for token, score, type_ in scores if type_ == NORMAL}, vocabulary)
    backend = _bpe(keys, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    space = normalizers.Replace(" ", "▁")
    decoded = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("add_space_prefix", prefix):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        decoded.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(decoded)
    return backend


def _merges(scores: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: whichever two neighbours make the token of the highest score."""
    ranked = [
        (-score, vocabulary[token], vocabulary[token[:cut]], vocabulary[token[cut:]], cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(token[:cut], token[cut:]) for *_, cut, token in sorted(ranked)]


class _TokenizerKeys:
    """The ``tokenizer.ggml.`` keys, read with their types checked."""

    def __init__(self, metadata: Mapping[str, Any], file: Path) -> None:
        self._file = file
        self._metadata = metadata

    def error(self, reason: str) -> TokenizerError:
        return TokenizerError(f"{self._file}: {reason}")

    def refusal(self, key: str, supported: str) -> TokenizerError:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return self.error(f"tokenizer.ggml.{key} is absent; expected {supported}")
        return self.error(f"tokenizer.ggml.{key} = {str(value)[:200]!r} is not supported; supported: {supported}")

    def has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self._metadata

    def text(self, key: str) -> str:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, str) else ""

    def texts(self, key: str) -> list[str]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self.refusal(key, "a list of texts")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def token(self, key: str, count: int) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and (not isinstance(value, int) or not 0 <= value < count):
            raise self.refusal(key, f"a token, less than {count}")
        return value

    def tokens(self) -> tuple[list[str], list[int]]:
        tokens = self.texts("tokens")
        types = self._metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        if not isinstance(types, list) or len(types) != len(tokens) or not all(isinstance(kind, int) for kind in types):
            raise self.error(f"tokenizer.ggml.token_type should be {len(tokens)} numbers, one for each token")
        if len(set(tokens)) < len(tokens):
            raise self.error(f"token {Counter(tokens).most_common(1)[0][0]!r} is there twice")
        return tokens, types

    def merges(self) -> list[tuple[str, str]]:
        merges = []
        for merge in self.texts("merges"):
            left, _, right = merge.partition(" ")
            if not (left and right) or " " in right:
                raise self.error(f"tokenizer.ggml.merges holds {merge!r}, no pair of tokens with a space between them")
            merges.append((left, right))
        return merges

    def scores(self, count: int) -> list[float]:
        scores = self._metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, list) or [type(score) for score in scores] != [float] * count:
            raise self.error(f"tokenizer.ggml.scores should be {count} numbers, one for each token")
        return scores

    def words(self) -> _Words:
        known = WORDS.get(self.text("pre"))
        if known is None:
            raise self.refusal("pre", ", ".join(WORDS))
        return known

    def template(self) -> ChatTemplate | None:
        source = self._metadata.get("tokenizer.chat_template")
        if source is None:
            return None
        if not isinstance(source, str):
            raise self.error("tokenizer.chat_template is not text")
        try:
            return ChatTemplate(source)
        except InvalidTemplate as error:
            raise self.error(f"the chat template is not valid: {error}") from error
