"""Tokenizer folders, chat templates, streaming decoders and stop strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from motley.daemon.text.tokenizer import REPLACEMENT, ChatError, StopChecker, Tokenizer, TokenizerError

SHAKESPEARE = Path(__file__).parents[3] / "cli/models/shakespeare-2.6m"
WriteFolder = Callable[..., Path]

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


@pytest.fixture
def folder(tmp_path: Path) -> WriteFolder:
    def write(backend: tokenizers.Tokenizer, template: str | None = None, **files: Any) -> Path:
        backend.save(str(tmp_path / "tokenizer.json"))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
        for name, value in {"tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"}, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
        return tmp_path

    return write


# ---------------------------------------------------------------- folders


def test_shakespeare_round_trip() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE)
    text = "ROMEO:\nBut, soft! what light through yonder window breaks? é 🙂"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocabulary for token in ids)
    assert tokenizer.vocabulary == 1024
    assert tokenizer.stop_tokens == {1}
    assert tokenizer.encode_chat([{"role": "user", "content": text}]) == ids
    assert stream(tokenizer, [], ids) == text


def test_a_base_model_continues_all_contents() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE)
    chat = [{"role": "system", "content": "A play."}, {"role": "user", "content": "JULIET:"}]
    assert tokenizer.decode(tokenizer.encode_chat(chat)) == "A play.\nJULIET:"


def test_a_text_begins_as_the_settings_say(folder: WriteFolder) -> None:
    backend = bytes_tokenizer()
    assert Tokenizer.load(folder(backend)).encode("")[:1] == []
    config: dict[str, Any] = {"bos_token": {"content": "<s>", "lstrip": False}}
    assert Tokenizer.load(folder(backend, tokenizer_config={**config, "add_bos_token": True})).encode("") == [BOS]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    assert Tokenizer.load(folder(backend, tokenizer_config=config)).encode("") == [BOS]
    assert Tokenizer.load(folder(backend, tokenizer_config={**config, "add_bos_token": True})).encode("") == [BOS]
    assert Tokenizer.load(folder(backend, tokenizer_config={**config, "add_bos_token": False})).encode("") == []


def test_a_chat_begins_once(folder: WriteFolder) -> None:
    backend = bytes_tokenizer()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer = Tokenizer.load(folder(backend, "{{ bos_token }}{{ messages[0].content }}"))
    assert tokenizer.encode_chat([{"role": "user", "content": "x"}]) == [BOS, FIRST_BYTE + ord("x")]


def test_truncation_and_padding_stored_with_a_tokenizer_are_off(folder: WriteFolder) -> None:
    backend = bytes_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=8, pad_id=2, pad_token="<sep>")
    assert len(Tokenizer.load(folder(backend)).encode("abcde")) == 5


def test_stop_tokens_come_from_every_file(folder: WriteFolder) -> None:
    path = folder(bytes_tokenizer(), generation_config={"eos_token_id": [2, 7]}, config={"eos_token_id": 9})
    assert Tokenizer.load(path).stop_tokens == {EOS, 2, 7, 9}


def test_the_vocabulary_is_no_larger_than_the_model(folder: WriteFolder) -> None:
    assert Tokenizer.load(folder(bytes_tokenizer(), config={"vocab_size": 200})).vocabulary == 200
    assert Tokenizer.load(folder(bytes_tokenizer(), config={"vocab_size": 300})).vocabulary == 259


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"model": {}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"bos_token": 3}'),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "tool_use", "template": ""}]}'),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
        ("chat_template.jinja", "{% for %}"),
        ("config.json", "\x00"),
        ("generation_config.json", '{"eos_token_id": "</s>"}'),
    ],
)
def test_a_broken_file_is_named(folder: WriteFolder, name: str, content: str) -> None:
    path = folder(bytes_tokenizer())
    (path / name).write_text(content, encoding="utf-8")
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        Tokenizer.load(path)


def test_token_texts_keep_their_space_and_name_special_tokens(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(sentencepiece_tokenizer()))
    assert [tokenizer.token_text(token) for token in (2, 4, 6)] == ["</s>", " Hello", "ly"]


# ---------------------------------------------------------------- chat templates

LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}"""

QWEN = """{%- if tools %}{{ raise_exception('no tools here') }}{% endif %}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=none) %}
{%- for message in messages %}
    {%- set state.last = message.role %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt and state.last == 'user' %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

ASK = [{"role": "user", "content": " Why? "}]
TALK = [*ASK, {"role": "assistant", "content": "So."}, {"role": "user", "content": [{"type": "text", "text": "Oh"}]}]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (LLAMA_3, ASK, "<s><|start|>user<|end|>\n\nWhy?<|eot|><|start|>assistant<|end|>\n\n"),
        (
            QWEN,
            ASK,
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n Why? <|im_end|>\n<|im_start|>assistant\n",
        ),
        (MISTRAL, TALK, "<s>[INST]  Why?  [/INST]So.</s>[INST] Oh [/INST]"),
        ("{{ messages | tojson }}{{ strftime_now('%%') }}", ASK, '[{"role": "user", "content": " Why? "}]%'),
        ("{% for m in messages %}{% continue %}{% endfor %}{{ tools is none }}", ASK, "True"),
    ],
)
def test_templates_render_as_in_hugging_face(
    folder: WriteFolder, template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    ids = Tokenizer.load(folder(bytes_tokenizer(), template)).encode_chat(messages)
    special = {BOS: "<s>", EOS: "</s>"}
    text = b"".join(special[t].encode() if t in special else bytes([t - FIRST_BYTE]) for t in ids).decode()
    assert text == expected


def test_a_template_may_stand_in_the_settings_plain_or_named(folder: WriteFolder) -> None:
    for value in ("A", [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]):
        tokenizer = Tokenizer.load(folder(bytes_tokenizer(), tokenizer_config={"chat_template": value}))
        assert tokenizer.decode(tokenizer.encode_chat(ASK)) == "A"
    path = folder(bytes_tokenizer(), "C", tokenizer_config={"chat_template": "A"})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode_chat(ASK)) == "C"


def test_what_a_template_refuses_is_told(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), MISTRAL))
    with pytest.raises(ChatError, match="Roles must alternate"):
        tokenizer.encode_chat([*ASK, *ASK])


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ missing.field }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"],
)
def test_a_template_that_fails_or_breaks_out_is_an_error(folder: WriteFolder, template: str) -> None:
    with pytest.raises(ChatError, match="chat template"):
        Tokenizer.load(folder(bytes_tokenizer(), template)).encode_chat(ASK)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "non-empty list"),
        ({"role": "user"}, "non-empty list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([*ASK, {"role": "user"}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text only"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "not supported: tool_calls"),
        ([{"role": "user", "content": "a\ud800"}], "surrogate"),
    ],
)
def test_malformed_messages_are_refused(messages: object, what: str) -> None:
    with pytest.raises(ChatError, match=what):
        Tokenizer.load(SHAKESPEARE).encode_chat(messages)


def test_empty_extra_fields_are_ignored(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), "{{ messages | tojson }}"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "x", "refusal": None, "tool_calls": []}])
    assert json.loads(tokenizer.decode(ids)) == [{"role": "user", "content": "x"}]


# ---------------------------------------------------------------- streaming


def stream(tokenizer: Tokenizer, context: Sequence[int], ids: Sequence[int]) -> str:
    decoder = tokenizer.decoder(context)
    return "".join([decoder.push(token) for token in ids]) + decoder.flush()


def bytes_ids(data: bytes) -> list[int]:
    return [FIRST_BYTE + byte for byte in data]


BYTES = Tokenizer(bytes_tokenizer(), vocabulary=259)
PIECES = Tokenizer(sentencepiece_tokenizer(), vocabulary=264)


def test_a_character_comes_with_its_last_byte() -> None:
    decoder = BYTES.decoder()
    deltas = [decoder.push(token) for token in bytes_ids("a👩‍🚀é".encode())]
    assert deltas == ["a", "", "", "", "👩", "", "", "\u200d", "", "", "", "🚀", "", "é"]
    assert decoder.flush() == ""


@given(st.text(max_size=30), st.text(max_size=30))
def test_streamed_text_is_the_text(before: str, text: str) -> None:
    decoder = BYTES.decoder(bytes_ids(before.encode()))
    deltas = [decoder.push(token) for token in bytes_ids(text.encode())]
    assert "".join(deltas) + decoder.flush() == text
    assert REPLACEMENT in text or not any(REPLACEMENT in delta for delta in deltas)


@given(st.binary(max_size=31))
def test_bytes_that_are_no_text_decode_as_all_at_once(data: bytes) -> None:
    assert stream(BYTES, [], bytes_ids(data)) == BYTES.decode(bytes_ids(data))


def test_an_incomplete_end_is_flushed() -> None:
    decoder = BYTES.decoder()
    assert [decoder.push(token) for token in bytes_ids("ab🚀".encode()[:-1])] == ["a", "b", "", "", ""]
    assert decoder.flush() == REPLACEMENT
    assert decoder.flush() == ""


def test_bytes_that_never_end_are_given_up() -> None:
    decoder = BYTES.decoder()
    sent = [decoder.push(token) for token in bytes_ids(b"\x80" * 200)]
    assert sum(map(len, sent)) >= 160
    assert len(decoder._window) <= 64


def test_special_tokens_have_no_text_and_do_not_break_a_character() -> None:
    first, *rest = bytes_ids("é!".encode())
    assert stream(BYTES, [BOS], [first, 2, *rest, EOS]) == "é!"


@given(
    st.lists(st.sampled_from([1, 3, 4, 5, 6, 7]), max_size=6),
    st.lists(
        st.one_of(st.sampled_from([[2], [3], [4], [5], [6], [7]]), st.just([8 + b for b in "é🚀".encode()])),
        max_size=12,
    ),
)
def test_spaces_of_sentencepiece_survive(context: list[int], pieces: list[list[int]]) -> None:
    """The streamed pieces are what decoding everything at once adds to the context's text."""
    ids = [token for piece in pieces for token in piece]
    assert stream(PIECES, context, ids) == PIECES.decode([*context, *ids])[len(PIECES.decode(context)) :]


def test_a_context_that_begins_within_a_character_is_extended() -> None:
    rocket = [8 + byte for byte in "🚀".encode()]
    assert stream(PIECES, [4, *rocket, *rocket], rocket) == "🚀"


def test_a_window_stays_short() -> None:
    decoder = Tokenizer.load(SHAKESPEARE).decoder(range(2, 500))
    for token in range(2, 1000):
        decoder.push(token)
        assert len(decoder._window) <= 64


# ---------------------------------------------------------------- stop strings


def checked(stops: Sequence[str], chunks: Sequence[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    shown = ""
    for chunk in chunks:
        shown += checker.push(chunk)
    return shown + checker.flush(), checker.stopped


ALPHABET = st.sampled_from("ab\n")


@given(st.lists(st.text(ALPHABET, max_size=4), max_size=12), st.text(ALPHABET, min_size=1, max_size=4))
def test_text_ends_before_the_stop_string(chunks: list[str], stop: str) -> None:
    text = "".join(chunks)
    assert checked([stop], chunks) == (text.split(stop)[0], stop in text)


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
)
def test_the_cut_of_the_text_does_not_matter(chunks: list[str], stops: list[str]) -> None:
    text = "".join(chunks)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected = text[: ends[0] - longest]
    assert checked(stops, chunks) == (expected, bool(ends))


@given(st.lists(st.text(ALPHABET, max_size=4), max_size=12), st.text(ALPHABET, min_size=1, max_size=4))
def test_only_what_may_be_a_stop_string_is_held_back(chunks: list[str], stop: str) -> None:
    checker = StopChecker([stop])
    seen = shown = ""
    for chunk in chunks:
        seen += chunk
        shown += checker.push(chunk)
        if checker.stopped:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or (stop.startswith(held) and held != stop)


def test_nothing_comes_after_a_stop() -> None:
    checker = StopChecker(["END"])
    assert [checker.push(text) for text in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert checker.stopped
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["x", ""])
