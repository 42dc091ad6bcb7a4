"""Beats beside the data path: they tell a rank that computes for a minute from one that is gone.

Every pair of ranks has a second connection that carries nothing but a BEAT frame twice a second, sent by a thread of
its own. A peer is lost when nothing has come for `SILENCE_S` (it hangs, its machine or the network is gone), or when
the connection ends (its process is gone). How long its main thread computes does not matter, as long as it releases
the interpreter lock now and then.

A peer has one clock of silence, which whatever comes of it sets back: a beat, data, or a knock. Beats that were lost
in a cut come late, as TCP repeats them at ever longer intervals; so whoever hears nothing for `KNOCK_AFTER_S` knocks
(`motley.transport.links.knocks`). If no peer is heard any more, the fault is at this end: this rank is the lost one.

A beat also says how many bytes its sender has put on the pair's connection for data. If some of them do not come for
`SILENCE_S`, while this rank does nothing but wait for them and the beats do come, that connection is dead (a router
has forgotten it), and its peer is lost as well; if that is so of several peers, the fault is at this end, and the rank
that is lost is this one. Slow is not dead: bytes that come, however few, prove it, and so a peer that has sent nothing,
or a rank that does not read because it computes, is never taken for a dead connection.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from motley.protocol.clock import elapsed

from ..errors import PeerLost
from .knocks import Knocks
from .link import Link, Waitable, part, wait_ready
from .wire import MAX_HANDSHAKE, Decoder, Frame, Op, WireError, pack_beat, pack_frame, unpack_abort, unpack_beat

BEAT_S = 0.5
"""From one beat to the next."""
KNOCK_AFTER_S = 1.0
"""A peer that has been silent this long is knocked at."""
SILENCE_S = 5.0
"""A peer that has been silent this long is lost. A cut of 3 s must end nothing: that leaves 2 s, on a busy machine too,
for a knock and the handshakes of its connection."""
JOIN_S = 5.0
"""How long closing waits for the thread that beats to end."""
SUSPENDED_S = 2.0
"""If nobody looked for so long, this rank was suspended or busy with its bootstrap: the silence was its own."""


class Watch:
    """Decides which peers live, from what they sent and when. Pure: bytes and times come in, `lost` comes out.

    Times are seconds of a monotonic clock. It also hears which ranks the peers have lost.
    """

    def __init__(self, own_rank: int) -> None:
        self.lost: dict[int, str] = {}
        """The ranks that are lost and why, in the order in which it was found."""
        self.own_rank = own_rank
        self.accused = False
        """A peer has given up because of this rank."""
        self._finders: dict[int, int | None] = {}
        self._addresses: dict[int, str] = {}
        self._decoders: dict[int, Decoder] = {}
        self._heard: dict[int, float] = {}  # a peer that still builds its mesh has never been heard
        self._progress: dict[int, int] = {}
        self._sequences: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._overdue: dict[int, tuple[int, float]] = {}  # what the count was when the next bytes were missed, when
        self._looked = float("-inf")
        self._resumed = float("-inf")  # when this rank was last seen to have been suspended, and for how long
        self._suspended_s = 0.0

    @property
    def watched(self) -> tuple[int, ...]:
        """The ranks that are neither lost nor have left."""
        return tuple(self._decoders)

    def add(self, rank: int, address: str) -> None:
        """Watch one more rank; `address` is for messages."""
        self._addresses[rank] = address
        self._decoders[rank] = Decoder(2 * MAX_HANDSHAKE)

    def raise_if_lost(self) -> None:
        """Raise the first loss, if there is one.

        Raises:
            PeerLost: a rank is lost, as this rank has found or another one has reported.
        """
        if loss := self.first_loss():
            raise loss

    def first_loss(self) -> PeerLost | None:
        """The error of the first loss; None if there is none."""
        for rank, why in tuple(self.lost.items()):
            return PeerLost(rank, why, self._finders.get(rank))
        return None

    def silent(self, now: float, seconds: float) -> list[int]:
        """The peers of which nothing has been heard for so long."""
        return [rank for rank, heard in self._heard.items() if now - heard >= seconds]

    def look(
        self, now: float, awaited: Mapping[int, tuple[int, int]], progress: Mapping[int, int] = MappingProxyType({})
    ) -> float:
        """Find the peers that have been silent for too long by now; returns when to look again at the latest.

        Args:
            awaited: the peers whose data this rank waits for, having read all that is here; how many bytes of it have
                come so far, and a count that rises with every byte, also of a record that is not whole.
            progress: of the links for data to all peers, that count.
        """
        for rank, count in progress.items():
            if rank in self._heard and count != self._progress.setdefault(rank, count):
                self._progress[rank], self._heard[rank] = count, now
        if self._notice_suspension(now):
            self._heard = dict.fromkeys(self._heard, now)
            self._overdue.clear()
        self._looked = now
        overdue = {}
        for rank, (came, count) in awaited.items():
            if came < self._sent.get(rank, 0):
                known = self._overdue.get(rank)
                overdue[rank] = known if known is not None and known[0] == count else (count, now)
        self._overdue = overdue
        self._lose_silent(now)
        # Beats tell at different times what was sent: who is overdue for half as long is so for the same reason.
        late = [rank for rank, (_, since) in self._overdue.items() if now - since >= SILENCE_S / 2]
        for rank in late:
            if now - self._overdue[rank][1] >= SILENCE_S:
                if len(late) > 1:
                    whose = " and ".join(map(str, late))
                    why = f"the beats of ranks {whose} come here, but no data for {SILENCE_S:g} s"
                    self._lose(rank, self.own_rank, why)
                    break
                missing = self._sent[rank] - awaited[rank][0]
                why = f"its beats come, but no data for {SILENCE_S:g} s: {missing} bytes are on their way"
                self._lose(rank, rank, why)
        waits = [*self._heard.values(), *(since for _, since in self._overdue.values())]
        return min(waits, default=now) + SILENCE_S

    def _notice_suspension(self, now: float) -> bool:
        """Whether nobody has looked for so long that this rank must have stood still."""
        if now - self._looked <= SUSPENDED_S:
            return False
        if self._looked > float("-inf"):  # else it has only begun to look
            self._resumed, self._suspended_s = now, now - self._looked
        return True

    def _has_stood_still(self, now: float) -> bool:
        """Whether this rank was suspended until lately, for so long that peers may have given it up."""
        self._notice_suspension(now)
        return now - self._resumed < SILENCE_S <= self._suspended_s

    def _lose_silent(self, now: float) -> None:
        silent = self.silent(now, SILENCE_S)
        # Beats are sent at different times: who is silent for half as long is so for the same reason.
        if silent and len(self.watched) > 1 and len(self.silent(now, SILENCE_S / 2)) == len(self.watched):
            whose = " and ".join(map(str, self.watched))
            why = f"no sign of life of ranks {whose} for {SILENCE_S:g} s: this rank is cut off from all others"
            self._lose(silent[0], self.own_rank, why)
        for rank in silent:
            self._lose(rank, rank, f"no sign of life for {SILENCE_S:g} s")

    def last(self, suspect: int, sequence: int) -> int:
        """The peer that is furthest behind in its collectives, by the latest beats; `suspect` if none is behind it.

        Args:
            suspect: the peer that is waited for, perhaps in vain because it waits itself.
            sequence: the number of the collective that this rank is in; only who has not come so far is behind.
        """
        sequences = self._sequences.copy()
        limit = min(sequences.get(suspect, 0), sequence)
        behind = [rank for rank in sequences if sequences[rank] < limit]
        return min(behind, key=sequences.__getitem__, default=suspect)

    def receive(self, rank: int, data: bytes, now: float) -> None:
        """Take `data` that peer `rank` has sent on its connection for beats; no bytes are the connection's end."""
        if not data:
            self.end(rank, "its connection ended without a farewell", now)
            return
        self._heard[rank] = now
        try:
            for frame in self._decoders[rank].feed(data):
                match frame.header.op:
                    case Op.BEAT:
                        self._beat(rank, frame, now)
                    case Op.BYE:  # that is no loss until something is expected of it, which the data link finds out
                        self._forget(rank)
                        return
                    case Op.ABORT:
                        said = unpack_abort(frame.payload)
                        self.accused |= said.rank == self.own_rank
                        lost, how, finder = said.heard(rank, self.own_rank)
                        if said.rank == self.own_rank and self._has_stood_still(now):
                            lost = self.own_rank
                            how = f"it stood still for {self._suspended_s:.0f} s, and rank {finder} has given it up"
                        self._finders.setdefault(lost, finder)
                        self._lose(rank, lost, f"{how}: {said.why}")
                        return
                    case op:
                        raise WireError(f"{Op(op).name} on a connection for beats")
        except WireError as error:
            self._lose(rank, rank, str(error))

    def knocked(self, rank: int, frame: Frame, now: float) -> None:
        """Take the frame that a knock of peer `rank`, or at it, has brought."""
        if rank not in self._decoders or frame.header.op != Op.BEAT:
            return
        with suppress(WireError):
            self._beat(rank, frame, now)

    def end(self, rank: int, why: str, now: float) -> None:
        """Note that the connection for beats to peer `rank` has failed: it is lost, unless it was this rank that stood
        still.
        """
        if self._has_stood_still(now):
            self._lose(rank, self.own_rank, f"it stood still for {self._suspended_s:.0f} s; of rank {rank}: {why}")
        else:
            self._lose(rank, rank, why)

    def _beat(self, rank: int, frame: Frame, now: float) -> None:
        # A beat that was held up is older than what a knock has told meanwhile.
        self._sent[rank] = max(unpack_beat(frame.payload), self._sent.get(rank, 0))
        self._sequences[rank] = max(frame.header.sequence, self._sequences.get(rank, 0))
        self._heard[rank] = now

    def _lose(self, source: int, blamed: int, why: str) -> None:
        self._finders.setdefault(blamed, None)
        self.lost.setdefault(blamed, f"{why} ({self._addresses[source]})")
        self._forget(source)

    def _forget(self, rank: int) -> None:
        for known in (self._decoders, self._heard, self._progress, self._sent, self._sequences, self._overdue):
            known.pop(rank, None)


def listen(watch: Watch, link: Link) -> None:
    """Let `watch` take what has come over a link for beats, without waiting."""
    try:
        data = link.socket.recv(1 << 12)
    except BlockingIOError:
        return
    except OSError as error:
        watch.end(link.rank, str(error), elapsed())
    else:
        watch.receive(link.rank, data, elapsed())


class Pulse:
    """Beats to all peers and listens to theirs, in a thread of its own, until it is closed.

    The thread that runs collectives looks at `lost` when it is idle, adds the pulse to what it waits for when it parks
    (`wait_ready([*links, pulse], ...)`), and calls `raise_if_lost`.
    """

    def __init__(
        self, watch: Watch, links: Mapping[int, Link], data: Mapping[int, Link], knocks: Knocks | None = None
    ) -> None:
        """
        Args:
            watch: of all ranks; nobody else may use it any more.
            links: those for beats; closed by `close`.
            data: those for data, which others use; their counters are read.
            knocks: reach peers of which nothing is heard; closed by `close`. None: nobody knocks.
        """
        self.sequence = 0
        """The collective that this rank has come to; told to the peers."""
        self.awaited: Callable[[], Sequence[Link]] = tuple
        """The links for data whose bytes this rank waits for, having read all that is here. Called by the thread."""
        self._links = dict(links)
        self._data = dict(data)
        self._knocks = knocks
        self._watch = watch
        self.lost: Mapping[int, str] = watch.lost
        """Lost ranks and why, the first loss first. Written by the thread, so read it, and nothing else."""
        self._ours, self._theirs = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="motley-pulse", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Readable as soon as a rank is lost."""
        return self._ours.fileno()

    def raise_if_lost(self) -> None:
        """See `Watch.raise_if_lost`."""
        self._watch.raise_if_lost()

    @property
    def accused(self) -> bool:
        """A peer has given up because of this rank."""
        return self._watch.accused

    def last(self, suspect: int) -> int:
        """The peer that is furthest behind in its collectives; see `Watch.last`."""
        return self._watch.last(suspect, self.sequence)

    def first_loss(self, seconds: float) -> PeerLost | None:
        """The rank that was lost first and why, waiting up to `seconds` for the news; None if there is no loss."""
        deadline = time.monotonic() + seconds
        while not self.lost and time.monotonic() < deadline:
            wait_ready([self], (), deadline - time.monotonic())
        return self._watch.first_loss()

    def close(self, farewell: bytes = pack_frame(Op.BYE)) -> None:
        """End the thread, send the peers the frame `farewell`, and close all connections for beats.

        Give ``pack_abort(blamed, why)`` when the mesh breaks: it is how survivors learn whom to blame.
        """
        if self._closing:
            return
        self._closing = True
        with suppress(OSError):
            self._ours.send(b"\0")
        self._thread.join(JOIN_S)
        if self._knocks is not None:
            self._knocks.close()
        part(list(self._links.values()), farewell)
        self._ours.close()
        self._theirs.close()

    def _run(self) -> None:
        try:
            self._watch_over()
        except Exception as error:  # a watch that fails must not pass for one that sees nothing
            self._watch.lost.setdefault(self._watch.own_rank, f"its watch over the peers failed: {error!r}")
            with suppress(OSError):
                self._theirs.send(b"\0")

    def _watch_over(self) -> None:
        watch, knocks, next_beat, known = self._watch, self._knocks, elapsed(), 0
        data = tuple(self._data.items())
        while not self._closing:
            now = elapsed()
            if now >= next_beat:
                self._beat()
                next_beat = now + BEAT_S
            awaited = {link.rank: (link.received, link.progress) for link in self.awaited()}
            look_again = watch.look(now, awaited, {rank: link.progress for rank, link in data})
            if len(watch.lost) > known:
                known = len(watch.lost)
                self._theirs.send(b"\0")
            links = [self._links[rank] for rank in watch.watched]
            readers: list[Waitable] = [*links, self._theirs]
            writers: list[Waitable] = []
            pause = min(next_beat, look_again) - now
            if knocks is not None:
                knocks.knock(watch.silent(now, KNOCK_AFTER_S))
                readers, writers = [*readers, *knocks.readers], knocks.writers
                pause = min(pause, knocks.due - time.monotonic())
            ready = wait_ready(readers, writers, max(0.0, pause))
            for link in links:
                if link in ready:
                    listen(watch, link)
            if knocks is not None:
                for rank, frame in knocks.step(ready, self._pack):
                    watch.knocked(rank, frame, elapsed())

    def _pack(self, rank: int) -> bytes:
        """A beat for a peer."""
        return pack_beat(self.sequence, self._data[rank].sent)

    def _beat(self) -> None:
        """Send a beat to all; a connection that fails here says why when it is read, after the peer's last words."""
        for rank in self._watch.watched:
            link = self._links[rank]
            beat = link.unsent.popleft() if link.unsent else memoryview(self._pack(rank))
            with suppress(OSError):
                beat = beat[link.socket.send(beat) :]
            if beat:
                link.unsent.append(beat)
