"""Alembic's revision tells which tables there are; the number of the schema goes."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.drop_table("motley_schema")
