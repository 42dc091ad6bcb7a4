"""What the database keeps: the same in SQLite and in a real PostgreSQL server, where one is installed."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, insert, text

from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.store.keys import Keys, Scope
from motley.orchestrator.store.members import Members
from motley.orchestrator.store.migrating import FIRST, alembic_config, bring_up_to_date
from motley.orchestrator.store.store import FILE, Store, StoreError
from motley.orchestrator.store.tables import METADATA, REVISION, REVISIONS, TOKENS
from motley.orchestrator.store.tokens import Tokens
from motley.orchestrator.store.usage import Usage, Used
from tests.ports import unanswered_port

SERVERS = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


def why_no_server() -> str:
    """Why no PostgreSQL server can be started here; "": one can."""
    if not SERVERS:
        return "no PostgreSQL server is installed"
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        return "PostgreSQL does not run as root, and there is no runuser"
    return ""


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a real server's database."""
    pytest.importorskip("psycopg")
    if why := why_no_server():
        pytest.skip(why)
    programs = SERVERS[-1].parent
    with tempfile.TemporaryDirectory(prefix="motley-postgresql-") as folder:  # where it may go that is not root
        become: list[str] = []
        if os.geteuid() == 0:
            become = ["runuser", "-u", "nobody", "--"]
            shutil.chown(folder, "nobody")

        def do(*command: str) -> None:
            subprocess.run([*become, *command], check=True, timeout=120, cwd=folder, stdout=subprocess.DEVNULL)

        do(str(programs / "initdb"), "-D", f"{folder}/data", "-U", "motley", "--auth=trust", "--no-sync", "-E", "UTF8")
        control = (str(programs / "pg_ctl"), "-D", f"{folder}/data", "-w", "-l", f"{folder}/log")
        do(*control, "-o", f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off", "start")
        try:
            yield f"postgresql+psycopg://motley@/postgres?host={folder}"
        finally:
            do(*control, "-m", "immediate", "stop")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgresql"))


async def test_what_was_written_is_there_after_a_restart(url: str, tmp_path: Path) -> None:
    store = Store(tmp_path, url)
    tokens, keys = Tokens(store), Keys(store)
    members, usage = Members(store, tokens), Usage(store)
    token, secret = await tokens.create("for the laptop", 3600.0, 2)
    gone, gone_secret = await tokens.create()
    key, key_secret = await keys.create("a friend", Scope.USE)
    own = await members.admit("laptop", token)
    revoked = await members.admit("desktop", gone)
    await members.revoke("desktop")
    for _ in range(2):
        usage.count("key 1", "bard", Used(1, 10, 20))
        await usage.flush()
    usage.count("key 2", "bard", Used(1, 1, 1))
    await usage.flush()
    store.close()

    store = Store(tmp_path, url)
    tokens, keys = Tokens(store), Keys(store)
    members, usage = Members(store, tokens), Usage(store)
    try:
        assert tokens.find(secret) == token
        assert token.uses_left == 1
        assert tokens.find(gone_secret) is None, "it went with the machine that was revoked"
        assert keys.find(key_secret) == key
        found = members.find(own)
        assert found is not None
        assert found.name == "laptop"
        assert members.find(revoked) is None
        rows = [tuple(row.values())[1:] for row in await usage.rows()]
        assert rows == [("key 1", "bard", 2, 20, 40), ("key 2", "bard", 1, 1, 1)]
        await tokens.remove(token.id)
        await keys.remove(key.id)
        await members.revoke("laptop")
    finally:
        store.close()


async def test_two_machines_cannot_share_the_last_use_of_a_token(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tokens = Tokens(store)
    members = Members(store, tokens)
    token, _ = await tokens.create(uses=1)
    came = await asyncio.gather(*(members.admit(name, token) for name in "abc"), return_exceptions=True)
    assert [isinstance(each, str) for each in came] == [True, False, False]
    assert all(isinstance(each, StoreError) for each in came[1:])
    store.close()


async def test_what_cannot_be_written_does_not_count(tmp_path: Path) -> None:
    store = Store(tmp_path)
    tokens = Tokens(store)
    members, keys = Members(store, tokens), Keys(store)
    token, _ = await tokens.create(uses=1)
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("DROP TABLE members")
        other.execute("DROP TABLE api_keys")
        with pytest.raises(StoreError, match="no such table: members"):
            await members.admit("laptop", token)
        with pytest.raises(StoreError, match="cannot write to"):
            await keys.create("", Scope.USE)
    assert list(members) == list(keys) == []
    assert token.uses_left == 1
    store.close()


def test_a_database_that_cannot_be_used_is_named_and_its_password_is_not(tmp_path: Path) -> None:
    with unanswered_port() as port:
        urls = ("nonsense", "nodb://here", f"postgresql+psycopg://me:hunter2@127.0.0.1:{port}/db")
    for url in urls:
        with pytest.raises(StoreError, match="cannot use the database") as error:
            Store(tmp_path, url)
        assert "hunter2" not in str(error.value)
    Store(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / FILE)) as other:
        other.execute("UPDATE motley_revision SET version_num = '9999'")
        other.commit()
    with pytest.raises(StoreError, match="has schema 9999, this Motley knows 0002"):
        Store(tmp_path)


def test_a_full_disk_is_told_in_words_of_the_database_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_little_room(connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA max_page_count = 2")
        bring_up_to_date(connection)

    monkeypatch.setattr("motley.orchestrator.store.store.bring_up_to_date", with_little_room)
    with pytest.raises(StoreError) as error:
        Store(tmp_path)
    why = "database or disk is full; free space there, or choose another folder with --state"
    assert str(error.value) == f"cannot use the database {tmp_path / FILE}: {why}"


def test_a_database_of_the_first_motley_keeps_what_it_has(url: str, tmp_path: Path) -> None:
    """And its tables become those that a new database gets."""
    engine = create_engine(url or f"sqlite:///{tmp_path / FILE}")
    with engine.begin() as connection:
        METADATA.drop_all(connection)
        command.upgrade(alembic_config(connection), FIRST)
        connection.execute(text(f"DROP TABLE {REVISIONS.name}"))  # as it was then
        connection.execute(insert(TOKENS).values(id="a", digest="b", note="old", created=1.0))
    for _ in range(2):
        store = Store(tmp_path, url)
        assert [row["note"] for row in store.rows(TOKENS)] == ["old"]
        assert [row["version_num"] for row in store.rows(REVISIONS)] == [REVISION]
        store.close()
    with engine.begin() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": REVISIONS.name, "compare_type": True})
        assert not compare_metadata(context, METADATA)
        METADATA.drop_all(connection)
    engine.dispose()


async def test_an_orchestrator_with_postgresql(postgresql: str, tmp_path: Path, new_node: Any) -> None:
    config = OrchestratorConfig("127.0.0.1", 0, http_port=0, state_dir=tmp_path, database=postgresql)
    keys = []
    for _ in range(2):
        orchestrator = Orchestrator(config)
        await orchestrator.start()
        node = new_node("laptop")
        shown = f"{keys[0]}.{orchestrator.fingerprint}" if keys else orchestrator.join_token
        await node.join(orchestrator.local_target, shown)
        keys.append(node.key)
        await node.leave()
        await orchestrator.stop()
    assert keys[1] == ""
    assert not (tmp_path / FILE).exists()


async def test_what_requests_took_is_counted_by_caller_and_model(mesh: Any, bard: Any) -> None:
    for _ in range(2):
        await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi"})
    again = {"Idempotency-Key": "one"}
    for _ in range(2):
        async with mesh.http.post("/v1/completions", json={"model": "bard", "prompt": "Hi"}, headers=again) as response:
            assert response.status == 200
    _, body = await mesh.call("GET", "/api/usage")
    assert [(row["caller"], row["model"]) for row in body["usage"]] == [("this machine", "bard")]
    row = body["usage"][0]
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (3, 15, 9), "nothing is counted twice"
