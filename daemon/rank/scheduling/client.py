"""Who has asked rank 0 for an answer, and how its tokens are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motley.daemon.rank.blocks.roots import root_of
from motley.daemon.rank.guessing.drafts import Lookup
from motley.daemon.rank.scheduling.request import Request
from motley.daemon.sampling.choice import Choice
from motley.daemon.sampling.constraint import Constraint
from motley.daemon.sampling.parameters import SamplingParams
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp


@dataclass(eq=False)
class Client:
    """A request's owner, and how its tokens are chosen.

    Attributes:
        decode: what was asked for.
        arrived: when, by `time.perf_counter`.
        spoken: when it last heard something, by the same clock.
        constraint: what its answer must be; None: anything.
        cut_short: its most tokens are not those that were asked for, but those that there is room for now.
    """

    decode: wp.Decode
    params: SamplingParams
    request: Request
    arrived: float
    spoken: float
    constraint: Constraint | None = None
    cut_short: bool = False

    @property
    def generated(self) -> int:
        """How many tokens have been generated."""
        return self.request.generated

    @property
    def answer(self) -> list[int]:
        """The tokens that have been generated."""
        return self.request.tokens[self.request.prompt :]

    def finish(self, choice: Choice) -> str:
        """Why the answer ends with a token, which is not yet among its own; empty: it goes on."""
        if choice.token in self.decode.stop_tokens:
            return "stop"
        if self.constraint is not None and self.constraint.ends([*self.answer, choice.token]):
            return "stop"
        return "length" if self.generated + 1 >= self.decode.max_tokens else ""


def request_of(decode: wp.Decode, arrived: int, same_tables: Callable[[int], int]) -> Request:
    """What the schedule knows of a request.

    Args:
        arrived: its place in the order of arrival.
        same_tables: the shortest prompt with the same rotary tables as one of a length, see `RankGraph.same_tables`.
    """
    prompt, adapter = len(decode.prompt), decode.adapter.fingerprint
    return Request(
        arrived=arrived,
        tokens=[*decode.prompt, *decode.written],
        prompt=prompt,
        longest=prompt + decode.max_tokens,
        root=root_of(same_tables(prompt), adapter),
        lookup=None if decode.without_drafts else Lookup(),
        sampling=decode.sampling,
        adapter=adapter,
        priority=decode.priority,
    )


def logprob_row(choice: Choice) -> pb.LogprobRow:
    """What a client is told of the probabilities at one of its tokens."""
    return pb.LogprobRow(
        chosen=pb.TokenLogprob(id=choice.token, logprob=choice.logprob),
        top=[pb.TokenLogprob(id=token, logprob=logprob) for token, logprob in choice.top],
    )
