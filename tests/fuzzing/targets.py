"""The parsers that are fuzzed: each takes any bytes, and either reads them or raises its own error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe
from motley.daemon.rank import steps
from motley.daemon.text.answer_parts import THINK, AnswerParts
from motley.daemon.text.calls.formats import FORMATS
from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.responses.template import InvalidResponseTemplate, read_response_template
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.checkpoint import GgufCheckpoint
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SINGLE, SafetensorsCheckpoint
from motley.orchestrator.api.anthropic.generates import MESSAGES
from motley.orchestrator.api.anthropic.generates import generate_of as messages_of
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.openai.generates import chat_generates, completion_generates
from motley.orchestrator.api.responses.generates import RESPONSE
from motley.orchestrator.api.responses.generates import generate_of as response_of
from motley.orchestrator.api.schema import read
from motley.transport.links.wire import Decoder, Handshake, Membership, Purpose, Refusal, WireError

TOOLS: dict[str, Any] = {"f": {"a": {"type": "string"}, "n": {"type": "integer"}}, "g": {}, "go": {}}
"""Parameters of the tools that are called, by their names."""


def frames(data: bytes) -> None:
    """What comes over a link between two ranks."""
    with suppress(WireError):
        Decoder(1 << 16).feed(data)


def handshake(data: bytes) -> None:
    """What a stranger says who wants to be a rank."""
    listener = Handshake(Membership("fuzzed", 1, 0, 2, b"s" * 32, b"a" * 32), {(1, Purpose.DATA)})
    with suppress(Refusal):
        listener.receive(data)
    assert listener.peer is None, "nobody here knows the secret"


def step_messages(data: bytes) -> None:
    """What rank 0 tells the others to do; what can be read says the same again."""
    with suppress(steps.StepError):
        message = steps.decode(data)
        assert steps.decode(message.encode()).encode() == message.encode()
    with suppress(steps.StepError):
        steps.split_losses(data, 2)


def requests(data: bytes) -> None:
    """The bodies of all APIs' requests."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return
    readers: tuple[Callable[[Any], object], ...] = (
        chat_generates,
        completion_generates,
        lambda asked: response_of(read(RESPONSE, asked)),
        lambda asked: messages_of(read(MESSAGES, asked)),
    )
    for reader in readers:
        with suppress(ApiError):
            reader(body)


def model_config(data: bytes) -> None:
    """A model's ``config.json``."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict):
        with suppress(ConfigError):
            describe(Keys(Path("config.json"), values))


def safetensors(data: bytes) -> None:
    """A file of weights, of which every tensor's first row is read."""
    folder = _folder()
    (folder / SINGLE).write_bytes(data)
    with suppress(CheckpointError), SafetensorsCheckpoint(folder) as checkpoint:
        checkpoint.fingerprint()


def gguf(data: bytes) -> None:
    """A file of weights and of what describes their model."""
    file = _folder() / "model.gguf"
    file.write_bytes(data)
    with suppress(CheckpointError), GgufCheckpoint(file) as checkpoint:
        checkpoint.fingerprint()


def answers(data: bytes) -> None:
    """What a model writes that may call tools, in the format that the first byte names, however it comes: nothing of it
    is lost or told twice."""
    form = FORMATS[data[0] % len(FORMATS)] if data else FORMATS[0]
    text = data[1:].decode("utf-8", "replace")
    whole, pieces = ([*_parts(form, cut)] for cut in ([text], list(text)))
    for kind in ("content", "reasoning"):
        assert "".join(getattr(part, kind) for part in whole) == "".join(getattr(part, kind) for part in pieces)
    arguments, same = ("".join(part.call.arguments for part in parts if part.call) for parts in (whole, pieces))
    assert arguments == same


def response_template(data: bytes) -> None:
    """What a model's files say of how its answers are taken apart; the bytes are an answer, too."""
    try:
        written = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        template = read_response_template(written)
    except InvalidResponseTemplate:
        return
    parts = ResponseParts(template)
    for _ in (*parts.push(data.decode("utf-8", "replace")), *parts.flush()):
        pass


def _parts(form: Any, pieces: Sequence[str]) -> Any:
    parts = AnswerParts(form, THINK, False, TOOLS)
    for piece in pieces:
        yield from parts.push(piece)
    yield from parts.flush()


@cache
def _folder() -> Path:
    kept = TemporaryDirectory(prefix="motley-fuzzing-")
    _KEPT.append(kept)
    return Path(kept.name)


_KEPT: list[TemporaryDirectory[str]] = []
"""Removed when the process ends."""
TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        frames,
        handshake,
        step_messages,
        requests,
        model_config,
        safetensors,
        gguf,
        answers,
        response_template,
    )
}
