"""How messages go through the pipe between a daemon and a worker: protobufs, each behind its length.

The pipe is a loopback connection. A socket rather than an anonymous pipe, because both ends can wait for it with a
deadline on every platform. The daemon listens on an ephemeral loopback port; the worker proves itself by sending first
the token that it was given on its standard input (`motley.daemon.pipe.settings`).
"""

from __future__ import annotations

import struct

LENGTH = struct.Struct("<I")
"""What stands before every message: how many bytes it has."""
TOKEN_BYTES = 32
"""Bytes of the token."""
MAX_MESSAGE = 64 << 20
"""Bytes of the longest message."""
