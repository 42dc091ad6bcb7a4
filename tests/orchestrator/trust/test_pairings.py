"""Joining by a code: the key exchange, how often it may be tried, and the whole of it over a real socket with TLS."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.node.joining.pairing import PairingRefused, pair
from motley.orchestrator.control import Control
from motley.orchestrator.trust.pairings import LIFE_S, MOST, PER_HOUR, TRIES, Pairing, PairingError, Pairings
from motley.protocol.pairing import Joining, WrongCode, hand_over, new_code, shown, typed


def test_only_who_has_the_code_opens_what_is_handed_over() -> None:
    joining = Joining("48310926")
    message, sealed = hand_over("48310926", joining.message, "secret.fingerprint")
    assert joining.open(message, sealed) == "secret.fingerprint"
    for changed in (Joining("48310927"), Joining("48310926")):  # another code; another exchange with the right one
        with pytest.raises(WrongCode):
            changed.open(message, sealed)
    again = Joining("48310926")
    message, sealed = hand_over("48310926", again.message, "secret.fingerprint")
    with pytest.raises(WrongCode):
        again.open(message, sealed[:-1] + bytes([sealed[-1] ^ 1]))


@given(st.binary(max_size=40) | st.binary(min_size=32, max_size=32).map(lambda point: b"A" + point))
def test_noise_is_refused_or_taken_for_an_exchange_whose_key_nobody_has(noise: bytes) -> None:
    try:
        own, sealed = hand_over("12345678", noise, "token")
    except WrongCode:
        return
    with pytest.raises(WrongCode):
        Joining("12345678").open(own, sealed)


def test_codes_are_read_as_people_type_them() -> None:
    code = new_code()
    assert typed(f" {shown(code)}\n") == typed(code) == code
    for wrong in ("", "1234567", "123456789", "1234 567x", "١٢٣٤٥٦٧٨"):
        with pytest.raises(ValueError, match="8 digits"):
            typed(wrong)


def test_a_code_can_be_tried_a_few_times_for_a_few_minutes() -> None:
    now = [0.0]
    pairings = Pairings(lambda: now[0])
    asked = pairings.ask("laptop", "192.168.1.7")
    for _ in range(TRIES):
        assert pairings.attempt(asked.id) is asked
    with pytest.raises(PairingError, match="wrong too often"):
        pairings.attempt(asked.id)
    asked = pairings.ask("laptop", "192.168.1.7")
    assert list(pairings) == [asked], "the one before is void"
    now[0] += LIFE_S
    with pytest.raises(PairingError, match="expired"):
        pairings.attempt(asked.id)


def test_codes_are_made_for_few_machines_at_a_time_and_so_many_in_an_hour() -> None:
    now = [0.0]
    pairings = Pairings(lambda: now[0])
    for number in range(MOST):
        pairings.ask("laptop", f"192.168.1.{number}")
    with pytest.raises(PairingError, match="too many machines"):
        pairings.ask("laptop", "192.168.1.99")
    now[0] += LIFE_S
    for _ in range(PER_HOUR - MOST):
        pairings.ask("laptop", "192.168.1.7")
    with pytest.raises(PairingError, match="too many machines"):
        pairings.ask("laptop", "192.168.1.7")
    with pytest.raises(PairingError, match="printable"):
        Pairings(lambda: 0.0).ask("\x1b[2J", "192.168.1.7")


async def test_a_machine_gets_a_token_for_itself_by_the_code_on_the_other_screen(mesh: Any, new_node: Any) -> None:
    screen: list[Pairing] = []
    mesh.orchestrator.show_code = screen.append
    host, _, port = mesh.orchestrator.local_target.rpartition(":")
    tries = []

    async def ask(left: int) -> str:
        tries.append(left)
        right = screen[0].code
        return right if left == 1 else f"{(int(right) + 1) % 10**8:08}"

    token = await pair(host, int(port), "my laptop", ask)
    assert (tries, screen[0].name) == ([3, 2, 1], "my laptop")
    node = new_node("my laptop")
    await node.join(mesh.orchestrator.local_target, token)
    with pytest.raises(PairingRefused, match="'my laptop' is in the mesh already"):
        await pair(host, int(port), "my laptop", ask)
    assert len(screen) == 1, "nobody is shown a code that would be of no use"
    await node.leave()
    with pytest.raises(PairingRefused, match="printable"):
        await pair(host, int(port), "\x07", ask)


async def test_the_code_of_a_machine_that_has_gone_is_void(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motley.orchestrator.control")
    host, _, port = mesh.orchestrator.local_target.rpartition(":")
    asked = asyncio.Event()

    async def nobody_types(left: int) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    pairing = asyncio.create_task(pair(host, int(port), "laptop", nobody_types))
    await asked.wait()
    assert [each["name"] for each in (await mesh.call("GET", "/api/pairings"))[1]["pairings"]] == ["laptop"]
    pairing.cancel()  # as Ctrl-C does
    with pytest.raises(asyncio.CancelledError):
        await pairing
    assert (await mesh.call("GET", "/api/pairings"))[1]["pairings"] == []
    assert [each.getMessage() for each in caplog.records] == ["laptop has given up joining: its code is void"]


JOINS = """
import asyncio, sys
from motley.daemon.node.joining.pairing import pair

async def nobody_types(left):
    print("asked", flush=True)
    await asyncio.Event().wait()

asyncio.run(pair("127.0.0.1", int(sys.argv[1]), "laptop", nobody_types))
"""


async def test_the_code_of_a_machine_that_was_killed_is_void(
    mesh: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "motley.orchestrator.control")
    waits, wait_with = asyncio.Event(), Control._wait_with

    async def seen(control: Control, pairing_id: str) -> None:
        waits.set()
        await wait_with(control, pairing_id)

    monkeypatch.setattr(Control, "_wait_with", seen)
    port = mesh.orchestrator.local_target.rpartition(":")[2]
    joining = await asyncio.create_subprocess_exec(sys.executable, "-c", JOINS, port, stdout=asyncio.subprocess.PIPE)
    assert joining.stdout is not None
    assert await joining.stdout.readline() == b"asked\n"
    await waits.wait()
    assert len((await mesh.call("GET", "/api/pairings"))[1]["pairings"]) == 1
    joining.kill()
    await joining.wait()
    await no_code(mesh)
    assert [each.getMessage() for each in caplog.records] == ["laptop is gone: its code is void"]


async def no_code(mesh: Any) -> None:
    """Wait until no machine has a code that is good."""
    async with asyncio.timeout(10):
        while (await mesh.call("GET", "/api/pairings"))[1]["pairings"]:
            pass


async def test_a_machine_with_its_token_needs_no_code_any_more(mesh: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "motley.orchestrator.control")
    screen: list[Pairing] = []
    mesh.orchestrator.show_code = screen.append
    host, _, port = mesh.orchestrator.local_target.rpartition(":")

    async def typing(left: int) -> str:
        return screen[0].code

    await pair(host, int(port), "laptop", typing)
    await no_code(mesh)
    assert caplog.records == [], "which is no news"


async def test_who_does_not_know_the_code_is_refused_after_three_tries(mesh: Any) -> None:
    screen: list[Pairing] = []
    mesh.orchestrator.show_code = screen.append
    host, _, port = mesh.orchestrator.local_target.rpartition(":")

    async def guess(left: int) -> str:
        return f"{(int(screen[0].code) + left) % 10**8:08}"

    with pytest.raises(PairingRefused, match="wrong too often"):
        await pair(host, int(port), "stranger", guess)
    assert (await mesh.call("GET", "/api/members"))[1]["members"] == []
