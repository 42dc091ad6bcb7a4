"""What Alembic runs to change a database: on the connection that it is given, all changes or none."""

from __future__ import annotations

from alembic import context

from motley.orchestrator.store.tables import METADATA, REVISIONS

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=REVISIONS.name,
    render_as_batch=True,  # SQLite changes a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
