"""Lending a model's files to ranks on other nodes, in a process of its own: the daemon talks meanwhile."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from motley.daemon.lending.hub_mirror import open_pulled
from motley.daemon.lending.lender import Lender, membership, serve
from motley.daemon.lending.wire import LendingError
from motley.daemon.machine.ending import end_process, end_with_owner
from motley.daemon.models.files import open_weights
from motley.daemon.models.keys import ConfigError
from motley.daemon.node.child import ask_child, kill_child, start_child
from motley.daemon.node.network.address import listening_host
from motley.daemon.node.settings import NodeSettings
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound, find_fetched, find_here
from motley.protocol import mesh_pb2 as pb
from motley.protocol.address import join_address
from motley.transport import Listener, Messenger, Tls, TransportError

BEGIN_S = 60.0
"""A lender has so many seconds to open the model."""


@asynccontextmanager
async def lend(order: pb.Lend, settings: NodeSettings) -> AsyncIterator[pb.Lent]:
    """Begin to lend a model, for as long as the context lasts or somebody borrows: the context waits for that.

    Args:
        settings: of this node.

    Yields:
        what the orchestrator is to be told.
    """
    process = await start_child("motley.daemon.node.lending", stdout=asyncio.subprocess.PIPE)
    try:
        told = {
            "lend": order.SerializeToString().hex(),
            "models": str(settings.models) if settings.models else None,
            "shares": str(settings.cache.folder),
            "limit": settings.cache.limit,
            "listen": [listening_host(settings.address), *settings.ports],
        }
        try:
            async with asyncio.timeout(BEGIN_S):
                said = await ask_child(process, told)
        except TimeoutError:
            said = {"refused": f"it has not opened the model within {BEGIN_S:.0f} s"}
        if not said:
            said = {"refused": f"its lender ended with status {await process.wait()}"}
        if "refused" in said:
            yield pb.Lent(id=order.id, failure=said["refused"])
            return
        yield pb.Lent(id=order.id, listening=join_address(settings.address, said["port"]), files=said["files"])
        await process.wait()
    finally:
        await kill_child(process)


def main() -> int:
    """The process: one order on standard input and one answer on standard output, both a line of JSON. It ends when
    nobody borrows any more, or its owner does; the exit status is 1 if there is nothing to lend."""
    told = json.loads(sys.stdin.readline() or "null")
    if told is None:
        return 1
    end_with_owner()
    order = pb.Lend.FromString(bytes.fromhex(told["lend"]))
    try:
        models = Path(told["models"]) if told["models"] else None
        pulled = open_pulled(order.source, models, Path(told["shares"]), told["limit"])
        place = pulled.place if pulled else find_here(order.source, models) or find_fetched(order.source)
        if place is None:
            raise LendingError(f"{order.source!r} is not here")
        with open_weights(place, pulled.bring if pulled else None) as weights:
            if order.fingerprint not in ("", weights.fingerprint()):
                raise LendingError(f"{place}: these are not the files that the session was planned for")
        lender = Lender(place, pulled)
        security = Tls(order.tls.certificate, order.tls.key, order.tls.authority)
        listener = Listener(*told["listen"])
    except (ModelNotFound, ConfigError, CheckpointError, LendingError, TransportError, OSError) as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return 1
    own, borrowers = membership(order.id, 0, order.members, order.secret), range(1, order.members)
    with (
        closing(lender),
        closing(listener),
        closing(Messenger(own, security, listener=listener, accepts=borrowers)) as open_,
    ):
        print(json.dumps({"port": listener.port, "files": lender.files.key}), flush=True)
        serve(lender, open_)
    return 0


if __name__ == "__main__":
    end_process(main())
