"""A process that bothers a port: ``python -m tests.e2e.network.stranger WHAT HOST:PORT COUNT [BYTES]``.

It prints a line when all is sent, and another one when all its connections were closed by whom it bothers; it ends
when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from motley.protocol.address import parse_address
from motley.protocol.mesh_pb2 import Hello, NodeMessage
from motley.protocol.mesh_pb2_grpc import MeshStub
from motley.protocol.versions import PROTOCOL, VERSION

AT_A_TIME = 8
SOURCE = "127.0.0.2"
"""From where it dials, so that it is not whoever else is on this machine."""
BEGINNINGS = {"idle": b"", "slow": b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "}


@asynccontextmanager
async def dialled(target: str, token: str) -> AsyncIterator[Any]:
    """A stream to an orchestrator, on a connection of its own, on which nothing is said yet."""
    pem = await asyncio.to_thread(ssl.get_server_certificate, parse_address(target))
    options = [("grpc.ssl_target_name_override", "motley"), ("grpc.use_local_subchannel_pool", 1)]
    credentials = grpc.ssl_channel_credentials(root_certificates=pem.encode())
    async with grpc.aio.secure_channel(target, credentials, options=options) as channel:
        yield MeshStub(channel).Join(metadata=[(PROTOCOL, str(VERSION)), ("motley-token", token)])


async def is_let_in(target: str, token: str) -> bool:
    """Whether whoever shows this token may say Hello."""
    async with dialled(target, token) as stream:
        return "motley-address" in dict(await stream.initial_metadata())


async def say_hellos(target: str, count: int, size: int) -> None:
    """Say so many Hellos without a token, each of so many bytes; all must be refused."""
    message = NodeMessage(hello=Hello(protocol=VERSION, name="x" * size))
    places = asyncio.Semaphore(AT_A_TIME)

    async def one() -> None:
        async with places, dialled(target, "wrong") as stream:
            try:
                await stream.write(message)
                await stream.read()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return
            raise AssertionError("a Hello without a token was answered")

    await asyncio.gather(*(one() for _ in range(count)))


async def connect(target: str, what: str, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Make so many connections and begin a request on each, or send random bytes, with TLS where `what` ends in it;
    those that are refused are left."""
    host, port = parse_address(target)
    what, _, tls = what.partition("-")
    context = ssl._create_unverified_context() if tls else None
    made = []
    for number in range(count):
        try:
            reader, writer = await asyncio.open_connection(host, port, local_addr=(SOURCE, 0), ssl=context)
        except OSError:
            continue
        made.append((reader, writer))
        writer.write(BEGINNINGS[what] if what in BEGINNINGS else noise(number))
        if what == "noise":
            writer.close()
    return made


def noise(number: int) -> bytes:
    """Random bytes, every second time behind what looks like a request."""
    head = b"GET / HTTP/1.1\r\nHo\0st: " if number % 2 else b""
    return head + random.Random(number).randbytes(300) + b"\r\n\r\n"


async def main(what: str, target: str, count: int, size: int = 0) -> None:
    import resource  # which Windows lacks

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    if what == "hellos":
        await say_hellos(target, count, size)
    else:
        held = await connect(target, what, count)
    print("sent", flush=True)
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(tell_when_cut_off([reader for reader, _ in held]))
        await asyncio.to_thread(sys.stdin.read)
        watching.cancel()
    for _, writer in held:
        writer.transport.abort()


async def tell_when_cut_off(readers: list[asyncio.StreamReader]) -> None:
    """Print a line when nothing more comes from any of them."""
    for reader in readers:
        with contextlib.suppress(OSError):
            await reader.read()
    print("cut off", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])))
