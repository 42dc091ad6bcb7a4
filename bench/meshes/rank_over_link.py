"""A rank worker behind an emulated network: ``python -m motley.bench.meshes.rank_over_link LINK NEAR``.

`LINK` is what `motley.bench.meshes.emulator.LinkSpec.parse` reads, `NEAR` the rank that is on the same machine and
reached without it; everything else is as in `motley.daemon.worker.process`.
"""

from __future__ import annotations

import sys

from motley.bench.meshes.emulator import LinkSpec, Nic, sleep_exactly
from motley.daemon.worker import process
from motley.daemon.worker.worker import Wrap
from motley.transport.links.security import Stream


def network(link: LinkSpec, near: int, number: int) -> Wrap:
    """What the connections of rank `number` go through."""
    nic = Nic(link, seed=number)

    def wrap(peer: int, stream: Stream) -> Stream:
        return stream if peer == near else nic.wrap(peer, stream)

    return wrap


if __name__ == "__main__":
    link, near = LinkSpec.parse(sys.argv[1]), int(sys.argv[2])
    sleep_exactly()
    sys.exit(process.main(lambda number: network(link, near, number)))
