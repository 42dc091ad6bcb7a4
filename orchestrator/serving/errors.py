"""What is told to clients whose wish cannot be fulfilled."""

from __future__ import annotations

from collections.abc import Iterable

from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import Failure

SHUTTING_DOWN = "the orchestrator is shutting down"


class ServingError(Exception):
    """What was asked for cannot be done. `failure.code` is stable, `failure.message` is for people."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class BusyError(ServingError):
    """A session has as many requests as it takes. `retry_after_s` says when to come again, in whole seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(Failure(code="too_many_requests", message=message))
        self.retry_after_s = retry_after_s


class AnswerError(ServingError):
    """One of the answers that were asked for together breaks off; `number` says which, from 0 on."""

    def __init__(self, failure: Failure, number: int) -> None:
        super().__init__(failure)
        self.number = number


class DescriptionError(ServingError):
    """A node says that the model cannot be served, or not so quantised."""


def refusal(code: str, message: str, param: str = "") -> ServingError:
    """An error to raise; `param` is the field of the request that is to blame, if one is."""
    return ServingError(Failure(code=code, message=message, param=param))


def unknown_node(name: str, nodes: Iterable[Node], param: str) -> ServingError:
    """The error to raise where no live node has a name.

    Args:
        nodes: all that are known.
        param: the field of the request that has the name.
    """
    there = ", ".join(sorted(node.name for node in nodes if node.alive)) or "none"
    return refusal("unknown_node", f"no live node is named {name!r}; live nodes: {there}", param)


def unready(session: Session) -> ServingError:
    """The error to raise where a session must be ready and is not."""
    if why := session.paused_for_long:
        message = f"the session of {session.name!r} is paused until a plan fits: {why.message}"
        return ServingError(Failure(code=why.code, message=message, lost_rank=why.lost_rank))
    if session.state is State.FAILED and session.failure is not None:
        message = f"the session of {session.name!r} has failed: {session.failure.message}"
        return ServingError(Failure(code=session.failure.code, message=message, lost_rank=session.failure.lost_rank))
    return refusal(
        "session_not_ready", f"{session.name!r} is not ready (its session is {session.state}); try again soon"
    )
