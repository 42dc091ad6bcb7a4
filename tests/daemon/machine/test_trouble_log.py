"""What a process says of trouble in the background: few lines of each kind, with the time."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator

import pytest

from motley.daemon.machine import trouble_log
from motley.daemon.machine.trouble_log import KINDS, LINES, WINDOW_S, TroubleLog


class Told:
    """A log that listens to one logger, what it has written, and its clock."""

    def __init__(self, log: logging.Logger) -> None:
        self.now = 0.0
        self.lines: list[str] = []
        self.handler = TroubleLog(lambda text, level: self.lines.append(text), lambda: self.now)
        self.log = log
        log.addHandler(self.handler)
        log.propagate = False


@pytest.fixture
def heard() -> Iterator[Callable[[str], Told]]:
    made = []

    def hear(name: str) -> Told:
        made.append(Told(logging.getLogger(name)))
        return made[-1]

    yield hear
    for told in made:
        told.log.removeHandler(told.handler)
        told.log.propagate = True


def test_of_ten_thousand_alike_few_are_written_and_the_others_counted(heard: Callable[[str], Told]) -> None:
    told = heard("motley.door")

    def refuse(times: int) -> None:
        for number in range(times):
            told.log.warning("refused %s", number)

    refuse(10_000)
    assert len(told.lines) == LINES
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d refused 0", told.lines[0])
    assert told.lines[-1].endswith("(more like this are left out for 60 s)")
    told.now = WINDOW_S + 1
    refuse(1)
    assert told.lines[-1].endswith(f"refused 0 ({10_000 - LINES} more like this were left out)")
    told.now = 3 * WINDOW_S
    refuse(1)
    assert told.lines[-1].endswith("refused 0")


def test_other_trouble_and_other_nodes_are_told_meanwhile(heard: Callable[[str], Told]) -> None:
    told = heard("motley.door")
    for _ in range(100):
        told.log.warning("refused %s", "x")
    for node in ("pc", "box"):
        told.log.warning("node %s is lost", node, extra={"node": node})
    assert [line[20:] for line in told.lines[LINES:]] == ["node pc is lost", "node box is lost"]


def test_the_first_error_of_a_kind_has_its_traceback_and_the_others_a_line(heard: Callable[[str], Told]) -> None:
    told = heard("motley.api")
    for number in range(LINES):
        try:
            raise ValueError(f"number {number}\nand more")
        except ValueError:
            told.log.exception("%s failed\nin %d", "it", number)
    assert told.lines[0].splitlines()[0].endswith("it failed: ValueError: number 0")
    assert told.lines[0].splitlines()[1] == "Traceback (most recent call last):"
    assert told.lines[1][20:] == "it failed: ValueError: number 1"


def test_what_strangers_sent_has_no_traceback_and_says_whose_trouble_it_is(heard: Callable[[str], Told]) -> None:
    told = heard("aiohttp.server")
    try:
        raise ValueError("x" * 100_000)
    except ValueError:
        told.log.exception("Error handling request from %s", "192.168.1.7")
    (line,) = told.lines
    assert line[20:].startswith("aiohttp.server: Error handling request from 192.168.1.7: ValueError: xxx")
    assert len(line) < 2000


def test_what_strangers_sent_steers_no_terminal(heard: Callable[[str], Told]) -> None:
    told = heard("motley.door")
    told.log.warning("refused %s", "\x1b[2Jgood\r\x9b31mwörk\u202e")
    (line,) = told.lines
    assert line[20:] == r"refused \x1b[2Jgood\r\x9b31mwörk\u202e"


def test_kinds_that_only_differ_by_a_number_are_one_and_there_are_not_endless_others(
    heard: Callable[[str], Told],
) -> None:
    told = heard("asyncio")
    for number in range(100):
        told.log.error(f"Exception in callback <Handle at 0x{number:x}>")
    assert len(told.lines) == LINES
    words = [f"{a}{b}{c}" for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"]
    for word in words:
        told.log.error(word)
    assert len(told.lines) == LINES + KINDS - 1 + LINES
    told.now = WINDOW_S + 1
    told.log.error("new")
    assert told.lines[-1][20:] == "asyncio: new"


def test_a_record_that_cannot_be_formatted_is_no_error_of_who_logs(
    heard: Callable[[str], Told], capsys: pytest.CaptureFixture[str]
) -> None:
    told = heard("motley.api")
    told.log.warning("%d", "no number")
    told.log.warning("next")
    assert [line[20:] for line in told.lines] == ["next"]
    assert "Logging error" in capsys.readouterr().err


def test_the_whole_process_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(trouble_log.logging, "getLogger", lambda: root)
    TroubleLog(lambda text, level: None).listen()
    assert len(root.handlers) == 1
