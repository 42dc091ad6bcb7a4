"""Preparing the constraints of requests beside the steps: reading a tokenizer or a large schema takes a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from motley.daemon.sampling.constraint import Constraint, ConstraintError
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp


@dataclass
class _Waiting:
    """A request whose constraint is not ready; `spoken`: when it last heard something."""

    decode: wp.Decode
    came: float
    spoken: float
    constraint: Future[Constraint]


@dataclass
class Preparing:
    """Requests whose constraints are being prepared, in the order in which they came. The thread that does it ends with
    the process.

    Attributes:
        vocabulary: of the model; it comes before the first of the requests.
    """

    vocabulary: wp.Vocabulary = field(default_factory=wp.Vocabulary)
    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "constraints"))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._waiting)

    def begin(self, decode: wp.Decode, now: float) -> None:
        """Prepare the constraint of a request that has come `now`."""
        constraint = self._thread.submit(_prepare, decode.constraint, self.vocabulary)
        self._waiting[decode.request_id] = _Waiting(decode, now, now, constraint)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; False: there is none of that name."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.constraint.cancel()
        return waiting is not None

    def unspoken(self, now: float, seconds: float) -> Iterator[str]:
        """The requests that have heard nothing for so long; they are told something now."""
        for request_id, waiting in self._waiting.items():
            if now - waiting.spoken > seconds:
                waiting.spoken = now
                yield request_id

    def ready(self) -> Iterator[tuple[wp.Decode, float, Callable[[], Constraint]]]:
        """Take the requests whose constraints are prepared, when they came, and what gives the constraint or raises
        `ConstraintError`."""
        for request_id, waiting in list(self._waiting.items()):
            if waiting.constraint.done():
                del self._waiting[request_id]
                yield waiting.decode, waiting.came, waiting.constraint.result


def _prepare(constraint: pb.Constraint, vocabulary: wp.Vocabulary) -> Constraint:
    """Make a constraint; whatever goes wrong with it is its request's trouble alone.

    Raises:
        ConstraintError: it cannot be kept, or not with this tokenizer.
    """
    try:
        return Constraint(constraint, vocabulary)
    except ConstraintError:
        raise
    except BaseException as error:  # a library's panic is no Exception
        raise ConstraintError(f"answers of this model cannot be kept to a constraint: {error}") from error
