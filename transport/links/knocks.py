"""Knocks: new connections to peers of which nothing is heard, for one sign of life each way.

After a cut of seconds TCP waits for seconds more before it repeats what was lost, for longer than a silent peer is
waited for. A connection that is new does not wait: it gets through within a fraction of a second. Of each pair the
higher rank knocks, as it dialled the connections that stand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import suppress

from ..errors import PeerLost
from .connecting import Arrival, Connector
from .link import Link, Waitable, close_gently
from .listening import Listener
from .wire import Decoder, Frame, Purpose, WireError

ANSWER_S = 0.25
"""A knock that the peer's system has not answered after so many seconds is lost: the next one may get through."""
KNOCK_S = 2.0
"""A knock that has brought no sign of life after so many seconds is given up."""
MAX_SIGN = 64
"""Longest sign of life, in bytes."""


class Knocks:
    """All knocks of a rank of a mesh, its own and those of its peers. One thread owns it.

    Its owner waits for `readers` and `writers`, at most until `due`, and calls `step` with those that are ready.
    """

    def __init__(self, connector: Connector, listener: Listener, addresses: Mapping[int, str], size: int) -> None:
        """
        Args:
            connector: by which the mesh was made; whatever it still has on its way is given up.
            listener: where higher ranks reach this one; it stays the caller's, who may close it.
            addresses: of the lower ranks, which this one dials.
            size: of the mesh.
        """
        self._connector = connector
        self._addresses = dict(addresses)
        self._listener = listener.duplicate()
        self._open: dict[Link, tuple[Decoder, float]] = {}
        """Knocks that have been answered, until their sign of life has come: how far it has, and when to give up."""
        above = range(len(addresses) + 1, size)
        connector.turn_to(self._listener if above else None, {(rank, Purpose.KNOCK) for rank in above})

    @property
    def readers(self) -> list[Waitable]:
        """What has something to read when `step` can go on."""
        return [*self._connector.readers, *self._open]

    @property
    def writers(self) -> list[Waitable]:
        """What has room to write when `step` can go on."""
        return self._connector.writers

    @property
    def due(self) -> float:
        """When to call `step` at the latest, by the monotonic clock."""
        return min((self._connector.due, *(expires for _, expires in self._open.values())))

    def knock(self, ranks: Collection[int]) -> None:
        """Knock at those of these ranks that are lower ones and not being knocked at, from the next `step` on."""
        knocked = {link.rank for link in self._open}
        for rank in ranks:
            if rank in self._addresses and rank not in knocked and not self._connector.is_dialling(rank):
                give_up = time.monotonic() + KNOCK_S
                self._connector.dial(rank, Purpose.KNOCK, self._addresses[rank], give_up, answer_s=ANSWER_S)

    def step(self, ready: Container[Waitable], sign: Callable[[int], bytes]) -> Iterator[tuple[int, Frame]]:
        """Go on with all that is ready or due; yields the signs of life that have come, and whose they are.

        Args:
            sign: makes this rank's own sign of life for a peer.
        """
        for link in [link for link in self._open if link in ready]:
            for frame in self._read(link):
                self._drop(link)
                yield link.rank, frame
        now = time.monotonic()
        for outcome in self._connector.step(ready):
            if isinstance(outcome, Arrival):  # a failure shows as silence
                self._open[outcome.link] = Decoder(MAX_SIGN), now + KNOCK_S
                try:
                    outcome.link.push(memoryview(sign(outcome.link.rank)))
                except PeerLost:
                    self._drop(outcome.link)
        for link in [link for link, (_, expires) in self._open.items() if expires <= now]:
            self._drop(link)

    def close(self) -> None:
        """Close all connections, and accept no more."""
        self._connector.close()
        for link in tuple(self._open):
            self._drop(link)
        self._listener.close()

    def _read(self, link: Link) -> list[Frame]:
        """The sign of life, if it has come whole; a connection that has ended without one is closed."""
        with suppress(BlockingIOError):
            try:
                if data := link.socket.recv(MAX_SIGN):
                    return self._open[link][0].feed(data)[:1]
            except BlockingIOError:
                raise
            except (OSError, WireError):
                pass
            self._drop(link)
        return []

    def _drop(self, link: Link) -> None:
        if self._open.pop(link, None) is not None:
            close_gently(link.socket)
