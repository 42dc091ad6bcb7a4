"""A lease as programs write it: what is read of a file, who may have it, and when it is over."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.lease.file import LeaseFile, Told, began
from motley.daemon.lease.lease import (
    BEGUN_S,
    CLOCK_S,
    LIMIT_S,
    Holder,
    Lease,
    LeaseError,
    read_lease,
    write_lease,
)
from motley.daemon.lease.states import State
from motley.protocol.devices import covers, is_device

GOOD: dict[str, Any] = {"holder": {"name": "game"}, "granted_at": 100, "expires_at": 200.5, "device": "gpu:0"}
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=200)
TIMES = st.floats(0, 1e10)
LEASES = st.builds(
    Lease,
    holder=st.builds(Holder, name=NAMES, pid=st.none() | st.integers(1, 10**6), started_at=st.none() | TIMES),
    granted_at=TIMES,
    expires_at=TIMES,
    device=st.sampled_from(["all", "cpu", "gpu:0", "gpu:12"]),
    reason=NAMES,
)


def never(_: int) -> None:
    return None


@given(LEASES)
def test_what_is_written_is_read(lease: Lease) -> None:
    assert read_lease(write_lease(lease)) == lease
    assert is_device(lease.device)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"holder": "game"}, "holder"),
        ({"holder": {"name": ""}}, "holder.name"),
        ({"holder": {"name": "x", "pid": "7"}}, "holder.pid"),
        ({"granted_at": "now"}, "granted_at"),
        ({"expires_at": None}, "expires_at"),
        ({"device": "gpu"}, "device"),
        ({"device": "tpu:0"}, "device"),
        ({"until": 7}, "until"),
        ({"reason": "two\nlines"}, "reason"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], where: str) -> None:
    with pytest.raises(LeaseError, match=f"^{where}: "):
        read_lease(json.dumps({**GOOD, **change}).encode())


@given(st.binary(max_size=60))
def test_no_damage_is_a_fault(content: bytes) -> None:
    with pytest.raises(LeaseError):
        read_lease(content)


@given(LEASES, st.floats(0, 1e10), st.sampled_from([LIMIT_S, 60.0]))
def test_no_lease_lasts_longer_than_it_may(lease: Lease, now: float, limit: float) -> None:
    """Nor does one that is granted in the future, as by a clock that is wrong."""
    counts = not lease.over(now, limit, lambda _: lease.holder.started_at or lease.granted_at)
    assert counts == (lease.granted_at - CLOCK_S <= now < min(lease.expires_at, lease.granted_at + limit))


def test_it_ends_with_its_holder() -> None:
    lease = read_lease(json.dumps({**GOOD, "holder": {"name": "game", "pid": 7}}).encode())
    assert lease.over(150, LIMIT_S, never) == "process 7 of 'game' has ended"
    assert not lease.over(150, LIMIT_S, lambda _: 99.0)
    assert not lease.over(150, LIMIT_S, lambda _: math.nan), "nobody knows since when it runs"
    assert "is another by now" in lease.over(150, LIMIT_S, lambda _: 100 + 2 * BEGUN_S)
    told = lease.model_copy(update={"holder": Holder(name="game", pid=7, started_at=50.0)})
    assert not told.over(150, LIMIT_S, lambda _: 50.0)
    assert "is another by now" in told.over(150, LIMIT_S, lambda _: 60.0)


def test_processes_are_told_apart() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    since = began(child.pid)
    assert since is not None
    assert abs(since - time.time()) < 60
    assert child.stdin is not None
    child.stdin.close()
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, and nobody has taken note
    assert began(child.pid) is None
    child.wait()
    assert began(child.pid) is None


def lease(name: str, now: float, **more: Any) -> Lease:
    return Lease(holder=Holder(name=name), granted_at=now, expires_at=now + 100, **more)


def test_one_has_it_at_a_time(tmp_path: Path) -> None:
    file, now = LeaseFile(tmp_path / "there" / "lease.json"), time.time()
    assert file.read() is None
    assert file.give() is None
    file.take(lease("game", now, device="cpu"), LIMIT_S)
    with pytest.raises(LeaseError, match="'game' has a lease of the processor until"):
        file.take(lease("backup", now), LIMIT_S)
    longer = lease("game", now + 1)
    file.take(longer, LIMIT_S)
    assert file.read() == longer
    assert file.give(lease("game", now)) == longer, "another than that which is to end"
    assert file.read() == longer
    assert file.give() == longer
    file.take(lease("late", now - 200), LIMIT_S)
    file.take(lease("backup", now), LIMIT_S)
    file.path.write_text("{")
    with pytest.raises(LeaseError, match=r"holds no lease: Invalid JSON: .*; `motley lease give` removes it"):
        file.read()
    file.take(lease("game", now), LIMIT_S)
    assert file.read() == lease("game", now), "a damaged file gives way"


def test_who_has_the_lock_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.daemon.lease.file.LOCK_S", 0.05)
    file = LeaseFile(tmp_path / "lease.json")
    with file._locked(), pytest.raises(LeaseError, match="is locked by another program"):
        LeaseFile(file.path).take(lease("game", time.time()), LIMIT_S)
    LeaseFile(file.path).take(lease("game", time.time()), LIMIT_S)


def test_what_daemons_tell_is_forgotten_with_them(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path / "lease.json")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    since = began(os.getpid())
    assert since is not None
    mine = Told("pc", State.LEASED, "all", os.getpid(), since, LIMIT_S)
    gone = Told("box", State.NORMAL, "", child.pid, since, LIMIT_S)
    for each in (mine, gone):
        file.tell(each)
    (tmp_path / "lease.7.json").write_text("[]")
    assert file.told() == [mine]
    file.tell(replace(mine, started_at=since - 60))
    assert file.told() == [], "another process has its number by now"
    file.tell(mine)
    assert not (tmp_path / f"lease.{child.pid}.json").exists()
    file.forget(os.getpid())
    assert file.told() == []


def test_a_folder_that_nobody_may_read_tells_of_no_daemons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path, _: str) -> Any:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "glob", forbidden)
    assert LeaseFile(tmp_path / "lease.json").told() == []


def test_a_device_is_what_computes_there() -> None:
    assert [covers(device, True) for device in ("all", "cpu", "gpu:0", "gpu:1")] == [True, False, True, False]
    assert [covers(device, False) for device in ("all", "cpu", "gpu:0", "gpu:1")] == [True, True, False, False]
    assert not any(map(is_device, ("", "gpu:", "gpu:x", "gpu:²", "gpu:100", "ALL")))
