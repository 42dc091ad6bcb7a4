"""When a copy of a request's recurrent state is kept, and which copy another request can begin with. Pure."""

from __future__ import annotations

from motley.daemon.rank.blocks.state_blocks import StateBlockStore
from motley.daemon.rank.scheduling.request import Request


class KeptStates:
    """Has the states of requests copied at a few borders of their blocks, and back where others begin alike."""

    def __init__(self, store: StateBlockStore) -> None:
        self._store = store
        self._copies: list[tuple[int, int]] = []

    def admitted(self, request: Request) -> None:
        """A request has a slot, and blocks that hold what was found of it: it begins with the state after these."""
        if request.position:
            found = request.blocks[request.position // self._store.tokens - 1]
            self._copies.append((self._store.remembered(found), request.slot))
        borders = self._store.borders(request.tokens, request.root)
        request.borders = sorted(each for each in borders if each > request.position)

    def room(self, request: Request) -> int:
        """Tokens up to the next position where the state of a request is remembered; all it has, if there is none."""
        request.borders = [each for each in request.borders if each > request.position]
        return next(iter(request.borders), len(request.tokens)) - request.position

    def computed(self, request: Request) -> None:
        """A request stands at its position, without any guess, and has published its whole blocks."""
        if request.position in request.borders:
            place = self._store.remember(request.tokens[: request.position], request.root)
            if place is not None:
                self._copies.append((request.slot, place))

    def taken(self) -> list[tuple[int, int]]:
        """What is to be copied before anything else is computed, in this order: from which slot or place to which."""
        copies, self._copies = self._copies, []
        return copies
