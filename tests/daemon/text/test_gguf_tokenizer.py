"""Tokenizers from GGUF metadata against the ``tokenizer.json`` they were made from, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, trainers

from motley.daemon.models.files import load_tokenizer
from motley.daemon.text.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WORDS,
    gguf_tokenizer,
)
from motley.daemon.text.messages import ChatError
from motley.daemon.text.tokenizer import Tokenizer, TokenizerError
from tests.models.to_gguf import to_gguf

SHAKESPEARE = Path(__file__).parents[3] / "cli/models/shakespeare-2.6m"
FILE = Path("m.gguf")
TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "\n\n  \tindented\r\n",
    "ROMEO: But, soft! what light through yonder window breaks?",
    "Don't I've we'll THEY'RE it's",
    "12345 and 3.14159, 1,000,000",
    "größer é naïve ﬁne Å \u0041\u030a",
    "漢字かな交じり文 한국어 ไทย",
    "emoji 👩‍👩‍👧 🏳️‍🌈",
    "<|begin|>text<|end|>",
    "\u2581▁ \u00a0\u2003",
    "def f(x):\n    return x**2  # ok\n",
)
ANY_TEXT = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.sampled_from(TEXTS))


# ---------------------------------------------------------------- byte level


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    file = to_gguf(SHAKESPEARE, tmp_path_factory.mktemp("gguf") / "m.gguf")
    return load_tokenizer(file), load_tokenizer(SHAKESPEARE)


@given(text=ANY_TEXT)
def test_the_bundled_models_tokenizer(text: str, bundled: tuple[Tokenizer, Tokenizer]) -> None:
    ours, original = bundled
    ids = original.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == original.decode(ids)
    assert [ours.token_text(token) for token in ids[:8]] == [original.token_text(token) for token in ids[:8]]


def test_the_bundled_models_special_tokens(bundled: tuple[Tokenizer, Tokenizer]) -> None:
    ours, original = bundled
    assert ours.stop_tokens == original.stop_tokens == {1}
    assert ours.special_tokens == original.special_tokens == {0, 1}
    assert ours.vocabulary == original.vocabulary == 1024
    assert ours.encode("<|begin|>") == [0]


def metadata(model: str, tokens: list[str], types: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Metadata of a tokenizer; `more` are keys of ``tokenizer.ggml``, None takes one away."""
    keys = {"model": model, "tokens": tokens, "token_type": types, **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def byte_alphabet() -> list[str]:
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


def trained(pre: tokenizers.pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    """A byte-level tokenizer with merges that reach as far as words are let to."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=byte_alphabet(), show_progress=False, special_tokens=["<|im_end|>"]
    )
    backend.train_from_iterator([*TEXTS, *("12345 123 " * 9, "Don't they'RE  \n\n  x " * 9)] * 3, trainer)
    backend.decoder = decoders.ByteLevel()
    return backend


def words_of(name: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    """The pre-tokenizers of the models' own ``tokenizer.json`` files."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    patterns = {
        "llama-bpe": contractions + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + rest,
        "qwen2": contractions + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + rest,
    }
    steps: list[dict[str, Any]] = {
        "gpt-2": [{**byte_level, "use_regex": True}],
        "olmo": [{**byte_level, "use_regex": True}],
        "smollm": [{"type": "Digits", "individual_digits": True}, {**byte_level, "use_regex": True}],
    }.get(name) or [
        {"type": "Split", "pattern": {"Regex": patterns[name]}, "behavior": "Isolated", "invert": False},
        {**byte_level, "use_regex": False},
    ]
    empty = json.loads(tokenizers.Tokenizer(models.BPE()).to_str())
    empty["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    return tokenizers.Tokenizer.from_str(json.dumps(empty)).pre_tokenizer


def from_backend(backend: tokenizers.Tokenizer, pre: str, **more: Any) -> Tokenizer:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    types = [CONTROL if token == "<|im_end|>" else NORMAL for token in tokens]
    merges = [" ".join(pair) for pair in model["merges"]]
    return gguf_tokenizer(metadata("gpt2", tokens, types, pre=pre, merges=merges, **more), FILE)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "olmo"])
def test_words_are_cut_as_the_models_do(pre: str) -> None:
    backend = trained(words_of(pre))
    ours = from_backend(backend, pre)
    if pre in ("qwen2", "olmo"):
        backend.normalizer = normalizers.NFC()
    for text in TEXTS:
        assert ours.encode(text) == backend.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == backend.decode(backend.encode(text).ids)


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("qwen35", "it's 42: cafe\u0301s", ["it", "'s", " ", "4", "2", ":", " caf\u00e9s"]),
        ("qwen35", "\u0928\u0940", ["\u0928\u0940"]),  # a letter and its mark
        ("gpt-4o", "HTTPServer's 1234 a/b//\n", ["HTTPServer's", " ", "123", "4", " a", "/b", "//\n"]),
        ("minimax-m2", "camelCase", ["camel", "Case"]),
        ("deepseek-v3", "x=3141 \u6771\u4eac\u3068NY\n", ["x", "=", "314", "1", " ", "\u6771\u4eac\u3068", "NY", "\n"]),
        ("llama4", "HTTPServer's 1234", ["HTTPServer's", " ", "123", "4"]),
        ("hunyuan-dense", "3141 NY", ["314", "1", " NY"]),
        ("hunyuan", "it's 42", ["it", "'s", " ", "4", "2"]),
        ("dbrx", "I'll 12345", ["I", "'ll", " ", "123", "45"]),
        ("lfm2", "I'll 12345", ["I", "'ll", " ", "123", "45"]),
        ("refact", "a 42", ["a", " ", "4", "2"]),
        ("exaone4", "a 42's", ["a", " 42", "'s"]),
        ("exaone-moe", "a bc, it's 42\n\n", ["a bc", ",", " it", "'s", " ", "4", "2", "\n\n"]),
        ("glm4", "I'll 12345\r\n", ["I", "'ll", " ", "123", "45", "\r\n"]),
        ("command-r", "cafe\u0301 42", ["caf\u00e9", " ", "4", "2"]),
        ("starcoder", "x = 42", ["x", " =", " ", "4", "2"]),
        ("falcon-h1", "I'll 12345", ["I", "'ll", " ", "123", "45"]),
        ("jais-2", "a    b", ["a", "  ", " ", " b"]),
        ("bailingmoe2", "it's 42\n\n", ["it", "'s", " ", "4", "2", "\n\n"]),
        ("seed-coder", "x;\n\ny", ["x", ";", "\n\n", "y"]),
        ("stablelm2", "x;\n\ny", ["x", ";\n\n", "y"]),
        ("laguna", "x;\n\ny", ["x", ";", "\n\n", "y"]),
        ("kimi-k2", "\u6771\u4eacNew 1234", ["\u6771\u4eac", "New", " ", "123", "4"]),
        ("deepseek-llm", "Ab 42,\u6771\u4eac\n\n", ["Ab", " ", "4", "2", ",", "\u6771\u4eac", "\n", "\n"]),
        ("deepseek-coder", "Ab 42, c", ["Ab", " ", "4", "2", ",", " c"]),
        ("tiny_aya", "1234567 it's", ["1", "234", "567", " it's"]),
    ],
)
def test_words_of_newer_models(pre: str, text: str, words: list[str]) -> None:
    """Every word is a token here, and no longer stretch of the text: tokens are the words."""
    spelled = [_spelled(word) for word in words]
    tokens = list(dict.fromkeys([*byte_alphabet(), *_prefixes(spelled), *_prefixes([_spelled(text)])]))
    merges = [f"{token[:-1]} {token[-1]}" for token in tokens if len(token) > 1]
    ours = gguf_tokenizer(metadata("gpt2", tokens, [NORMAL] * len(tokens), pre=pre, merges=merges), FILE)
    assert [tokens[token] for token in ours.encode(text)] == spelled


def _spelled(text: str) -> str:
    """A text as byte-level tokens spell it."""
    words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(word for word, _ in words)


def _prefixes(texts: list[str]) -> list[str]:
    return [text[:end] for text in texts for end in range(2, len(text) + 1)]


def test_every_rule_for_words_loses_nothing() -> None:
    backend = trained(words_of("gpt-2"))
    for pre in WORDS:
        ours = from_backend(backend, pre, bos_token_id=5)
        for text in TEXTS:
            ids = ours.encode(text)
            assert (ids[:1] == [5]) == WORDS[pre].begin
            if not WORDS[pre].compose:
                assert ours.decode(ids[WORDS[pre].begin :]) == text


def test_a_word_that_is_a_token_stays_whole_where_that_is_the_rule() -> None:
    """No merges lead to "abc" here."""
    keys = metadata("gpt2", [*byte_alphabet(), "abc"], merges=["a b"], pre="llama-bpe")
    keys["tokenizer.ggml.tokens"] += ["ab"]
    assert gguf_tokenizer(keys, FILE).encode("abc") == [256]
    assert len(gguf_tokenizer({**keys, "tokenizer.ggml.pre": "gpt-2"}, FILE).encode("abc")) == 2


# ---------------------------------------------------------------- SentencePiece

PIECES = [
    "▁",
    "t",
    "h",
    "e",
    "a",
    "s",
    "o",
    "▁t",
    "he",
    "▁the",
    "▁a",
    "as",
    "▁th",
    "ha",
    "tha",
    "that",
    "at",
    "▁that",
    "é",
]


def sentence_piece(**more: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<think>", *PIECES, "[PAD]"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(PIECES), UNUSED]
    scores = [0.0] * 260 + [-float(index) for index in range(len(PIECES))] + [-1000.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return metadata("llama", tokens, types, **{"scores": scores, **ids, **more})


def by_scores(text: str) -> list[str]:
    """SentencePiece's rule, spelled out: merge the two neighbours that make the best token, the first of equals."""
    pieces = list(text)
    while True:
        pairs = [left + right for left, right in pairwise(pieces)]
        best = min((PIECES.index(pair) for pair in pairs if pair in PIECES), default=None)
        if best is None:
            return pieces
        at = pairs.index(PIECES[best])
        pieces[at : at + 2] = [PIECES[best]]


def ids_of(pieces: list[str]) -> list[int]:
    return [
        token
        for piece in pieces
        for token in ([260 + PIECES.index(piece)] if piece in PIECES else [3 + byte for byte in piece.encode()])
    ]


@given(text=st.text(st.sampled_from("thea so\n漢é"), max_size=40))
def test_sentence_piece(text: str) -> None:
    ours = gguf_tokenizer(sentence_piece(), FILE)
    expected = ids_of(by_scores("▁" + text.replace(" ", "▁"))) if text else []
    assert ours.encode(text) == [1, *expected]
    assert ours.decode(expected) == text


def test_sentence_piece_after_special_tokens_and_without_a_space_before() -> None:
    ours = gguf_tokenizer(sentence_piece(), FILE)
    assert ours.encode("the<think>the") == [1, *ids_of(["▁the"]), 259, *ids_of(["▁the"])]
    assert ours.decode([1, *ids_of(["▁the"]), 259]) == "the<think>"
    assert ours.special_tokens == {0, 1, 2}
    assert ours.stop_tokens == {2}
    assert ours.vocabulary == 260 + len(PIECES)  # nobody says [PAD]
    bare = gguf_tokenizer(sentence_piece(add_space_prefix=False, add_bos_token=False), FILE)
    assert bare.encode("the that") == ids_of(["t", "he", "▁that"])
    assert bare.decode(bare.encode(" the")) == " the"


def test_gemma_4s_kind_of_sentence_piece_has_no_space_before() -> None:
    gemma = gguf_tokenizer(sentence_piece() | {"tokenizer.ggml.model": "gemma4"}, FILE)
    llama = gguf_tokenizer(sentence_piece(add_space_prefix=False), FILE)
    for text in ("the that", " the", "the\n\nthat é"):
        assert gemma.encode(text) == llama.encode(text)


def test_sentence_piece_is_llama_2s_tokenizer_json() -> None:
    """The same vocabulary in the form of Hugging Face, with the merges in their order there."""
    keys = sentence_piece()
    vocabulary = {token: index for index, token in enumerate(keys["tokenizer.ggml.tokens"])}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in PIECES
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ours = gguf_tokenizer(keys, FILE)
    with_merges = sentence_piece(scores=[0.0] * len(vocabulary), merges=[" ".join(pair) for pair in merges])
    for text in (*TEXTS, "that the hat as a sea eats", "   the"):
        assert ours.encode(text) == [1, *backend.encode(text).ids], text
        assert gguf_tokenizer(with_merges, FILE).encode(text) == ours.encode(text)
    with pytest.raises(TokenizerError, match=f"scores should be {len(vocabulary)} numbers, one for each token"):
        gguf_tokenizer(sentence_piece(scores=None), FILE)


# ---------------------------------------------------------------- chats and ends


def test_chat_templates_and_ends() -> None:
    tokens = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot|>", *byte_alphabet()]
    keys = metadata(
        "gpt2",
        tokens,
        [CONTROL] * 4 + [NORMAL] * 256,
        pre="qwen2",
        merges=[],
        eos_token_id=1,
        eot_token_id=3,
        bos_token_id=2,
    )
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}{{ eos_token }}{% endfor %}"
    ours = gguf_tokenizer({**keys, "tokenizer.chat_template": template}, FILE)
    ids = ours.encode_chat([{"role": "user", "content": "a"}])
    assert ids == [2, 0, tokens.index("a"), 1]
    assert ours.stop_tokens == {1, 2, 3}
    assert ours.encode("a") == [tokens.index("a")]
    with pytest.raises(TokenizerError, match=r"m\.gguf: the chat template is not valid"):
        gguf_tokenizer({**keys, "tokenizer.chat_template": "{% if %}"}, FILE)
    with pytest.raises(TokenizerError, match="chat_template is not text"):
        gguf_tokenizer({**keys, "tokenizer.chat_template": 7}, FILE)
    refusing = gguf_tokenizer({**keys, "tokenizer.chat_template": "{{ raise_exception('no') }}"}, FILE)
    with pytest.raises(ChatError, match="no"):
        refusing.encode_chat([{"role": "user", "content": "a"}])


GPT2: dict[str, Any] = {"model": "gpt2", "tokens": [*byte_alphabet(), "ab"], "merges": ["a b"], "pre": "gpt-2"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model = 'bert' is not supported; supported: gpt2, llama"),
        ({"model": None}, r"tokenizer\.ggml\.model is absent"),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is absent; expected a list of texts"),
        ({"tokens": [*byte_alphabet(), "a"]}, "token 'a' is there twice"),
        ({"types": [1, 2]}, r"token_type should be 257 numbers, one for each token"),
        ({"pre": "falcon"}, r"tokenizer\.ggml\.pre = 'falcon' is not supported; supported: gpt-2, exaone4"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is absent; expected gpt-2"),
        ({"pre": "default"}, r"tokenizer\.ggml\.pre = 'default' is not supported"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is absent"),
        ({"merges": ["a b c"]}, r"merges holds 'a b c', no pair"),
        ({"merges": ["a "]}, r"merges holds 'a ', no pair"),
        ({"merges": ["a c"]}, "tokens and merges that make no tokenizer"),
        ({"add_eos_token": True}, r"add_eos_token = 'True' is not supported; supported: only false"),
        ({"add_bos_token": "yes"}, r"add_bos_token = 'yes' is not supported; supported: true or false"),
        ({"eos_token_id": 257}, r"eos_token_id = '257' is not supported; supported: a token, less than 257"),
        ({"model": "llama"}, r"no token <0x00>"),
    ],
)
def test_refusals(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TokenizerError, match=f"m.gguf: .*{complaint}"):
        gguf_tokenizer(metadata(**{**GPT2, **change}), FILE)


def test_more_tokens_than_the_model_knows(tmp_path: Path) -> None:
    def add_a_token(writer: gguf.GGUFWriter) -> None:
        tokens = writer.kv_data[0].pop("tokenizer.ggml.tokens").value
        writer.kv_data[0].pop("tokenizer.ggml.token_type")
        writer.add_token_list([*tokens, "one more"])

    file = to_gguf(SHAKESPEARE, tmp_path / "m.gguf", adapt=add_a_token)
    with pytest.raises(TokenizerError, match=r"1025 tokens, but token_embd\.weight is \[1024, 192\]"):
        load_tokenizer(file)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"what?")
    with pytest.raises(TokenizerError, match=r"m\.gguf: not a GGUF file"):
        load_tokenizer(tmp_path / "m.gguf")
