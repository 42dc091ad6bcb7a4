"""A database, and the one thread that writes to it: SQLite in the state folder, or PostgreSQL by URL."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Executable, RowMapping, Select, Table, create_engine, event, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from motley.orchestrator.store.migrating import UnknownRevision, bring_up_to_date
from motley.orchestrator.store.tables import REVISION

FILE = "motley.db"
"""In the state folder, where no other database is wanted."""
CONNECT_S = 10
"""A database has so many seconds to answer when it is opened."""
WAIT_S = 10.0
"""A write is given up after this."""


class StoreError(Exception):
    """The database cannot be opened, read or written; the message says which and what to do.

    Attributes:
        may_be_written: it was asked to write, and has not answered yet.
    """

    def __init__(self, message: str, may_be_written: bool = False) -> None:
        super().__init__(message)
        self.may_be_written = may_be_written


class Store:
    """A database with Motley's tables. One orchestrator at a time may have it."""

    def __init__(self, state_dir: Path, url: str = "") -> None:
        """Open it, and make its tables, or change those of an earlier Motley. Blocks: for the orchestrator's start.

        Args:
            url: as SQLAlchemy writes it; empty: SQLite in the file `FILE` of `state_dir`.

        Raises:
            StoreError: it cannot be opened, or a newer Motley has made it.
        """
        self._where = _shown(url) if url else str(state_dir / FILE)
        try:
            if url:
                self._engine = create_engine(
                    url, poolclass=NullPool, connect_args=_arguments(url), hide_parameters=True
                )
            else:
                _make_private(state_dir / FILE)
                self._engine = create_engine(URL.create("sqlite", database=str(state_dir / FILE)), hide_parameters=True)
            if self._engine.dialect.name == "sqlite":
                event.listen(self._engine, "connect", _careful)
                event.listen(self._engine, "begin", _begin)
            with self._engine.begin() as connection:
                bring_up_to_date(connection)
        except UnknownRevision as error:
            self._engine.dispose()
            raise StoreError(
                f"{self._where} has schema {error}, this Motley knows {REVISION}: update it, or choose another database"
            ) from error
        except (SQLAlchemyError, OSError, ImportError) as error:
            raise StoreError(f"cannot use the database {self._where}: {_told(error)}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    def rows(self, table: Table) -> Sequence[RowMapping]:
        """All rows of a table. Blocks: for the orchestrator's start.

        Raises:
            StoreError: they cannot be read.
        """
        try:
            return self._read(select(table))
        except SQLAlchemyError as error:
            raise StoreError(f"cannot read {table.name} of {self._where}: {_told(error)}") from error

    async def write(self, *statements: Executable) -> None:
        """Carry out statements, all of them or none; when this returns they are on the disk.

        Raises:
            StoreError: they cannot be, or not within `WAIT_S`.
        """
        begun = self._thread.submit(self._write, statements)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(asyncio.wrap_future(begun))
        except (SQLAlchemyError, TimeoutError) as error:
            why = _told(error) or f"no answer within {WAIT_S:.0f} s"
            may_be = isinstance(error, TimeoutError) and not begun.cancel()  # what has not begun never does
            raise StoreError(f"cannot write to {self._where}: {why}", may_be_written=may_be) from error

    async def read(self, query: Select[Any]) -> Sequence[RowMapping]:
        """The rows that a query finds.

        Raises:
            StoreError: they cannot be read, or not within `WAIT_S`.
        """
        found = asyncio.get_running_loop().run_in_executor(self._thread, self._read, query)
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(found)
        except (SQLAlchemyError, TimeoutError) as error:
            why = _told(error) or f"no answer within {WAIT_S:.0f} s"
            raise StoreError(f"cannot read {self._where}: {why}") from error

    def write_now(self, *statements: Executable) -> None:
        """As `write`, but blocking: for the orchestrator's start.

        Raises:
            StoreError: they cannot be carried out.
        """
        try:
            self._write(statements)
        except SQLAlchemyError as error:
            raise StoreError(f"cannot write to {self._where}: {_told(error)}") from error

    def close(self) -> None:
        """Finish what is being written."""
        self._thread.shutdown(wait=True)
        self._engine.dispose()

    def _read(self, query: Select[Any]) -> Sequence[RowMapping]:
        with self._engine.connect() as connection:
            return connection.execute(query).mappings().all()

    def _write(self, statements: Sequence[Executable]) -> None:
        with self._engine.begin() as connection:
            for statement in statements:
                connection.execute(statement)


def _shown(url: str) -> str:
    """A URL as people may see it, without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except SQLAlchemyError:
        return "of that URL"


def _told(error: Exception) -> str:
    """What is wrong, without the words of SQLAlchemy around those of the database, and what to do about a full disk."""
    own = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(own, "sqlite_errorcode", 0) & 0xFF  # SQLite may take a full disk for a broken one
    full = code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) or getattr(own, "errno", 0) == errno.ENOSPC
    return f"{own}; free space there, or choose another folder with --state" if full else str(own)


def _arguments(url: str) -> dict[str, Any]:
    """What a driver is told beside the URL: how long it may take to connect, to answer, and to acknowledge what it was
    sent. So a thread that waits for a server which is gone ends."""
    where = make_url(url)
    if where.get_backend_name() != "postgresql":
        return {}
    milliseconds = int(WAIT_S * 1000)
    options = f"-c statement_timeout={milliseconds} {where.query.get('options', '')}"
    return {"connect_timeout": CONNECT_S, "tcp_user_timeout": milliseconds, "options": options}


def _careful(connection: Any, _: object) -> None:
    """Have SQLite write ahead (a crash leaves all or nothing), and flush each transaction to the disk.

    Python's driver would begin no transaction before a change of tables: they begin where SQLAlchemy's do.
    """
    connection.isolation_level = None
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _make_private(path: Path) -> None:
    """Make an empty file that only its owner can read, if there is none; SQLite gives its others the same mode."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    if os.name != "nt":
        path.chmod(0o600)
