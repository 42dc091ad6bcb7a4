"""What is remembered of a model that has been read: that it chats, that it does not, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.daemon.node.survey.read_before import FOLDER, ReadBefore
from motley.daemon.weights.cache import ShareCache


@pytest.fixture
def before(tmp_path: Path) -> ReadBefore:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return ReadBefore(str(model), None, ShareCache(tmp_path / "shares"))


def test_it_is_what_was_kept(before: ReadBefore) -> None:
    assert before.chats() is None
    for chats in (True, False):
        before.keep(chats)
        assert before.chats() is chats


@pytest.mark.parametrize("left", [b"", b"ch", bytes(5)])
def test_what_a_full_disk_or_a_power_cut_leaves_of_a_note_says_nothing(
    left: bytes, before: ReadBefore, tmp_path: Path
) -> None:
    before.keep(True)
    (note,) = (tmp_path / "shares" / FOLDER).iterdir()
    note.write_bytes(left)
    assert before.chats() is None
