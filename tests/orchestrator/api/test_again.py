"""A request with an Idempotency-Key, made again: the same answer from the first piece on, and nothing computed anew."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from motley.orchestrator.api.access.callers import Caller
from motley.orchestrator.serving.answering import kept_answers
from motley.orchestrator.serving.answering.kept_answers import KeptAnswer, KeptAnswers
from motley.orchestrator.store.keys import Scope
from motley.protocol.mesh_pb2 import Delta, Described, Generate

from ..conftest import small_profile

ASKED = {"model": "bard", "prompt": "Once", "max_tokens": 20}
WORDS = ["Once ", "upon ", "a ", "time"]


def keyed(key: str, **more: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **more}


class Teller:
    """Tells `WORDS`, from where the answer stands; after some of them it waits until it may go on."""

    def __init__(self, pause_at: int = 99) -> None:
        self.pause_at = pause_at
        self.paused = asyncio.Event()

    async def __call__(self, generate: Generate) -> AsyncIterator[Delta]:
        for number in range(len(generate.written), len(WORDS)):
            if number == self.pause_at:
                self.paused.set()
                await asyncio.sleep(3600)
            yield Delta(text=WORDS[number], ids=[number])
        yield Delta(finish="stop", prompt_tokens=5, completion_tokens=4, prefill_s=0.1)


async def begun(mesh: Any, key: str, teller: Teller, **body: Any) -> Any:
    """A streamed answer, of which as much has come as comes without a pause."""
    response = await mesh.http.post("/v1/completions", json={**ASKED, "stream": True, **body}, headers=keyed(key))
    async with asyncio.timeout(10):
        await teller.paused.wait()
    return response


async def events(response: Any) -> list[tuple[int, dict[str, Any] | str]]:
    """The events of a stream that has numbers: number and data of each."""
    found = []
    for block in (await response.text()).split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in fields:
            data = fields["data"]
            found.append((int(fields["id"]), data if data == "[DONE]" else json.loads(data)))
    return found


def text_of(told: list[tuple[int, Any]]) -> str:
    return "".join(choice["text"] for _, event in told if event != "[DONE]" for choice in event["choices"])


async def test_an_answer_goes_on_where_its_connection_died(mesh: Any, bard: Any) -> None:
    bard.answer = teller = Teller(pause_at=2)
    first = await begun(mesh, "k1", teller)
    line, _ = [await first.content.readuntil(b"\n\n") for _ in range(2)]
    named = json.loads(line.split(b"data: ")[1])["id"]
    first.close()
    teller.pause_at = 99
    again = await mesh.http.post("/v1/completions", json={**ASKED, "stream": True}, headers=keyed("k1"))
    told = await events(again)
    assert text_of(told) == "Once upon a time"
    assert [number for number, _ in told] == list(range(1, len(told) + 1))
    assert {event["id"] for _, event in told if event != "[DONE]"} == {named}
    assert [list(generate.written) for generate in bard.generated] == [[], [0, 1]]
    assert bard.generated[0].sampling.seed == bard.generated[1].sampling.seed, "it was drawn once"


async def test_only_what_the_client_lacks_comes_again(mesh: Any, bard: Any) -> None:
    bard.answer = teller = Teller(pause_at=3)
    (await begun(mesh, "k1", teller)).close()
    teller.pause_at = 99
    headers = keyed("k1", **{"Last-Event-ID": "2"})
    again = await mesh.http.post("/v1/completions", json={**ASKED, "stream": True}, headers=headers)
    told = await events(again)
    assert told[0][0] == 3
    assert text_of(told) == "a time"


async def test_a_complete_answer_is_told_again_by_nobody_but_us(mesh: Any, bard: Any) -> None:
    bard.answer = Teller()
    bodies = []
    for _ in range(3):
        async with mesh.http.post("/v1/completions", json={**ASKED, "n": 2}, headers=keyed("k1")) as response:
            bodies.append(await response.json())
    assert len(bard.generated) == 2
    assert [choice["text"] for choice in bodies[0]["choices"]] == ["Once upon a time"] * 2
    assert bodies[0]["usage"] == bodies[2]["usage"]
    assert len({body["id"] for body in bodies}) == 1
    assert all(body["choices"] == bodies[0]["choices"] for body in bodies)


async def test_of_several_answers_only_those_that_lack_something_are_asked_for(mesh: Any, bard: Any) -> None:
    done, waiting = Teller(), Teller(pause_at=1)

    def tell(generate: Generate) -> AsyncIterator[Delta]:
        return (done if len(bard.generated) == 1 else waiting)(generate)

    bard.answer = tell
    first = await begun(mesh, "k1", waiting, n=2)
    seen = b""
    async for line in first.content:
        seen += line
        if b'"finish_reason": "stop"' in seen and seen.count(b"Once ") == 2:
            break
    first.close()
    waiting.pause_at = 99
    async with mesh.http.post("/v1/completions", json={**ASKED, "n": 2, "stream": True}, headers=keyed("k1")) as again:
        told = await events(again)
    for index in (0, 1):
        own = [each for each in told if each[1] != "[DONE]" and each[1]["choices"][0]["index"] == index]
        assert text_of(own) == "Once upon a time"
    assert [list(generate.written) for generate in bard.generated] == [[], [], [0]]


async def test_whoever_asks_last_gets_the_answer(mesh: Any, bard: Any) -> None:
    """The first connection may be dead without our knowing; it is ended."""
    bard.answer = teller = Teller(pause_at=2)
    first = await begun(mesh, "k1", teller)
    teller.pause_at = 99
    async with mesh.http.post("/v1/completions", json={**ASKED, "stream": True}, headers=keyed("k1")) as again:
        assert text_of(await events(again)) == "Once upon a time"
    with pytest.raises(Exception, match=r".*"):
        await first.read()


async def test_a_key_is_for_one_request(mesh: Any, bard: Any) -> None:
    for prompt, status in (("one", 200), ("two", 422)):
        asked = {**ASKED, "prompt": prompt}
        async with mesh.http.post("/v1/completions", json=asked, headers=keyed("k1")) as response:
            body = await response.json()
            assert response.status == status
    assert body["error"]["code"] == "idempotency_key_reused"


async def test_somebody_elses_answer_is_not_taken_by_the_same_key(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two who number their keys, say."""
    for name in ("anna", "ben"):
        monkeypatch.setattr("motley.orchestrator.api.access.guard.LOCAL", Caller(name, Scope.USE))
        asked = {**ASKED, "prompt": name}
        async with mesh.http.post("/v1/completions", json=asked, headers=keyed("1")) as response:
            assert response.status == 200
    assert [generate.prompt for generate in bard.generated] == ["anna", "ben"]


async def test_another_model_of_the_same_name_goes_on_with_nothing(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node("pc"))
    asked = {"json": ASKED, "headers": keyed("k1")}
    for fingerprint in ("f1", "f1", "f2"):
        other = small_profile()
        other.fingerprint = fingerprint
        node.on_describe = lambda _, other=other: Described(profile=other)
        node.answer = Teller()
        session = await mesh.serve()
        async with mesh.http.post("/v1/completions", **asked) as response:
            assert response.status == 200
        assert (await mesh.call("DELETE", f"/api/sessions/{session['id']}"))[0] == 200
    assert len(node.generated) == 2, "the second was told again, the third was asked for anew"
    assert not node.generated[1].written


async def test_a_failed_request_is_tried_anew(mesh: Any, bard: Any) -> None:
    async def refuse(generate: Generate) -> AsyncIterator[Delta]:
        delta = Delta(finish="error")
        delta.failure.code, delta.failure.message = "invalid_request", "no"
        yield delta

    bard.answer = refuse
    async with mesh.http.post("/v1/completions", json=ASKED, headers=keyed("k1")) as response:
        assert response.status == 400
    bard.answer = Teller()
    async with mesh.http.post("/v1/completions", json={**ASKED, "prompt": "other"}, headers=keyed("k1")) as response:
        assert response.status == 200


@pytest.mark.parametrize("headers", [keyed("with space"), keyed("x" * 256), keyed("k", **{"Last-Event-ID": "-1"})])
async def test_headers_that_make_no_sense_are_refused(headers: dict[str, str], mesh: Any, bard: Any) -> None:
    async with mesh.http.post("/v1/completions", json=ASKED, headers=headers) as response:
        assert response.status == 400
    assert not bard.generated


async def keep_one(folder: Path) -> None:
    answers = KeptAnswers(folder)
    kept = await answers.take("k1", "d", "cmpl-1")
    kept.ask([Generate(prompt="Once", echo=True)])
    kept.put(0, Delta(text="Once", ids=[7]))
    kept.put(0, Delta(text=" upon", ids=[8, 9]))
    answers.let_go(kept)


async def test_answers_outlive_the_process(tmp_path: Path) -> None:
    """As far as they were written: a piece whose end is missing is dropped; what comes next is behind the others."""
    await keep_one(tmp_path)
    (file,) = (tmp_path / "answers").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    whole = file.read_bytes()
    for missing in (0, 1, 5):
        file.write_bytes(whole[: len(whole) - missing])
        answers = KeptAnswers(tmp_path)
        kept = await answers.take("k1", "d", "another")
        assert kept.id == "cmpl-1"
        assert list(kept.generates[0].written) == ([7] if missing else [7, 8, 9])
        assert not kept.generates[0].echo
        kept.put(0, Delta(text="!", finish="stop"))
        answers.let_go(kept)
        answers = KeptAnswers(tmp_path)
        again = await answers.take("k1", "d", "another")
        answers.let_go(again)
        assert [delta.text for _, delta in again.deltas()] == ["Once", *([] if missing else [" upon"]), "!"]
        assert again.finished == {0}


async def taken_up(folder: Path) -> KeptAnswer:
    """What the next orchestrator knows."""
    answers = KeptAnswers(folder)
    kept = await answers.take("k1", "d", "another")
    answers.let_go(kept)
    return kept


class FullDisk(io.FileIO):
    """A file of which so many bytes more can be written."""

    def __init__(self, file: Path, room: int) -> None:
        super().__init__(file, "r+")
        self.room = room
        self.seek(0, os.SEEK_END)

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "no space left")
        written = super().write(data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 4, 14])
async def test_nothing_is_written_behind_what_a_full_disk_has_not_taken(tmp_path: Path, room: int) -> None:
    await keep_one(tmp_path)
    answers = KeptAnswers(tmp_path)
    (file,) = (tmp_path / "answers").iterdir()
    kept = await answers.take("k1", "d", "another")
    kept.close_file()
    kept.file = FullDisk(file, room)
    kept.put(0, Delta(text=" a", ids=[10]))
    answers.let_go(kept)
    await answers.take("k1", "d", "another")  # when there is room again
    kept.put(0, Delta(text=" time", ids=[11]))
    answers.let_go(kept)
    assert [delta.text for _, delta in kept.deltas()] == ["Once", " upon", " a", " time"]
    again = await taken_up(tmp_path)
    assert [delta.text for _, delta in again.deltas()] == ["Once", " upon"]
    assert list(again.generates[0].written) == [7, 8, 9]


async def test_nothing_is_written_behind_what_came_while_the_file_could_not_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await keep_one(tmp_path)
    answers = KeptAnswers(tmp_path)

    def run_out(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", run_out)
        kept = await answers.take("k1", "d", "another")
    kept.put(0, Delta(text=" a", ids=[10]))
    answers.let_go(kept)
    await answers.take("k1", "d", "another")
    kept.put(0, Delta(text=" time", ids=[11]))
    answers.let_go(kept)
    again = await taken_up(tmp_path)
    assert [delta.text for _, delta in again.deltas()] == ["Once", " upon"]


async def test_a_file_that_holds_no_answer_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "answers").mkdir()
    for name, content in (("a", b"{}\n"), ("b", b"\xff"), ("c", b'{"key":"k","digest":"d","id":"i","created":1}\n')):
        (tmp_path / "answers" / f"{name}.answer").write_bytes(content)
    KeptAnswers(tmp_path)
    assert not list((tmp_path / "answers").iterdir())
    assert caplog.text.count("cannot be taken up") == 3


async def test_what_is_old_or_too_much_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "MOST", 3)
    answers = KeptAnswers(tmp_path)
    for number in range(6):
        kept = await answers.take(f"k{number}", "d", "id")
        kept.ask([Generate()])
        kept.put(0, Delta(text="x", ids=[1]))
        kept.used = number
        answers.let_go(kept)
    assert len(list((tmp_path / "answers").iterdir())) <= 3
    monkeypatch.setattr(kept_answers, "KEEP_S", -1.0)
    new = await answers.take("new", "d", "id")
    assert len(list((tmp_path / "answers").iterdir())) == 1
    answers.let_go(new)


async def test_an_answer_whose_taker_gave_up_is_forgotten_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes an answer waits for the one before to leave, and may go meanwhile."""
    answers, given, leaving = KeptAnswers(tmp_path), asyncio.Event(), asyncio.Event()

    async def give() -> None:
        kept = await answers.take("k1", "d", "id")
        kept.put(0, Delta(text="x", ids=[1]))
        given.set()
        try:
            await asyncio.Event().wait()
        finally:
            await leaving.wait()
            answers.let_go(kept)

    first = asyncio.create_task(give())
    await given.wait()
    second = asyncio.create_task(answers.take("k1", "d", "id"))
    await asyncio.sleep(0)
    second.cancel()
    leaving.set()
    await asyncio.wait({first, second})
    monkeypatch.setattr(kept_answers, "KEEP_S", -1.0)
    answers.forget_old()
    assert not list((tmp_path / "answers").iterdir())


async def test_what_nobody_asks_for_any_more_goes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From memory and from the disk, when it is looked for and when an orchestrator starts."""
    await keep_one(tmp_path)
    answers = KeptAnswers(tmp_path)
    (file,) = (tmp_path / "answers").iterdir()
    monkeypatch.setattr(kept_answers, "KEEP_S", -1.0)
    monkeypatch.setattr(kept_answers, "LOOK_S", 0.0)
    looked, forget_old = asyncio.Event(), answers.forget_old
    monkeypatch.setattr(answers, "forget_old", lambda: (forget_old(), looked.set()))
    watching = asyncio.create_task(answers.watch())
    await asyncio.wait_for(looked.wait(), 10)
    watching.cancel()
    assert not file.exists()
    await keep_one(tmp_path)
    assert file.exists()
    KeptAnswers(tmp_path)
    assert not file.exists()


async def test_what_is_kept_takes_little_more_memory_than_its_bytes(tmp_path: Path) -> None:
    """A parsed message takes fifty times as much: an orchestrator grew by a gigabyte an hour."""
    answers = KeptAnswers(None)
    kept = await answers.take("k1", "d", "cmpl-1")
    kept.ask([Generate(prompt="Once")])
    piece = Delta(text=" upon", ids=[8])
    held = sys.getrefcount(piece)
    before = len(kept.pieces)
    kept.put(0, piece)
    assert sys.getrefcount(piece) == held
    assert piece.ByteSize() < len(kept.pieces) - before < piece.ByteSize() + 10
    assert kept.deltas() == [(0, piece)]
