"""The tables of the database. Times are Unix time in seconds; of secrets there are digests only."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Integer, MetaData, String, Table

REVISION = "0002"
"""Of these tables: the latest of `migrations/versions`, where a change of them begins."""

METADATA = MetaData()

REVISIONS = Table("motley_revision", METADATA, Column("version_num", String(32), primary_key=True))
"""Has one row, the revision of the tables; Alembic's."""

TOKENS = Table(
    "tokens",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("note", String(100), nullable=False),
    Column("created", Double, nullable=False),
    Column("expires", Double),  # null: never
    Column("uses_left", Integer),  # null: any number
)

KEYS = Table(
    "api_keys",
    METADATA,
    Column("id", String(16), primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("note", String(100), nullable=False),
    Column("scope", String(10), nullable=False),
    Column("created", Double, nullable=False),
)

MEMBERS = Table(
    "members",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("digest", String(64), nullable=False, unique=True),
    Column("token", String(16), nullable=False),  # by which it joined, though that may be gone
    Column("joined", Double, nullable=False),
)

USAGE = Table(
    "usage",
    METADATA,
    Column("day", String(10), primary_key=True),  # 2026-11-23, in UTC
    Column("caller", String(100), primary_key=True),
    Column("model", String(300), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
)
