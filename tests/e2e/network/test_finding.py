"""Two machines of a house, with nothing typed on the second one but a code: it finds the mesh, joins, and uses it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from tests.e2e.network.house import CAN_BE_BUILT, house
from tests.e2e.processes import COMMAND_S, ROOT, START_S, MotleyProcess

pytestmark = pytest.mark.skipif(not CAN_BE_BUILT, reason="needs the right to make network namespaces")


@pytest.mark.soak
async def test_a_second_machine_finds_the_mesh_joins_by_a_code_and_uses_it(tmp_path: Path) -> None:
    with house("laptop") as there:
        where = ("--host", there.address, "--port", "0", "--http-port", "0", "--https-port", "0")
        up = await MotleyProcess.start("up", "--no-node", *where, "--state", str(tmp_path / "state"))
        await up.line("Other machines join")
        home = {**os.environ, "COLUMNS": "200", "MOTLEY_HOME": str(tmp_path / "laptop")}
        node = ("join", "--name", "laptop", "--cache", str(tmp_path / "cache"), "--data-ports", "17340-17359")
        joining = await asyncio.create_subprocess_exec(
            *(*there.on("laptop"), sys.executable, "-m", "motley.cli.main", *node),
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=home,
        )
        assert joining.stdin is not None
        assert joining.stderr is not None
        try:
            code = await up.line(r"laptop.* wants to join.* (\d{4} \d{4})$")
            joining.stdin.write(f"{code[1]}\n".encode())
            await _said(joining.stderr, b"joined as")
            for command in ("status", "nodes ls"):
                status, out = await _run(*there.on("laptop"), *_motley(command), env=home)
                assert (status == 0) == (command == "status"), out
                assert ("laptop" if command == "status" else "takes a key of scope admin") in out
            assert (await _run(*_motley("nodes revoke laptop"), env=up.environment))[0] == 0
            await _said(joining.stderr, b"to join anew")
            assert await joining.wait() == 1
            status, out = await _run(*there.on("laptop"), *_motley("status"), env=home)
            assert status == 1
            assert "no orchestrator answers" in out, "what was kept of the mesh is gone"
        finally:
            if joining.returncode is None:
                joining.kill()
            await joining.wait()
            await up.end()
        said = "\n".join(line for line in up.lines if "token" not in line and "API key" not in line)
        assert not re.search(r"[\w-]{40}", said), "a secret is in what it has said"


def _motley(command: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "motley.cli.main", *command.split())


async def _run(*command: str, env: dict[str, str]) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT, env=env
    )
    async with asyncio.timeout(COMMAND_S):
        out, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def _said(stream: asyncio.StreamReader, words: bytes) -> None:
    """Wait for words in what a process says."""
    said = b""
    async with asyncio.timeout(START_S):
        while words not in said:
            more = await stream.read(4096)
            assert more, said.decode()
            said += more
