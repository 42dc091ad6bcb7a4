"""Getting a join token by a code that the orchestrator shows (`motley.protocol.pairing` says why that is safe)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import grpc
import grpc.aio

from motley.daemon.node.joining.trust import TrustError, fetch_certificate, pinned_channel
from motley.protocol.mesh_pb2_grpc import MeshStub
from motley.protocol.pairing import GIVES_UP, NAME, PAIRING, PAKE, SEALED, WAITS, Joining, WrongCode
from motley.protocol.versions import told as versions

ANSWER_S = 15.0
"""The orchestrator has so long for each step."""
GIVE_UP_S = 2.0
"""... and for hearing that this machine gives up, which whoever has typed Ctrl-C waits for."""
TRIES = 3
"""As many as an orchestrator allows for a code."""


class PairingRefused(Exception):
    """The orchestrator pairs with nobody now, or the code was wrong too often."""


async def pair(host: str, port: int, name: str, ask: Callable[[int], Awaitable[str]]) -> str:
    """Get a join token from the orchestrator at an address, by the code that it shows.

    Args:
        name: that this machine is to have.
        ask: gives the code that a person types, in digits; told how many tries are left.

    Raises:
        TrustError: nobody answers there.
        PairingRefused: there is no token to be had.
    """
    # Whoever this is: who does not know the code can neither read nor make what is handed over.
    certificate = await fetch_certificate(host, port)
    async with (
        pinned_channel(host, port, certificate) as channel,
        pinned_channel(host, port, certificate) as waiting,  # a connection has one call at a time
    ):
        pairing = (await _call(channel, (NAME, quote(name, safe=""))))[PAIRING]
        # Its end is seen however this process ends: else the code is shown there for minutes, for nobody.
        waits = MeshStub(waiting).Pair(metadata=(*versions(), (WAITS, pairing)))  # type: ignore[no-untyped-call]
        try:
            for left in reversed(range(TRIES)):
                joining = Joining(await ask(left + 1))
                told = await _call(channel, (PAIRING, pairing), (PAKE, joining.message))
                try:
                    return joining.open(_bytes(told[PAKE]), _bytes(told[SEALED]))
                except WrongCode:
                    if not left:
                        why = "the code was wrong too often; run the command again for another"
                        raise PairingRefused(why) from None
        except BaseException:  # Ctrl-C, too
            with contextlib.suppress(TrustError, PairingRefused, TimeoutError):
                async with asyncio.timeout(GIVE_UP_S):
                    await _call(channel, (GIVES_UP, pairing))
            raise
        finally:
            waits.cancel()
    raise AssertionError("every try returns or raises")


async def _call(channel: grpc.aio.Channel, *metadata: tuple[str, str | bytes]) -> dict[str, str | bytes]:
    """One step: what is told in metadata, answered in metadata."""
    call = MeshStub(channel).Pair(metadata=(*versions(), *metadata))  # type: ignore[no-untyped-call]
    try:
        async with asyncio.timeout(ANSWER_S):
            code = await call.code()
            told = dict(await call.trailing_metadata())
    except TimeoutError:
        raise TrustError(f"the orchestrator has not answered within {ANSWER_S:.0f} s") from None
    finally:
        call.cancel()
    if code is not grpc.StatusCode.OK:
        raise PairingRefused(await call.details() or "the orchestrator cannot pair; is it of the same version?")
    return told


def _bytes(value: str | bytes) -> bytes:
    """What came in metadata whose name says that it is bytes."""
    assert isinstance(value, bytes), "gRPC decodes what it is named after"
    return value
