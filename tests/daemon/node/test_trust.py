from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from motley.daemon.node.app import DaemonConfig, Observer, run_daemon
from motley.daemon.node.joining import trust
from motley.daemon.node.joining.trust import JoinToken, TrustError, check_name, open_channel

TOKEN = f"secret.{64 * 'a'}"


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A name service that does not answer."""
    over = threading.Event()

    def getaddrinfo(*_: object, **__: object) -> None:
        over.wait(30)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(trust.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(trust, "NAME_S", 0.2)
    yield
    over.set()


async def test_addresses_and_known_names_pass() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        await check_name(host)


async def test_a_name_that_nobody_has_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(trust.socket, "getaddrinfo", getaddrinfo)
    said = r"does not know the name 'upstairs' \(Name or service not known\); write the orchestrator's IP address"
    with pytest.raises(TrustError, match=said):
        await open_channel("upstairs", 4000, JoinToken.parse(TOKEN))


async def test_a_name_service_that_does_not_answer_is_told_at_once_and_before_anything_is_measured(
    slow_names: None,
) -> None:
    began = time.monotonic()
    with pytest.raises(TrustError, match=r"the name 'upstairs' \(no answer of the name service within 0.2 s\)"):
        await run_daemon(DaemonConfig(orchestrator="upstairs:4000", token=TOKEN), Observer())
    assert time.monotonic() - began < 5


async def test_ctrl_c_is_not_lost_that_comes_with_the_answer_of_the_name_service() -> None:
    loop = asyncio.get_running_loop()
    checking = asyncio.ensure_future(check_name("127.0.0.1"))
    await asyncio.sleep(0)  # it has asked
    for thread in threading.enumerate():
        if thread.name == "look up 127.0.0.1":
            thread.join()  # its answer waits for the loop
    loop.call_soon(checking.cancel)
    with pytest.raises(asyncio.CancelledError):
        await checking
