"""What workers of a job hand each other, and tickets: as they went, and refused where they are something else."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.training.adapters import CONFIG, WEIGHTS
from motley.training.errors import TrainingError
from motley.training.examples import Example
from motley.training.files import CURVE
from motley.training.mesh import owner
from motley.training.mesh.order import WorkerOrder
from motley.training.mesh.pipe import Pipe
from motley.training.mesh.talk import (
    MOST_BYTES,
    NonsenseError,
    heard,
    pack_examples,
    pack_files,
    report_of,
    size_of,
    unpack_examples,
    unpack_files,
)
from motley.training.mesh.ticket import Ticket
from motley.training.settings import How, Settings
from motley.training.training import Data
from motley.transport import Message, Messenger


@given(st.lists(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(-100, 1 << 40)), min_size=1), max_size=8))
def test_examples_come_as_they_went(drawn: list[list[tuple[int, int]]]) -> None:
    examples = [Example(*np.array(each, np.int64).T) for each in drawn]
    came = unpack_examples(pack_examples(examples))
    assert len(came) == len(examples)
    for one, other in zip(came, examples, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.labels, other.labels)


@given(st.binary(max_size=200))
def test_what_are_no_examples_is_refused(data: bytes) -> None:
    try:
        came = unpack_examples(data)
    except TrainingError:
        return
    assert pack_examples(came) == data


def test_files_come_as_they_went_and_only_those_that_were_wanted(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.json", "b.bin")]
    for index, file in enumerate(files):
        file.write_bytes(bytes([index]) * (index * 1000))
    packed = pack_files(files)
    assert unpack_files(packed, ("a.json", "b.bin")) == {"a.json": b"", "b.bin": b"\x01" * 1000}
    for damaged, names in ((packed, ("a.json",)), (packed[:-1], ("a.json", "b.bin")), (b"", ()), (b"\x02", ())):
        with pytest.raises(TrainingError, match="no files"):
            unpack_files(damaged, names)


def test_what_is_no_message_is_refused() -> None:
    told = json.dumps({"do": "want", "at": 3}).encode()
    assert heard(memoryview(len(told).to_bytes(8, "little") + told + b"xyz")) == ({"do": "want", "at": 3}, b"xyz")
    for damaged in (b"", b"\x03" + bytes(7) + b"[1]", b"\xff" * 20):
        with pytest.raises(TrainingError, match="no message"):
            heard(memoryview(damaged))


def test_a_report_is_an_object_with_losses_that_are_numbers() -> None:
    report = {"steps": 3, "held_out": [2.0, 1]}
    assert report_of({"report": report}) == report
    nan = float("nan")
    for damaged in (
        None,
        [],
        {},
        report | {"held_out": [nan, 1.0]},
        report | {"held_out": [1e9, 1.0]},
        report | {"x": nan},
    ):
        with pytest.raises(NonsenseError):
            report_of({"report": damaged})
    assert size_of(7) == 7
    for wrong in (-1, MOST_BYTES + 1, 1.0, True, "1"):
        with pytest.raises(NonsenseError):
            size_of(wrong)


class Scripted:
    """A messenger that nobody answers; it tells what was sent, and who was dropped."""

    def __init__(self) -> None:
        self.connected: set[int] = set()
        self.dropped: list[int] = []
        self.sent: list[tuple[int, bytes]] = []

    def send(self, peer: int, parts: Sequence[bytes | memoryview]) -> None:
        self.sent.append((peer, b"".join(parts)))

    def drop(self, peer: int, reason: str) -> None:
        self.dropped.append(peer)


class Said:
    def __init__(self) -> None:
        self.said: list[object] = []

    def say(self, **body: object) -> None:
        self.said.extend(body.values())

    def told(self) -> list[object]:
        return []


def owner_of(folder: Path, names: str) -> tuple[owner._Owner, Scripted]:
    """An owner with a peer of each name, who has one example to learn."""
    made = object.__new__(owner._Owner)
    messenger = Scripted()
    made._messenger, made._pipe = cast(Messenger, messenger), cast(Pipe, Said())
    made._order = cast(WorkerOrder, SimpleNamespace(folder=folder))
    made._weighing, made._loss = b"", None
    made._peers = {number: owner._Peer(name, "host:1", range(1)) for number, name in enumerate(names, 1)}
    return made, messenger


def message(body: bytes = b"", **told: object) -> memoryview:
    head = json.dumps(told).encode()
    return memoryview(len(head).to_bytes(8, "little") + head + body)


@pytest.mark.parametrize(
    "told",
    [
        [memoryview(b"")],
        [message(do="hello")],
        [message(do="want", at=-1)],
        [message(do="made", size=1 << 40, report={"held_out": []})],
        [message(do="made", size=9, report={"held_out": [1.0]})],
        [message(do="made", size=4, report={"held_out": []}), message(b"12345", do="data", at=0)],
        [message(do="made", size=4, report={"held_out": []}), message(b"1234", do="data", at=0)],
        [message(do="made", size=4, report={"held_out": []}), message(do="data", at=0)],
    ],
)
def test_a_peer_that_sends_nonsense_is_left_out_and_no_other(told: list[memoryview], tmp_path: Path) -> None:
    made, messenger = owner_of(tmp_path, "ab")
    peer, other = made._peers[1], made._peers[2]
    for each in told:
        made._hear_of(1, peer, each)
    assert peer.out.startswith("it has sent what it must not")
    assert (other.pending, peer.parcel) == (True, b"")
    other.folder = tmp_path
    made._hear_of(2, other, message(do="hello"))
    assert (other.out, messenger.dropped) == ("", [2]), "its adapter has come, and counts"


def test_examples_are_packed_once_for_all_stretches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs: list[int] = []
    monkeypatch.setattr(owner, "STRETCH", 64)
    monkeypatch.setattr(owner, "pack_examples", lambda given: packs.append(len(given)) or pack_examples(given))
    made, messenger = owner_of(tmp_path, "a")
    made._learnt = [Example(np.arange(40, dtype=np.int64), np.arange(40, dtype=np.int64))]
    made._data = cast(Data, SimpleNamespace(evaluated=[]))
    messenger.connected.add(1)
    came = b""
    while len(came) < len(pack_examples(made._learnt)):
        made._hear_of(1, made._peers[1], message(do="want", at=len(came)))
        came += heard(memoryview(messenger.sent[-1][1]))[1]
    assert came == pack_examples(made._learnt)
    assert len(messenger.sent) == 11
    assert packs == [1]
    assert not made._peers[1].packed, "while it trains, they only take memory"
    made._hear_of(1, made._peers[1], message(do="want", at=0))
    assert heard(memoryview(messenger.sent[-1][1]))[1] == came[:64], "it begins anew"


def test_who_weighs_and_never_says_what_it_found_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, messenger = owner_of(tmp_path, "a")
    peer, now, looks = made._peers[1], [0.0], 0
    monkeypatch.setattr(owner, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def receive(_: float) -> list[Message]:
        nonlocal looks
        looks += 1
        assert looks < 10, "it is waited for"
        now[0] += owner.WEIGH_S / 2
        return [Message(1, message(do="want", at=0))] if looks == 1 else []

    monkeypatch.setattr(messenger, "receive", receive, raising=False)
    messenger.connected.add(1)
    peer.folder, peer.report = tmp_path, {"held_out": [2.0, 1.0]}
    for name in (CONFIG, WEIGHTS):
        (tmp_path / name).write_bytes(b"x")
    assert made.weigh(tmp_path) is None
    assert looks == 4, "its time begins anew with what it says"
    assert "a has said nothing for 3600 s" in str(cast(Said, made._pipe).said[-1])


def test_an_adapter_lies_under_its_members_number(tmp_path: Path) -> None:
    made, _ = owner_of(tmp_path, "a")
    files = [tmp_path / name for name in (CONFIG, WEIGHTS, CURVE)]
    for file in files:
        file.write_bytes(b"x")
    packed = pack_files(files)
    made._hear_of(1, made._peers[1], message(do="made", size=len(packed), report={"held_out": []}))
    made._hear_of(1, made._peers[1], message(packed, do="data", at=0))
    assert made._peers[1].folder == tmp_path / "nodes" / "1"
    assert (tmp_path / "nodes" / "1" / "adapter" / WEIGHTS).read_bytes() == b"x"


def test_a_peer_whose_device_was_taken_is_waited_for_and_had_again(tmp_path: Path) -> None:
    made, messenger = owner_of(tmp_path, "a")
    peer = made._peers[1]
    told = {"member": 1, "node": "a", "address": "", "left_out": "", "memory_bytes": 1, "speed": 1.0}
    peer.out, peer.away_since = "the data's owner could not reach it", 1.0
    made._place([told])
    made._dial()
    assert (peer.address, messenger.dropped) == ("", [1])
    peer.away_since = 1.0  # long ago
    made._place([told | {"address": "host:2"}])
    assert (peer.out, peer.pending) == ("", True)
    assert time.monotonic() - peer.away_since < 60.0


def test_a_ticket_is_read_as_it_was_left(tmp_path: Path) -> None:
    settings = Settings(steps=3, targets=("q_proj", "v_proj"), memory=("int4",))
    ticket = Ticket(Path("/d.jsonl"), None, None, Path("/out"), settings, 5, How.TIES, 60.0)
    name = ticket.leave(tmp_path / "tickets")
    told = json.loads((tmp_path / "tickets" / f"{name}.json").read_bytes())
    assert Ticket.read(told) == ticket
    for damaged in ({}, told | {"how": "magic"}, told | {"more": 1}, told | {"settings": asdict(settings) | {"x": 1}}):
        with pytest.raises(TrainingError, match="the ticket is none"):
            Ticket.read(damaged)
