"""What workers of a job hand each other, and tickets: as they went, and refused where they are something else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.training.errors import TrainingError
from motley.training.examples import Example
from motley.training.merging import How
from motley.training.mesh.talk import heard, pack_examples, pack_files, unpack_examples, unpack_files
from motley.training.mesh.ticket import Ticket
from motley.training.settings import Settings


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


def test_a_ticket_is_read_as_it_was_left(tmp_path: Path) -> None:
    settings = Settings(steps=3, targets=("q_proj", "v_proj"), memory=("int4",))
    ticket = Ticket(Path("/d.jsonl"), None, None, Path("/out"), settings, 5, How.TIES, 60.0)
    name = ticket.leave(tmp_path / "tickets")
    told = json.loads((tmp_path / "tickets" / f"{name}.json").read_bytes())
    assert Ticket.read(told) == ticket
    for damaged in ({}, told | {"how": "magic"}, told | {"more": 1}, told | {"settings": asdict(settings) | {"x": 1}}):
        with pytest.raises(TrainingError, match="the ticket is none"):
            Ticket.read(damaged)
