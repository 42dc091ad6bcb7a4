"""One rank as a real process, for tests that kill ranks: prints JSON lines, reads its plans from standard input.

A plan is ``{"rank", "size", "epoch", "addresses"}``. The rank connects, prints ``{"up": pid}``, sums until the mesh
breaks or, with ``"rounds"``, that many times, and prints ``{"error", "rank", "text"}`` or ``{"sum"}``.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np

from motley.transport import Listener, Membership, TransportError, connect_mesh


def main() -> None:
    listener = Listener("127.0.0.1")
    print(json.dumps({"port": listener.port}), flush=True)
    for line in sys.stdin:
        plan = json.loads(line)
        member = Membership("test", plan["epoch"], plan["rank"], plan["size"], b"s" * 32, b"a" * 32)
        buffer = np.zeros(2048, np.float32)
        try:
            with connect_mesh(listener, member, plan["addresses"], 20.0) as communicator:
                print(json.dumps({"up": os.getpid()}), flush=True)
                rounds = plan.get("rounds")
                while rounds is None or rounds > 0:
                    buffer[:] = plan["rank"] + 1
                    communicator.all_reduce(buffer)
                    rounds = None if rounds is None else rounds - 1
            print(json.dumps({"sum": float(buffer[0])}), flush=True)
        except TransportError as error:
            print(json.dumps({"error": type(error).__name__, "rank": error.rank, "text": str(error)}), flush=True)


main()
