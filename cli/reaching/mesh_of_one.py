"""A mesh on this machine alone, in this process, for a command that finds no other."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client, Unreachable
from motley.cli.reaching.misnamed import check_findable
from motley.cli.shown.show import console
from motley.protocol.wording import counted

RUNS_ALONE = "this machine runs the model alone, and forgets it afterwards"
"""What a command that runs a model does where no mesh answers."""
JOIN_S = 60.0
"""Nodes on this machine have so many seconds to measure it and join."""


@asynccontextmanager
async def mesh_of_one() -> AsyncIterator[Client]:
    """An orchestrator and a node in this process, on loopback, for as long as the context lasts."""
    from motley.daemon.node.app import DaemonConfig, Observer, run_daemon
    from motley.orchestrator.app import Orchestrator, OrchestratorConfig

    with tempfile.TemporaryDirectory(prefix="motley-") as state:
        orchestrator = Orchestrator(
            OrchestratorConfig(host="127.0.0.1", grpc_port=0, http_port=0, state_dir=Path(state))
        )
        await orchestrator.start()
        node = asyncio.create_task(
            run_daemon(DaemonConfig(orchestrator.local_target, orchestrator.join_token), Observer())
        )
        try:
            async with Client(orchestrator.http_url) as client:
                await wait_for_nodes(client, 1, node)
                yield client
        finally:
            await orchestrator.stop()
            node.cancel()
            await asyncio.gather(node, return_exceptions=True)


@asynccontextmanager
async def mesh_or_alone(url: str, api_key: str, alone: str, model: str = "") -> AsyncIterator[tuple[Client, bool]]:
    """The mesh at an address, and whether it lasts longer than the context: if nobody answers there, a mesh of one.

    Args:
        alone: what this machine does then, for people; empty: there must be another mesh, as its nodes are named, say.
        model: what it is for.

    Raises:
        Unreachable: nobody answers, and there must be one.
        CliError: this machine would be alone, and nothing here, nor on the hub, is called like the model.
    """
    async with AsyncExitStack() as stack:
        lasting = True
        try:
            client = await stack.enter_async_context(Client(url, api_key))
            await client.sessions()
        except Unreachable:
            if not alone:
                raise
            if model:
                try:
                    check_findable(model)
                except CliError as error:
                    raise CliError(f"{error}\n  (A mesh may know it, but {client.missing}.)") from error
            console.print(f"[dim]{escape(client.missing)}: {alone}[/]", soft_wrap=True)
            client, lasting = await stack.enter_async_context(mesh_of_one()), False
        yield client, lasting


async def wait_for_nodes(client: Client, count: int, *parts: asyncio.Future[Any]) -> None:
    """Wait until so many nodes have joined.

    Raises:
        CliError: one of `parts` ended before that, or `JOIN_S` have passed.
    """
    deadline = time.monotonic() + JOIN_S
    while True:
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
        if sum(node["state"] == "alive" for node in nodes) >= count:
            return
        for part in parts:
            if part.done():
                raise CliError(f"a node ended before all had joined: {part.exception() or part.result()}")
        if time.monotonic() > deadline:
            raise CliError(f"{counted(count, 'node')} wanted, {len(nodes)} joined within {JOIN_S:.0f} s")
        await asyncio.sleep(0.05)
