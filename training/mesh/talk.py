"""What the owner's worker and one that trains say to each other: a JSON object, and bytes behind it.

Long things are asked for in stretches: whoever wants one asks for the next when the last one has come, so that no more
than one is under way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from motley.training.errors import TrainingError
from motley.training.examples import I64, Example
from motley.training.training import MOST_LOSS
from motley.transport import Messenger
from motley.transport.links.security import Stream

STRETCH = 4 << 20
_LENGTH = 8
MOST_BYTES = 2 << 30
"""No adapter is larger."""
_REPORT_BYTES = 1 << 16


class NonsenseError(TrainingError):
    """Another worker has sent what it must not."""


def say(messenger: Messenger, peer: int, told: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Send a peer a message; nothing, if it is gone."""
    if peer in messenger.connected:
        head = json.dumps(told).encode()
        messenger.send(peer, [len(head).to_bytes(_LENGTH, "little"), head, body])


def heard(message: memoryview) -> tuple[dict[str, Any], bytes]:
    """A message of a peer, as `say` has sent it.

    Raises:
        NonsenseError: it is none.
    """
    length = int.from_bytes(message[:_LENGTH], "little")
    try:
        told = json.loads(bytes(message[_LENGTH : _LENGTH + length]))
    except (ValueError, RecursionError) as error:
        raise NonsenseError(f"another worker has sent what is no message: {error}") from error
    if not isinstance(told, dict) or "do" not in told:
        raise NonsenseError("another worker has sent what is no message")
    return told, bytes(message[_LENGTH + length :])


def size_of(told: Any) -> int:
    """A number of bytes that a peer has told.

    Raises:
        NonsenseError: it is none, or too large.
    """
    if type(told) is not int or not 0 <= told <= MOST_BYTES:
        raise NonsenseError(f"a size of {told!r:.40} bytes; at most {MOST_BYTES} are taken")
    return told


def losses_of(told: Any) -> list[float]:
    """Losses that a peer has told.

    Raises:
        NonsenseError: they are none, or not finite.
    """
    if not isinstance(told, list) or not all(type(each) in (int, float) and abs(each) < MOST_LOSS for each in told):
        raise NonsenseError(f"losses {told!r:.80} that are no numbers, or too large")
    return [float(each) for each in told]


def report_of(told: dict[str, Any]) -> dict[str, Any]:
    """What a peer reports of its training, in its message.

    Raises:
        NonsenseError: it is no object of JSON, is long, or has no losses before and after.
    """
    report = told.get("report")
    try:
        length = len(json.dumps(report, allow_nan=False))
    except ValueError as error:
        raise NonsenseError(f"a report that cannot be written: {error}") from error
    if not isinstance(report, dict) or length > _REPORT_BYTES or len(losses_of(report.get("held_out"))) not in (0, 2):
        raise NonsenseError("a report that is none")
    return report


def pack_examples(examples: Sequence[Example]) -> bytes:
    """Examples as bytes: how many, the length of each, all tokens, all labels."""
    lengths = np.array([len(examples), *(len(each.tokens) for each in examples)], np.int64)
    parts = [lengths, *(each.tokens for each in examples), *(each.labels for each in examples)]
    return b"".join(part.tobytes() for part in parts)


def unpack_examples(data: bytes) -> list[Example]:
    """What `pack_examples` has written.

    Raises:
        NonsenseError: it is something else.
    """
    try:
        values: I64 = np.frombuffer(data, np.int64)
        count = int(values[0])
        lengths = values[1 : 1 + count]
        total = int(lengths.sum())
        if len(lengths) != count or (lengths < 0).any() or len(values) != 1 + count + 2 * total:
            raise ValueError("lengths that do not fit")
    except (ValueError, IndexError) as error:
        raise NonsenseError(f"what has come are no examples: {error}") from error
    cuts = np.cumsum(lengths)[:-1]
    tokens, labels = (np.split(values[at : at + total].copy(), cuts) for at in (1 + count, 1 + count + total))
    return [Example(*pair) for pair in zip(tokens, labels, strict=True)] if count else []


def pack_files(files: Sequence[Path]) -> bytes:
    """Files as bytes: their names and sizes, and what is in them.

    Raises:
        OSError: one cannot be read.
    """
    contents = [file.read_bytes() for file in files]
    head = json.dumps([[file.name, len(each)] for file, each in zip(files, contents, strict=True)]).encode()
    return b"".join([len(head).to_bytes(_LENGTH, "little"), head, *contents])


def unpack_files(data: bytes, names: Sequence[str]) -> dict[str, bytes]:
    """What `pack_files` has written.

    Args:
        names: those that may be among them.

    Raises:
        NonsenseError: it is something else.
    """
    try:
        length = int.from_bytes(data[:_LENGTH], "little")
        found, at = {}, _LENGTH + length
        for name, size in json.loads(data[_LENGTH:at]):
            if name not in names or size < 0 or at + size > len(data):
                raise ValueError(f"a file {name!r} of {size} bytes")
            found[name] = data[at : at + size]
            at += size
    except (ValueError, TypeError, RecursionError) as error:
        raise NonsenseError(f"what has come are no files: {error}") from error
    return found


class Counted:
    """A stream that counts what goes through it.

    Attributes:
        total: bytes that all such streams of a worker have sent and received, in a list of one.
    """

    def __init__(self, stream: Stream, total: list[int]) -> None:
        self._stream, self.total = stream, total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def send(self, data: memoryview, /) -> int:
        sent = self._stream.send(data)
        self.total[0] += sent
        return sent

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = self._stream.recv(size, flags)
        self.total[0] += len(data)
        return data

    def recv_into(self, buffer: memoryview, size: int = 0, /) -> int:
        came = self._stream.recv_into(buffer, size)
        self.total[0] += came
        return came

    def fileno(self) -> int:
        return self._stream.fileno()

    def shutdown(self, how: int, /) -> None:
        self._stream.shutdown(how)

    def close(self) -> None:
        self._stream.close()
