"""What `motley up` tells a person who wants more nodes, and what it does where the disk is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.cli.commands.machine.up import _alone_with, for_programs, how_to_join, tell
from motley.cli.shown.show import console


def test_the_likeliest_address_is_in_the_line_and_the_others_are_named() -> None:
    lines = how_to_join(["192.168.1.10:7337", "[fd00::1]:7337", "10.8.0.2:7337"], "127.0.0.1:7337", "secret.abc")
    assert lines[1] == "  motley join 192.168.1.10:7337 --token secret.abc"
    assert "[fd00::1]:7337, 10.8.0.2:7337" in lines[2]


def test_one_address_leaves_no_choice() -> None:
    lines = how_to_join(["192.168.1.10:7337"], "127.0.0.1:7337", "secret.abc")
    assert lines[1:] == ["  motley join 192.168.1.10:7337 --token secret.abc"]


def test_other_machines_are_not_told_a_loopback_address() -> None:
    lines = how_to_join([], "127.0.0.1:7337", "secret.abc")
    assert lines == [
        "Nodes on this machine, and no others, join with:",
        "  motley join 127.0.0.1:7337 --token secret.abc",
    ]


def test_what_is_told_is_not_taken_for_markup() -> None:
    lines = how_to_join(["192.168.1.10:7337", "[fd00::1]:7337"], "127.0.0.1:7337", "secret.abc")
    with console.capture() as said:
        tell(lines)
    assert said.get().splitlines() == lines


def test_programs_elsewhere_are_told_what_there_is_for_them() -> None:
    lines = for_programs("https://192.168.1.10:7338", "motley-secret", Path("authority.pem"))
    assert "https://192.168.1.10:7338/v1" in lines[0]
    assert lines[1].endswith(": authority.pem")
    assert lines[2].endswith(": motley-secret")
    assert len(for_programs("https://192.168.1.10:7338", None, None)) == 1
    assert not for_programs(None, None, None)


def test_a_full_disk_is_left_to_the_orchestrator_to_tell(tmp_path: Path) -> None:
    """The file that keeps others out has no room for a process number, which is no reason to end in a trace."""
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with _alone_with(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
