"""Addresses in writing, and which of them lead nowhere else."""

from __future__ import annotations

import pytest

from motley.protocol.address import JOIN_PORT, is_loopback, join_address, parse_address, with_port


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.3.2.1", "::1", "0:0:0:0:0:0:0:1"),
        *("::ffff:127.0.0.1", "::ffff:7f00:1"),  # IPv4 within IPv6, in both ways to write it
        *("localhost", "LocalHost", "localhost."),
    ],
)
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    [
        *("192.168.1.10", "128.0.0.1", "fd00::1", "::ffff:192.168.1.10"),
        *("0.0.0.0", "::"),  # every address of a machine, others' ways to it too
        *("gaming-pc", "localhost.example", "notlocalhost", "localhost..", "127.0.0.1.example", "[::1]", "."),
        "",
    ],
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.168.1.10:7337", "192.168.1.10", 7337),
        ("[fd00::1]:1", "fd00::1", 1),
        ("gaming-pc:65535", "gaming-pc", 65535),
    ],
)
def test_an_address_is_written_as_it_is_read(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize("text", ["", ":", "pc", "pc:", ":7337", "pc:0", "pc:65536", "pc:-1", "pc:x", "pc:²", "pc:٣"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("typed", "host"), [("192.168.1.10", "192.168.1.10"), ("gaming-pc", "gaming-pc"), ("[fd00::1]", "fd00::1")]
)
def test_a_host_alone_is_joined_at_the_usual_port(typed: str, host: str) -> None:
    assert parse_address(with_port(typed)) == (host, JOIN_PORT)


@pytest.mark.parametrize("typed", ["", "192.168.1.10:1", "[fd00::1]:1", "fd00::1:7337", "pc:", ":7337"])
def test_what_has_a_port_or_is_none_stays_as_it_was_typed(typed: str) -> None:
    assert with_port(typed) == typed
