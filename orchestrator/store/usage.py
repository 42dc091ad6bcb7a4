"""How much who has asked of which model: requests and tokens by day. Written every few seconds, never per token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Executable, RowMapping, delete, exists, insert, literal, select, update

from motley.orchestrator.store.store import Store, StoreError
from motley.orchestrator.store.tables import USAGE

FLUSH_S = 10.0
"""What was counted is written so often; that much is lost where the process is killed."""
KEEP_S = 400 * 86400.0
"""Days that lie further back are forgotten."""
MOST = 10_000
"""So many rows may wait to be written, where that fails; what comes then is not counted."""

_log = logging.getLogger(__name__)


@dataclass
class Used:
    """What requests took.

    Attributes:
        prompt_tokens, completion_tokens: read, and written.
    """

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: Used) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens


class Usage:
    """Counts in memory, and adds that to the database."""

    def __init__(self, store: Store) -> None:
        """
        Raises:
            StoreError: what is too old cannot be removed.
        """
        self._store = store
        self._waiting: dict[tuple[str, str, str], Used] = {}
        """By day, caller and model."""
        store.write_now(delete(USAGE).where(USAGE.c.day < _day(time.time() - KEEP_S)))

    def count(self, caller: str, model: str, used: Used) -> None:
        """Count what a request took, whether it was answered whole or broke off."""
        key = _day(time.time()), caller[:100], model[:300]
        if key in self._waiting or len(self._waiting) < MOST:
            self._waiting.setdefault(key, Used()).add(used)

    async def rows(self) -> Sequence[RowMapping]:
        """All that was counted, the latest day first.

        Raises:
            StoreError: it cannot be read or written.
        """
        await self.flush()
        return await self._store.read(select(USAGE).order_by(USAGE.c.day.desc(), USAGE.c.caller, USAGE.c.model))

    async def flush(self) -> None:
        """Write what was counted.

        Raises:
            StoreError: it cannot be; it waits further, unless the database may still write it: nothing counts twice.
        """
        waiting, self._waiting = self._waiting, {}
        if not waiting:
            return
        try:
            await self._store.write(*(one for key, used in waiting.items() for one in _added(key, used)))
        except StoreError as error:
            if not error.may_be_written:
                for key, used in waiting.items():
                    self._waiting.setdefault(key, Used()).add(used)
            raise

    async def keep(self) -> None:
        """Write every `FLUSH_S`, for ever."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush_or_tell()

    async def flush_or_tell(self) -> None:
        """Write what was counted; what cannot be written is told in the log."""
        try:
            await self.flush()
        except StoreError as error:
            _log.warning("what was used waits to be written: %s", error)


def _added(key: tuple[str, str, str], used: Used) -> list[Executable]:
    """What adds to a row, which is made if there is none."""
    day, caller, model = key
    row = (USAGE.c.day == day) & (USAGE.c.caller == caller) & (USAGE.c.model == model)
    columns = [column.name for column in USAGE.columns]
    empty = select(*map(literal, (day, caller, model, 0, 0, 0))).where(~exists().where(row))
    sums = {name: USAGE.c[name] + count for name, count in vars(used).items()}
    return [insert(USAGE).from_select(columns, empty), update(USAGE).where(row).values(**sums)]


def _day(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d")
