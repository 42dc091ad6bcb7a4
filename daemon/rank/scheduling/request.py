"""What rank 0 knows of a request: its tokens, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from motley.daemon.rank.adapters.table import NONE
from motley.daemon.rank.guessing.drafts import Lookup, Luck
from motley.protocol.mesh_pb2 import Sampling


@dataclass(eq=False)
class Request:
    """A request, waiting or under way, and how far it has come.

    Attributes:
        arrived: its place in the order of arrival.
        priority: those with a lower one begin before it.
        begun: its place in the order in which requests were first admitted; None: it has not been, by this rank.
        tokens: the prompt, and what has been generated.
        prompt: how many of them are the prompt.
        longest: how many there may come to be.
        root: see `BlockStore.find`.
        slot: where its sequence is on every rank; -1: it waits.
        blocks: its cache blocks.
        told: how many of these the ranks know of.
        passed: how many of these layers with a window see no longer (`BlockStore.let_pass`).
        position: tokens whose keys and values are in the blocks.
        given: rows that it has had since it was admitted.
        stepped: the number of the last step that it was in.
        cached: tokens of its prompt that were found when it was first admitted; None: it has not been.
        borders: positions where its recurrent states are to be remembered.
        whole: blocks that others may find already, or that the tree had already.
        follows: an active request that computes what this one, which waits, begins with; None: it waits for none.
        followed: tokens that both have in common, in whole blocks.
        lookup: guesses how its text goes on; None: nothing is guessed.
        luck: how often that was right.
        accepted: how many of its tokens were guessed, by whomever.
        sampling: how its tokens are chosen.
        adapter: the fingerprint of what it is computed with beside the model; empty: nothing.
        adapter_slot: where that is on every rank while the request is admitted; 0: nowhere.
    """

    arrived: int
    tokens: list[int]
    prompt: int
    longest: int
    root: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)
    told: int = 0
    passed: int = 0
    position: int = 0
    given: int = 0
    stepped: int = -1
    cached: int | None = None
    borders: list[int] = field(default_factory=list)
    whole: int = 0
    follows: Request | None = None
    followed: int = 0
    lookup: Lookup | None = None
    luck: Luck = field(default_factory=Luck)
    accepted: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    adapter: str = ""
    adapter_slot: int = NONE
    priority: int = 0
    begun: int | None = None

    @property
    def turn(self) -> tuple[bool, int, int]:
        """Its place among those that wait: behind all that have begun, before ranks were lost perhaps."""
        if self.begun is None and not self.generated:
            return True, self.priority, self.arrived
        return False, -1 if self.begun is None else self.begun, self.arrived

    @property
    def left(self) -> int:
        """Tokens that are known and have not been computed: one, if it is being answered."""
        return len(self.tokens) - self.position

    @property
    def generated(self) -> int:
        """Tokens that have been generated."""
        return len(self.tokens) - self.prompt
