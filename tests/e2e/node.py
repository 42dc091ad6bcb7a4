"""`motley`, but a node is told how fast its memory is: on a busy machine the nodes of a mesh would measure each other.

They join sooner, and what is planned for them is the same each time.
"""

from __future__ import annotations

from motley.cli.main import main
from motley.daemon.node import hardware

BANDWIDTH = 10e9
"""Bytes/s."""

if __name__ == "__main__":
    hardware.memory_bandwidth = lambda *_: BANDWIDTH
    main()
