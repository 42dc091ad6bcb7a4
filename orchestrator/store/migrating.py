"""Makes the tables of a new database, and changes those of an earlier Motley."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, insert, inspect, select

from motley.orchestrator.store.tables import METADATA, REVISION, REVISIONS

if TYPE_CHECKING:
    from alembic.config import Config

FIRST = "0001"
"""Of databases that have no revision yet, but `_BEFORE`."""
_BEFORE = "motley_schema"
"""A table that they have."""
_SCRIPTS = Path(__file__).parent / "migrations"


class UnknownRevision(Exception):
    """A newer Motley has made the tables; the message is their revision."""


def bring_up_to_date(connection: Connection) -> None:
    """Have a database the tables of `tables.py`, within the connection's transaction.

    A new one gets them as they are; Alembic, which takes a while to import, is for those that there were before.

    Raises:
        UnknownRevision: they are those of a newer Motley.
    """
    tables = inspect(connection).get_table_names()
    found = connection.execute(select(REVISIONS.c.version_num)).scalar() if REVISIONS.name in tables else None
    if found is None and _BEFORE not in tables:
        METADATA.create_all(connection)
        connection.execute(insert(REVISIONS).values(version_num=REVISION))
    elif found != REVISION:
        upgrade(connection, found)


def upgrade(connection: Connection, found: str | None) -> None:
    """Carry out the changes since a revision.

    Args:
        found: in the database; None: `FIRST`, though it does not say so.

    Raises:
        UnknownRevision: it is none of these.
    """
    from alembic import command
    from alembic.script import ScriptDirectory

    config = alembic_config(connection)
    if found is None:
        command.stamp(config, FIRST)
    elif found not in {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}:
        raise UnknownRevision(found)
    command.upgrade(config, "head")


def alembic_config(connection: Connection) -> Config:
    """By which Alembic finds the changes, and the database."""
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    return config
