"""Finding the mesh that a machine is to join, and what lets it: what was typed, what is kept, or a code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Sequence

from motley.cli.errors import CliError
from motley.cli.reaching.home import meshes
from motley.cli.shown.show import console
from motley.daemon.node.joining.membership import Membership, all_kept
from motley.daemon.node.joining.pairing import TRIES, PairingRefused, pair
from motley.daemon.node.joining.trust import TrustError, fetch_certificate, fingerprint_of
from motley.protocol.address import join_address, parse_address, with_port
from motley.protocol.announcing import Announced, meshes_here
from motley.protocol.pairing import typed

DIAL_S = 2.0
"""An address of an orchestrator that does not answer within this is not the one to dial."""


def last_name() -> str | None:
    """The name by which this machine has joined a mesh the last time; None: it never did."""
    return next((own.name for own in all_kept(meshes()) if own.name), None)


async def find_mesh(orchestrator: str, token: str, name: str) -> tuple[str, str]:
    """``host:port`` of an orchestrator, and a join token or what takes its place.

    Args:
        orchestrator: as typed; "": the mesh is looked for in the local network.
        token: as typed; "": the mesh knows this machine, or a person types a code.
        name: of this node.

    Raises:
        CliError: there is no mesh, or no way into it.
        TrustError: nobody answers at the address.
    """
    if not orchestrator:
        kept = [own for own in all_kept(meshes()) if own.name == name]
        found = await _look(token, kept)
        if found is None:  # where this machine was the last time; the daemon waits for it, or says what is wrong
            return kept[0].orchestrator, kept[0].token
        orchestrator = await _reachable(found)
    orchestrator = with_port(orchestrator)
    try:
        host, port = parse_address(orchestrator)
    except ValueError as error:
        raise CliError(str(error)) from None
    if token:
        return orchestrator, token
    kept = [own for own in all_kept(meshes()) if own.name == name]
    try:
        fingerprint = fingerprint_of(await fetch_certificate(host, port))
        known = [own for own in kept if own.fingerprint == fingerprint]
    except TrustError:  # which is the daemon's to wait for, or to tell, where this machine was there before
        known = [own for own in kept if own.orchestrator == orchestrator]
        if not known:
            raise
    if known:
        return orchestrator, known[0].token

    def ask(tries: int) -> Awaitable[str]:
        if tries == TRIES:
            console.print(
                f"Where `motley up` runs for {orchestrator}, a code of eight digits is shown now.", markup=False
            )
        return _ask_for_code(tries)

    try:
        return orchestrator, await pair(host, port, name, ask)
    except PairingRefused as error:
        raise CliError(str(error)) from error
    except asyncio.CancelledError:
        console.print("\nNot joined; `motley join` again gets another code.", markup=False)
        raise


async def _look(token: str, kept: Sequence[Membership]) -> Announced | None:
    """The mesh of the local network that is to be joined; None: none that knows this machine answers.

    Raises:
        CliError: there is none, or nobody says which.
    """
    with console.status("looking for meshes in this network"):
        try:
            found = await meshes_here()
        except OSError as error:
            raise CliError(
                f"this network cannot be searched ({error}); name HOST:PORT, as `motley up` prints it"
            ) from None
    known = {own.fingerprint[:16] for own in kept}
    wanted = {token.strip().partition(".")[2][:16]} if token else known & {each.fingerprint for each in found}
    fitting = [each for each in found if each.fingerprint in wanted] if wanted else found
    if len(fitting) == 1 and wanted:
        return fitting[0]
    if not fitting:
        if kept and not token:
            return None
        raise CliError(
            "no mesh answers in this network; is `motley up` running there, and do the firewalls of both machines let"
            " mDNS (UDP port 5353) pass? Else name HOST:PORT, as `motley up` prints it"
        )
    console.print("In this network there are:")
    fitting.sort(key=lambda mesh: (mesh.name, mesh.addresses, mesh.port))
    for number, mesh in enumerate(fitting, start=1):
        console.print(f"  {number}. {mesh.name} at {join_address(mesh.addresses[0], mesh.port)}", markup=False)
    if len(fitting) == 1:
        return fitting[0]
    while True:
        answer = await _typed(f"Which? 1 to {len(fitting)}: ")
        if answer.strip().isdecimal() and 1 <= int(answer) <= len(fitting):
            return fitting[int(answer) - 1]
        console.print(f"There is no mesh of the number {answer.strip()!r}.", markup=False)


async def _reachable(mesh: Announced) -> str:
    """The first address of a mesh that can be dialled.

    Raises:
        CliError: none can.
    """
    for address in mesh.addresses:
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(DIAL_S):
                _, writer = await asyncio.open_connection(address, mesh.port)
                writer.close()
                return join_address(address, mesh.port)
    tried = ", ".join(mesh.addresses)
    raise CliError(f"{mesh.name} cannot be reached at {tried}, port {mesh.port}; does its firewall let that port in?")


async def _ask_for_code(tries: int) -> str:
    if tries < TRIES:
        console.print("That is not the code.")
    while True:
        try:
            left = f"wrong codes allowed: {tries - 1}" if tries > 1 else "the last try"
            return typed(await _typed(f"Type it here ({left}): "))
        except ValueError as error:
            console.print(str(error))


async def _typed(question: str) -> str:
    """A line that somebody types.

    Raises:
        CliError: nobody can.
    """
    console.print(question, end="", markup=False)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()

    def tell(line: bytes) -> None:
        if not answer.done():
            answer.set_result(line)

    def read() -> None:
        try:
            line = os.read(0, 1000)
        except OSError:
            line = b""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(tell, line)

    # Not by `input` in one of the loop's threads: Ctrl-C would have to wait until somebody types something.
    threading.Thread(target=read, name="typing", daemon=True).start()
    line = await answer
    if not line:
        raise CliError("nobody can type here; give HOST:PORT and --token (`motley token create` makes one)")
    return line.decode(errors="replace")
