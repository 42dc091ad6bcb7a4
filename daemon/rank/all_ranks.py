"""How rank 0 has every rank of a session execute the same messages, and hears what they tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from motley.daemon.rank.executor import Executor
from motley.daemon.rank.steps import Able, Message, Moved, StepError, Stop, decode, split
from motley.transport import Communicator


class AllRanks:
    """All ranks of a session, as rank 0 has them: itself, and the others, the followers."""

    def __init__(self, executor: Executor, communicator: Communicator, beside: int = 0) -> None:
        """
        Args:
            executor: rank 0's own.
            communicator: the way to the followers.
            beside: how many ranks exchange sums with rank 0, itself among them: they are done when it is, and are heard
                before the next message, whose sums come on the same links. 0: all do.
        """
        self._executor = executor
        self._communicator = communicator
        self._beside = beside or communicator.size
        self._begun: deque[list[bytes]] = deque()
        """What the ranks beside this one tell of messages of which the others have not been heard, the first first."""
        self._told: deque[list[bytes]] = deque()
        """What all ranks tell of messages before those, as nobody has asked for it yet."""

    def are_loaded(self) -> bool:
        """Whether all followers have said what they are able to do, so that `abilities` does not wait.

        Raises:
            TransportError: one is lost.
        """
        return all(self._communicator.wait_message(rank, 0.0) for rank in self._followers)

    def abilities(self) -> list[Able]:
        """What all of them are able to do, by rank, which each follower has said once it was loaded: to be asked once,
        before anything else.

        Raises:
            StepError: a follower says something else.
            TransportError: it says nothing.
        """
        return [self._executor.able, *map(self._ability, self._followers)]

    def do(self, message: Message) -> bytes | None:
        """Have every rank execute a message; what this rank tells.

        Raises:
            TransportError, EngineError: a rank is lost, or this one cannot compute.
        """
        self._broadcast(message)
        return self._executor.execute(message)

    def told(self, message: Message) -> list[bytes]:
        """Have every rank execute a message that is answered; what each of them tells, by rank. Errors as `do`."""
        self.begin(message)
        while self._begun:
            self._hear_all()
        return self._told.pop()

    def begin(self, message: Message) -> None:
        """Have every rank execute a message that is answered; the followers are heard by `finish`. Errors as `do`."""
        own = self.do(message)
        assert own is not None
        self._begun.append([own, *map(self._hear, range(1, self._beside))])

    def finish(self) -> list[bytes]:
        """What each rank tells, by rank, of the first message that was begun and is not finished. Errors as `do`."""
        if not self._told:
            self._hear_all()
        return self._told.popleft()

    def _hear_all(self) -> None:
        """Hear of the first message of which followers have not been heard: they answer in the order of messages."""
        others = range(self._beside, self._communicator.size)
        self._told.append([*self._begun.popleft(), *map(self._hear, others)])

    def stop(self) -> None:
        """Tell the followers that the session is over."""
        self._broadcast(Stop())

    @property
    def _followers(self) -> range:
        return range(1, self._communicator.size)

    def _ability(self, rank: int) -> Able:
        with from_rank(rank):
            message = decode(self._hear(rank))
        if not isinstance(message, Able):
            raise StepError(f"rank {rank} has not said how many spans it can take, but {message}")
        return message

    def _hear(self, rank: int) -> bytes:
        return self._communicator.recv(rank, self._communicator.deadline_s)

    def _broadcast(self, message: Message) -> None:
        """Send a message to every follower."""
        if self._communicator.size > 1:
            self._communicator.broadcast_message(message.encode(), 0, None)


def by_row(told: Sequence[bytes], count: int) -> Iterator[Sequence[bytes]]:
    """Give, for each of so many wanted rows, the summaries by rank, from what every rank tells of all of them.

    Raises:
        StepError: a rank tells of more or fewer; the message names it.
    """
    by_rank = []
    for rank, data in enumerate(told):
        with from_rank(rank):
            by_rank.append(split(data, count))
    return zip(*by_rank, strict=True)


def trouble_of(told: Sequence[bytes]) -> str:
    """Which ranks could not do what they answer with `Moved`, and why, from what every rank tells; empty: all could.

    Raises:
        StepError: a rank tells something else; the message names it.
    """
    trouble = []
    for rank, data in enumerate(told):
        with from_rank(rank):
            message = decode(data)
        if not isinstance(message, Moved):
            raise StepError(f"rank {rank} has not said whether it moved blocks, but {message}")
        if message.trouble:
            trouble.append(f"rank {rank}: {message.trouble}")
    return "; ".join(trouble)


@contextmanager
def from_rank(rank: int) -> Iterator[None]:
    """Errors name the rank that a message is from."""
    try:
        yield
    except StepError as error:
        raise StepError(f"rank {rank}: {error}") from error
