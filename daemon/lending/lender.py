"""Lends a model's files: ranks on other nodes connect, each with a certificate of its own, and read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

from motley.daemon.lending.hub_mirror import HubMirror
from motley.daemon.lending.wire import Files, Kind, LendingError, LentFile, pack, read, read_stretches
from motley.daemon.weights.checkpoints.gguf.header import read_header
from motley.daemon.weights.hub import files_of
from motley.transport import Connected, Lost, Membership, Message, Messenger

IDLE_S = 120.0
"""Nobody borrows any more when nobody has been connected for so long."""
LOOK_S = 1.0


class Lender:
    """A model's files, open for reading."""

    def __init__(self, place: Path, pulled: HubMirror | None = None) -> None:
        """
        Args:
            place: of a model that is here, see `motley.daemon.weights.hub.resolve`.
            pulled: what brings bytes of it here, where not all of them are; stays the caller's.

        Raises:
            CheckpointError: a GGUF file is broken.
            OSError: a file cannot be read.
        """
        self._paths = paths = files_of(place)
        self._pulled = pulled
        times = pulled.modified if pulled else {}  # its files look newer while something is put into them
        self.files = Files(place.name if place.is_file() else "", tuple(_lent(path, times) for path in paths))
        with contextlib.ExitStack() as stack:
            self._open = [stack.enter_context(FileIO(path)) for path in paths]
            self._closing = stack.pop_all()

    def answer(self, message: memoryview) -> Sequence[bytes | bytearray]:
        """What a borrower is told: the parts of a message."""
        try:
            kind, number, body = read(message)
            if kind is Kind.LIST:
                return [pack(Kind.FILES), self.files.pack()]
            if kind is not Kind.READ or number >= len(self._open):
                raise LendingError(f"a {kind.name} of file {number} was asked for")
            lent, file = self.files.files[number], self._open[number]
            stretches = read_stretches(body, lent.size)
            if self._pulled is not None:
                self._pulled.bring(self._paths[number], stretches)
            parts = [_read(file, *stretch) for stretch in stretches]
            return [pack(Kind.BYTES), b"".join(parts)]  # one: a system call for each page would cost more
        except (LendingError, OSError) as error:
            return [pack(Kind.REFUSED), str(error).encode()]

    def close(self) -> None:
        """Close the files."""
        self._closing.close()


def _lent(path: Path, times: Mapping[str, int]) -> LentFile:
    """A file, with the time that it has among `times`, if it is there."""
    told = path.stat()
    if path.suffix == ".gguf":
        needed = min(told.st_size, read_header(path).data)
    else:
        needed = 0 if path.suffix == ".safetensors" else told.st_size
    return LentFile(path.name, told.st_size, times.get(path.name, told.st_mtime_ns), needed)


def _read(file: FileIO, offset: int, length: int) -> bytearray:
    """
    Raises:
        LendingError: the file has become shorter.
    """
    file.seek(offset)
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = file.readinto(view[done:])
        if not count:
            raise LendingError(f"{file.name!r} has become shorter since it was opened")
        done += count
    return data


def serve(lender: Lender, messenger: Messenger) -> None:
    """Answer borrowers until nobody has been connected for `IDLE_S`."""
    idle_since = time.monotonic()
    while messenger.connected or time.monotonic() - idle_since < IDLE_S:
        for event in messenger.receive(LOOK_S):
            match event:
                case Message(peer, data):
                    messenger.send(peer, lender.answer(data))
                case Connected() | Lost():
                    idle_since = time.monotonic()


def membership(loan: str, member: int, members: int, secret: bytes) -> Membership:
    """What lender and borrowers prove to each other.

    Args:
        loan: its id.
        member: who proves it; the lender is member 0.
    """
    return Membership(session=loan, epoch=0, rank=member, size=members, agreement=bytes(32), secret=secret)
