"""Borrows a model's files from the node that has them: a rank fetches the bytes that it reads, and no others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from motley.daemon.lending.lender import membership
from motley.daemon.lending.mirror import FOLDER, Mirror, no_room
from motley.daemon.lending.wire import Files, Kind, LendingError, Stretch, pack, pack_stretches, read
from motley.daemon.weights.closing import Closing
from motley.protocol import mesh_pb2 as pb
from motley.transport import Connected, Lost, Message, Messenger, Tls
from motley.transport.messages import Event

CONNECT_S = 30.0
"""The lender is reached within so many seconds."""
SILENCE_S = 60.0
"""A lender that has not answered a question for so long is gone."""
AHEAD = 2
"""Questions that are under way at a time, so that the lender reads while this end writes."""
_LENDER = 0
"""Its number among those who meet."""


class Borrower(Closing):
    """The files of a model that another node lends, for as long as the context lasts.

    Attributes:
        place: where the model is opened here, with `bring` for the bytes that are missing.
        fetched: bytes that have come.
    """

    def __init__(self, loan: pb.Loan, shares: Path, limit: int) -> None:
        """
        Args:
            shares: the folder in which shares are kept; what comes is kept beside them.
            limit: bytes that mirrors may take there.

        Raises:
            LendingError: the lender cannot be reached, lends other files than were planned, or there is no room here.
        """
        self.fetched = 0
        self._from = loan.node
        security = Tls(loan.tls.certificate, loan.tls.key, loan.tls.authority)
        own = membership(loan.id, loan.member, loan.members, loan.secret)
        self._messenger = Messenger(own, security, listener=None)
        try:
            self._connect(loan.address)
            self._question([pack(Kind.LIST)])
            files = Files.read(bytes(self._answer(Kind.FILES)))
            if files.key != loan.files:
                raise LendingError(f"node {loan.node!r} lends other files than were planned")
            self._mirror = self._made(shares, files, limit)
        except BaseException:
            self._messenger.close()
            raise
        self.place = self._mirror.place
        try:
            for path, lent in self._mirror:
                self.bring(path, [(0, lent.needed)])
        except BaseException:
            self.close()
            raise

    @property
    def modified(self) -> dict[str, int]:
        """See `Mirror.modified`."""
        return self._mirror.modified

    def bring(self, file: Path, stretches: Sequence[Stretch]) -> None:
        """Have stretches of a file here, see `motley.daemon.weights.checkpoints.tensor_files.Bring`.

        Raises:
            LendingError: the lender is lost or refuses, or there is no room here.
        """
        asked = deque[list[Stretch]]()
        for missing in self._mirror.missing(file, stretches):
            self._question([pack(Kind.READ, self._mirror.number(file)), pack_stretches(missing)])
            asked.append(missing)
            if len(asked) == AHEAD:
                self._take(file, asked.popleft())
        while asked:
            self._take(file, asked.popleft())

    def _take(self, file: Path, asked: Sequence[Stretch]) -> None:
        """Put the answer to a READ in its place."""
        data, wanted = self._answer(Kind.BYTES), sum(length for _, length in asked)
        if len(data) != wanted:
            raise LendingError(f"node {self._from!r} lent {len(data)} bytes of {file.name}; {wanted} were asked for")
        try:
            self._mirror.fill(file, asked, data)
        except OSError as error:
            raise self._no_room(file, error) from error
        self.fetched += wanted

    def end(self) -> None:
        """Borrow no more; what is here can be read on."""
        self._messenger.close()

    def close(self) -> None:
        """Let the files go; what has come is kept for the next start."""
        self._mirror.close()
        self._messenger.close()

    def _made(self, shares: Path, files: Files, limit: int) -> Mirror:
        try:
            return Mirror(shares, files, limit)
        except OSError as error:
            raise self._no_room(shares / FOLDER, error) from error

    def _no_room(self, path: Path, error: OSError) -> LendingError:
        instead = "choose another folder (`motley join --cache`), or copy the model there"
        return no_room(path, error, f"what node {self._from!r} lends of the model", self.fetched, instead)

    def _connect(self, address: str) -> None:
        self._messenger.connect(_LENDER, address, CONNECT_S)
        for event in self._until(CONNECT_S + 1.0):
            if isinstance(event, Connected):
                return

    def _question(self, parts: Sequence[bytes]) -> None:
        if _LENDER not in self._messenger.connected:
            raise LendingError(f"node {self._from!r} does not lend the model any more")
        self._messenger.send(_LENDER, parts)

    def _answer(self, wanted: Kind) -> memoryview:
        """The body of the next answer."""
        for event in self._until(SILENCE_S):
            if isinstance(event, Message):
                kind, _, body = read(event.data)
                if kind is Kind.REFUSED:
                    told = bytes(body).decode(errors="replace")[:500]
                    raise LendingError(f"node {self._from!r}, which lends the model: {told}")
                if kind is not wanted:
                    raise LendingError(f"node {self._from!r} answered with {kind.name}, not {wanted.name}")
                return body
        raise AssertionError("the wait ends with an error")

    def _until(self, seconds: float) -> Iterator[Event]:
        """What happens on the link, for so long.

        Raises:
            LendingError: the link is lost, or the time is over.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for event in self._messenger.receive(left):
                if isinstance(event, Lost):
                    raise LendingError(f"node {self._from!r}, which lends the model, is lost: {event.reason}")
                yield event
        raise LendingError(f"node {self._from!r}, which lends the model, has said nothing for {seconds:.0f} s")
