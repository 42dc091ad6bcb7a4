"""Answers that can be taken up: to a request with an ``Idempotency-Key``, what has come is kept for a while.

A client whose connection died makes the same request again with the same key. It is told what had come, from the first
piece on, and the answer goes on behind that: nothing is computed twice. That outlives the orchestrator, too: every
piece goes to a file in the state folder as it comes. (It is not flushed to the disk: what a power cut takes is computed
again.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import logging
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from motley.orchestrator.serving.errors import refusal
from motley.protocol.mesh_pb2 import Delta, Generate

FOLDER = "answers"
"""In the state folder."""
KEEP_S = 600.0
"""An answer is kept for so long after it was last asked for, or written to."""
MOST = 1000
"""So many are kept; those not used for longest go first."""
MOST_BYTES = 64 << 20
"""All of them together have so many bytes, but those that are being given."""
LOOK_S = 60.0
"""Old ones are looked for so often."""
LEAVE_S = 5.0
"""Whoever took an answer before has so long to let it go."""
_ENTRY = struct.Struct("<iI")
"""Before a piece in a file: the number of the answer among those of the request (-1: as what it is asked), a length."""

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class KeptAnswer:
    """What a request with a key has been answered so far.

    Attributes:
        key: as the client has chosen it.
        digest: of the request, which has to be the same.
        id, created: what the client is told that the answer is called, and when (Unix time) it was asked for.
        generates: what leaders are asked, one for each answer; ``written`` grows.
        pieces: what is asked and what has come, as in the file: a message that is kept parsed takes fifty times as
            much memory.
        begun: whether anything has come.
        finished: the numbers of the answers that are complete.
        used: Unix time.
        user: whoever gives it to a client now.
        cut: whether the file lacks some of what has come: nothing is written behind that.
    """

    key: str
    digest: str
    id: str
    created: int
    generates: list[Generate] = field(default_factory=list)
    pieces: bytearray = field(default_factory=bytearray, repr=False)
    begun: bool = False
    finished: set[int] = field(default_factory=set)
    used: float = 0.0
    user: asyncio.Task[object] | None = None
    file: IO[bytes] | None = field(default=None, repr=False)
    cut: bool = False

    def deltas(self) -> list[tuple[int, Delta]]:
        """All that has come, each with the number of its answer."""
        return [(number, Delta.FromString(piece)) for number, piece in _entries(self.pieces) if number >= 0]

    def ask(self, generates: Sequence[Generate]) -> None:
        """Note what leaders are asked."""
        self.generates = list(generates)
        for generate in self.generates:
            self._keep(-1, generate)

    def put(self, number: int, delta: Delta) -> None:
        """Note what has come of an answer; an error is not kept: the same request tries again."""
        if delta.HasField("failure") or delta.finish not in ("", "stop", "length"):
            return
        self.used = time.time()
        self._note(number, delta)
        self._keep(number, delta)

    def take_in(self, content: bytes) -> None:
        """Read the pieces that a file has, as far as they are whole."""
        with contextlib.suppress(DecodeError, IndexError):  # the end is damaged, or of no answer
            for number, piece in _entries(content):
                if number < 0:
                    self.generates.append(Generate.FromString(piece))
                else:
                    delta = Delta.FromString(piece)
                    generate = self.generates[number]
                    generate.written.extend(delta.ids)
                    generate.echo = generate.echo and not delta.text
                    self._note(number, delta)
                self.pieces += _ENTRY.pack(number, len(piece)) + piece

    def _note(self, number: int, delta: Delta) -> None:
        self.begun = True
        if delta.finish:
            self.finished.add(number)

    def _keep(self, number: int, message: Delta | Generate) -> None:
        piece = message.SerializeToString()
        entry = _ENTRY.pack(number, len(piece)) + piece
        self.pieces += entry
        if self.file is None:
            self.cut = True
            return
        try:
            if self.file.write(entry) < len(entry):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            _log.warning("%s: the rest of this answer will not outlive the orchestrator: %s", self.file.name, error)
            self.cut = True
            self.close_file()

    def close_file(self) -> None:
        """What comes from now on is not written, until the file is opened again."""
        if self.file is not None:
            self.file.close()
            self.file = None


def _entries(content: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """The pieces of an answer, each with its number, up to one whose end is missing."""
    at = 0
    while at + _ENTRY.size <= len(content):
        number, length = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size + length
        if at > len(content):
            return
        yield number, bytes(content[at - length : at])


class KeptAnswers:
    """The answers that are kept, by key."""

    def __init__(self, state_dir: Path | None) -> None:
        """
        Args:
            state_dir: None: they do not outlive this process.
        """
        self._folder = state_dir / FOLDER if state_dir else None
        self._answers: dict[str, KeptAnswer] = {}
        for file in sorted(self._folder.glob("*.answer")) if self._folder else ():
            try:
                self._take_in(file)
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("%s: this answer cannot be taken up: %s", file, error)
                with contextlib.suppress(OSError):
                    file.unlink()
        self.forget_old()

    async def take(self, key: str, digest: str, fresh_id: str) -> KeptAnswer:
        """The answer to a request with a key, to be given by the task that asks; whoever gives it now is cancelled.

        Args:
            digest: of the request.
            fresh_id: what the answer is called if the key is new.

        Raises:
            ServingError: another request had this key.
        """
        self.forget_old()
        kept = self._answers.get(key)
        if kept is None:
            kept = self._answers[key] = KeptAnswer(key, digest, fresh_id, int(time.time()))
            self._begin_file(kept)
        if kept.digest != digest:
            message = "another request was made with this Idempotency-Key; make a new key for each"
            raise refusal("idempotency_key_reused", message)
        before, kept.user = kept.user, asyncio.current_task()
        kept.used = time.time()
        if before is not None and not before.done():
            before.cancel()
            await asyncio.wait({before}, timeout=LEAVE_S)
        self._open_file(kept)
        return kept

    def let_go(self, kept: KeptAnswer) -> None:
        """It is given no more; forgotten if nothing has come of it."""
        if kept.user is not asyncio.current_task():
            return  # another has taken it
        kept.user = None
        kept.close_file()
        if not kept.begun:
            self._forget(kept)

    async def watch(self) -> None:
        """Forget old answers, for ever: what people have asked does not stay when nobody asks any more."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.forget_old()

    def forget_old(self) -> None:
        """Forget what was not used for long, and the oldest where there are too many."""
        unused = (kept for kept in self._answers.values() if kept.user is None or kept.user.done())
        idle = sorted(unused, key=lambda kept: kept.used)
        total, count = sum(len(kept.pieces) for kept in self._answers.values()), len(self._answers)
        for kept in idle:
            if time.time() - kept.used <= KEEP_S and total <= MOST_BYTES and count < MOST:
                return
            self._forget(kept)
            total, count = total - len(kept.pieces), count - 1

    def _forget(self, kept: KeptAnswer) -> None:
        kept.close_file()
        del self._answers[kept.key]
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path(kept).unlink()

    def _path(self, kept: KeptAnswer) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(kept.key.encode()).hexdigest()}.answer"

    def _begin_file(self, kept: KeptAnswer) -> None:
        if self._folder is None:
            return
        head = {"key": kept.key, "digest": kept.digest, "id": kept.id, "created": kept.created}
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path(kept), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(json.dumps(head).encode() + b"\n")
        except OSError as error:
            _log.warning("%s: an answer will not outlive the orchestrator: %s", self._folder, error)

    def _open_file(self, kept: KeptAnswer) -> None:
        """Open the file of an answer, to go on behind what it has, unless it could not be begun or lacks something."""
        if self._folder is not None and kept.file is None and not kept.cut:
            with contextlib.suppress(OSError):
                kept.file = self._path(kept).open("r+b", buffering=0)
                kept.file.seek(0, os.SEEK_END)

    def _take_in(self, file: Path) -> None:
        """Take up an answer from its file, as far as that is whole.

        Raises:
            OSError: it cannot be read.
            ValueError, KeyError, TypeError: it has no head.
        """
        head, _, rest = file.read_bytes().partition(b"\n")
        told = json.loads(head)
        kept = KeptAnswer(str(told["key"]), str(told["digest"]), str(told["id"]), int(told["created"]))
        kept.used = file.stat().st_mtime
        kept.take_in(rest)
        if not kept.begun:
            raise ValueError("nothing has come of it")
        os.truncate(file, len(head) + 1 + len(kept.pieces))
        self._answers[kept.key] = kept
