"""Borrowing all files of a model from the node that lends them, in a process of its own, for a training's worker."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from motley.daemon.lending.borrower import Borrower
from motley.daemon.lending.wire import LendingError
from motley.daemon.machine.ending import end_process, end_with_owner
from motley.daemon.node.child import ask_child, kill_child, start_child
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.hub import files_of
from motley.protocol import mesh_pb2 as pb
from motley.transport import TransportError


@asynccontextmanager
async def borrowed(loan: pb.Loan, cache: ShareCache) -> AsyncIterator[Path]:
    """Fetch a model that another node lends, as far as it is not here, and keep it for as long as the context lasts.

    Args:
        cache: beside whose shares it is kept.

    Yields:
        where it is.

    Raises:
        LendingError: the lender is lost or refuses, or there is no room here.
    """
    process = await start_child("motley.daemon.node.borrowing", stdout=asyncio.subprocess.PIPE)
    try:
        told = {"loan": loan.SerializeToString().hex(), "shares": str(cache.folder), "limit": cache.limit}
        said = await ask_child(process, told)
        if said is None:
            raise LendingError(f"what borrows the model ended with status {await process.wait()}")
        if "refused" in said:
            raise LendingError(said["refused"])
        yield Path(said["place"])
    finally:
        await kill_child(process)


def main() -> int:
    """The process: one order on standard input and one answer on standard output, both a line of JSON. Until its owner
    ends it, nobody removes what it has brought."""
    told = json.loads(sys.stdin.readline() or "null")
    if told is None:
        return 1
    end_with_owner()
    try:
        with Borrower(pb.Loan.FromString(bytes.fromhex(told["loan"])), Path(told["shares"]), told["limit"]) as borrower:
            for file in files_of(borrower.place):
                borrower.bring(file, [(0, file.stat().st_size)])
            borrower.end()
            print(json.dumps({"place": str(borrower.place)}), flush=True)
            threading.Event().wait()  # for `end_with_owner`
    except (LendingError, TransportError, OSError) as error:
        print(json.dumps({"refused": str(error)}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
