"""Tokenizers read from folders."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from motley.daemon.text.messages import ChatError
from motley.daemon.text.tokenizer import Tokenizer, TokenizerError
from tests.daemon.text.made_tokenizers import (
    BOS,
    EOS,
    FIRST_BYTE,
    SHAKESPEARE,
    WriteFolder,
    bytes_tokenizer,
    sentencepiece_tokenizer,
    stream,
)
from tests.weights.pointers import LFS_POINTER


def test_shakespeare_round_trip() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE)
    text = "ROMEO:\nBut, soft! what light through yonder window breaks? é 🙂"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocabulary for token in ids)
    assert tokenizer.vocabulary == 1024
    assert tokenizer.stop_tokens == {1}
    assert stream(tokenizer, [], ids) == text


def test_a_base_model_knows_no_roles_and_says_what_to_do() -> None:
    tokenizer = Tokenizer.load(SHAKESPEARE)
    assert tokenizer.template is None
    with pytest.raises(ChatError, match=r"no chat template.* POST /v1/completions or `motley run --raw`") as refusal:
        tokenizer.encode_chat([{"role": "system", "content": "A play."}, {"role": "user", "content": "JULIET:"}])
    assert refusal.value.code == "no_chat_template"


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


def test_a_model_may_know_more_tokens_than_its_tokenizer(folder: WriteFolder) -> None:
    """Vocabularies are padded."""
    assert Tokenizer.load(folder(bytes_tokenizer(), config={"vocab_size": 300})).vocabulary == 259


def test_added_tokens_may_be_beyond_the_model(folder: WriteFolder) -> None:
    """As in Gemma 3's smallest, whose tokenizer knows images, which the model does not."""
    backend = bytes_tokenizer()
    backend.add_special_tokens(["<image>", "<pad>"])
    for config in ({"vocab_size": 259}, {"text_config": {"vocab_size": 259}}):
        tokenizer = Tokenizer.load(folder(backend, tokenizer_config={"pad_token": "<pad>"}, config=config))
        assert tokenizer.vocabulary == 259


def test_a_head_may_know_the_first_tokens_alone(folder: WriteFolder) -> None:
    """As Apertus 1.5's, of which the others stand for images and sounds."""
    config = {"text_config": {"vocab_size": 259, "output_vocab_size": 200}}
    assert Tokenizer.load(folder(bytes_tokenizer(), config=config)).vocabulary == 200


@pytest.mark.parametrize("config", [{"vocab_size": 200}, {"model_type": "gemma3", "text_config": {"vocab_size": 200}}])
def test_a_tokenizer_with_more_words_than_the_model_is_anothers(folder: WriteFolder, config: dict[str, Any]) -> None:
    path = folder(bytes_tokenizer(), config=config)
    told = r"tokenizer\.json is another model's: it has token 258, .*config\.json has vocab_size 200"
    with pytest.raises(TokenizerError, match=told):
        Tokenizer.load(path)


def test_a_tokenizer_whose_texts_end_beyond_the_model_is_anothers(folder: WriteFolder) -> None:
    backend = bytes_tokenizer()
    backend.add_special_tokens(["<|im_end|>"])
    path = folder(backend, tokenizer_config={"eos_token": "<|im_end|>"}, config={"vocab_size": 259})
    with pytest.raises(TokenizerError, match=r"it has token 259, '<\|im_end\|>', but .*vocab_size 259"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        (
            {"config": {"eos_token_id": 151645, "vocab_size": 151936}},
            r"151645 .*/config\.json\), .*none of its 259 tokens",
        ),
        ({"config": {"eos_token_id": 9}}, r"9 .*/config\.json\), which is '.', a word there"),
        ({"generation_config": {"eos_token_id": [300, 9]}}, r"300 .*/generation_config\.json\), .*none of its 259"),
    ],
)
def test_a_tokenizer_without_what_ends_the_models_answers_is_anothers(
    folder: WriteFolder, ends: dict[str, Any], found: str
) -> None:
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json is another model's: .* token {found}"):
        Tokenizer.load(folder(bytes_tokenizer(), **ends))


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_git_has_not_fetched_says_what_to_do(folder: WriteFolder) -> None:
    path = folder(bytes_tokenizer())
    (path / "tokenizer.json").write_bytes(LFS_POINTER)
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: a Git-LFS pointer.*run `git lfs pull` in {path}"):
        Tokenizer.load(path)


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


@pytest.mark.parametrize("make", [bytes_tokenizer, sentencepiece_tokenizer])
def test_bytes_of_tokens_are_those_of_the_text(make: Callable[[], Any], folder: WriteFolder) -> None:
    """Also of a character that is in several tokens."""
    tokenizer = Tokenizer.load(folder(make()))
    ids = [token for token in tokenizer.encode("a é日") if token not in tokenizer.special_tokens]
    assert len(ids) > 4
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().lstrip() == "a é日"
    assert tokenizer.token_bytes(next(iter(tokenizer.stop_tokens))) == b"</s>"


def test_others_may_work_while_a_long_text_is_encoded() -> None:
    """The event loop of a node, say, which shows life meanwhile."""
    tokenizer = Tokenizer.load(SHAKESPEARE)
    encoded: list[float] = []

    def encode() -> None:
        began = time.monotonic()
        tokenizer.encode("word " * 200_000)
        encoded.append(time.monotonic() - began)

    worker = threading.Thread(target=encode)
    longest, last = 0.0, time.monotonic()
    worker.start()
    while worker.is_alive():
        worker.join(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert longest < encoded[0] / 2
