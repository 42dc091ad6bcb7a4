"""A model's files, lent over real links: what is read is what the lender has, and no more of it comes than is read."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.lending import mirror
from motley.daemon.lending.borrower import Borrower
from motley.daemon.lending.lender import Lender, membership, serve
from motley.daemon.lending.mirror import PAGE, Mirror, borrowed_place, found_mirrors, sweep_mirrors
from motley.daemon.lending.wire import (
    MOST_BYTES,
    Files,
    Kind,
    LendingError,
    LentFile,
    pack,
    pack_stretches,
    read,
    read_stretches,
)
from motley.daemon.loading.planned import stamp_of
from motley.daemon.machine.files import lock_file
from motley.daemon.models.files import load_tokenizer, open_model, open_weights
from motley.daemon.weights.hub import files_of
from motley.daemon.weights.spec import Piece
from motley.orchestrator.trust.certificates import issue_credentials
from motley.protocol import mesh_pb2 as pb
from motley.transport import Listener, Messenger, Tls
from motley.transport.messages import Event
from tests.e2e.processes import BUNDLED
from tests.models.cases import GOLDEN
from tests.models.to_gguf import to_gguf

LIMIT = 1 << 30


class Stopped(Exception):
    """The test wants no more to be lent."""


class Stoppable(Messenger):
    """Lends until it is told otherwise."""

    stopped = False

    def receive(self, timeout_s: float) -> list[Event]:
        if self.stopped:
            raise Stopped
        return super().receive(min(timeout_s, 0.01))


@contextmanager
def lent(place: Path) -> Iterator[pb.Loan]:
    """A model that a thread lends to one borrower at a time."""
    credentials = issue_credentials("loan", 2)
    with closing(Lender(place)) as lender, closing(Listener("127.0.0.1")) as listener:
        own = credentials[0]
        protection = Tls(own.certificate, own.key, own.authority)
        messenger = Stoppable(membership("loan", 0, 2, bytes(32)), protection, listener=listener, accepts=[1])

        def work() -> None:
            with closing(messenger), suppress(Stopped):
                serve(lender, messenger)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield pb.Loan(
                id="loan",
                node="pc",
                address=f"127.0.0.1:{listener.port}",
                files=lender.files.key,
                member=1,
                members=2,
                secret=bytes(32),
                tls=credentials[1],
            )
        finally:
            messenger.stopped = True
            thread.join(30)
            assert not thread.is_alive()


def a_file(folder: Path, size: int) -> Path:
    """A model's folder, with a file of weights of so many random bytes."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(np.random.default_rng(size).bytes(size))
    return folder


class Borrowing(NamedTuple):
    """A loan, and what is lent."""

    file: Path
    loan: pb.Loan

    def __repr__(self) -> str:
        return str(self.file)


@pytest.fixture(scope="module")
def borrowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Borrowing]:
    """A file of several pages, the last one not whole, and a loan of it."""
    folder = a_file(tmp_path_factory.mktemp("lent") / "model", 20 * PAGE + 77)
    with lent(folder) as loan:
        yield Borrowing(folder / "model.safetensors", loan)


@given(
    reads=st.lists(
        st.lists(st.tuples(st.integers(0, 20 * PAGE + 76), st.integers(0, 3 * PAGE)), max_size=4), max_size=6
    ),
    again=st.sets(st.integers(0, 5)),
    damaged=st.sets(st.integers(0, 20 * PAGE + 76), max_size=3),
)
def test_what_is_read_is_what_is_lent(
    borrowing: Borrowing,
    tmp_path_factory: pytest.TempPathFactory,
    reads: list[list[tuple[int, int]]],
    again: set[int],
    damaged: set[int],
) -> None:
    """Whole pages come, each once, also over several starts; those that were damaged between them come again."""
    data, loan = borrowing.file.read_bytes(), borrowing.loan
    shares = tmp_path_factory.mktemp("shares")
    here, fetched = set[int](), 0
    borrower = Borrower(loan, shares, LIMIT)
    try:
        for number, stretches in enumerate(reads):
            if number in again:
                fetched += borrower.fetched
                borrower.close()
                place = borrowed_place(shares, loan.files) / "model.safetensors"
                touched = {at // PAGE for at in damaged}
                content = bytearray(place.read_bytes())
                for page in touched:
                    at = min(len(content) - 1, page * PAGE + 5)
                    content[at] = (content[at] + 1) % 256  # as often as it may be, never back to what it was
                place.write_bytes(content)
                here -= touched
                borrower = Borrower(loan, shares, LIMIT)
            wanted = [(offset, min(length, len(data) - offset)) for offset, length in stretches]
            before = borrower.fetched
            borrower.bring(borrower.place / "model.safetensors", wanted)
            content = bytearray((borrower.place / "model.safetensors").read_bytes())
            assert all(content[at : at + size] == data[at : at + size] for at, size in wanted)
            pages = {page for at, size in wanted if size for page in range(at // PAGE, -(-(at + size) // PAGE))}
            came = sum(min(len(data), (page + 1) * PAGE) - page * PAGE for page in pages - here)
            assert borrower.fetched - before == came
            here |= pages
    finally:
        borrower.close()
    assert (borrowed_place(shares, loan.files) / "config.json").read_text() == "{}"


FORMS = {
    "safetensors": lambda folder: GOLDEN / "llama-mqa",
    "mxfp4": lambda folder: GOLDEN / "gpt-oss-mxfp4",
    "gguf": lambda folder: to_gguf(BUNDLED, folder / "m.gguf", lambda name: GGMLQuantizationType.Q8_0),
    "gguf in parts": lambda folder: to_gguf(BUNDLED, folder / "m-00001-of-00009.gguf", parts=9),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_borrowed_model_is_the_same_model(form: str, tmp_path: Path) -> None:
    """Of every form of files: description, fingerprint, stamp and weights; also when it is not lent any more."""
    place = FORMS[form](tmp_path)
    if not place.exists():
        place = next(tmp_path.glob("*-00001-of-*"))
    with lent(place) as loan, Borrower(loan, tmp_path / "shares", LIMIT) as borrower:
        with open_model(place) as own, open_model(borrower.place, borrower.bring) as borrowed:
            assert borrowed.model == own.model
            assert borrowed.source.fingerprint() == own.source.fingerprint()
            assert borrowed.source.stamp() == own.source.stamp()
            whole = sum(file.stat().st_size for file in files_of(place))
            assert borrower.fetched < whole or whole < 40 * PAGE
            rows, columns = own.source.shape("model.embed_tokens.weight")
            for piece in (
                Piece("model.embed_tokens.weight", range(0, rows, 3), range(columns)),
                Piece("model.layers.0.self_attn.q_proj.weight", range(4), range(columns // 2)),
            ):
                assert np.array_equal(borrowed.source.read(piece), own.source.read(piece))
        borrower.end()
        with open_weights(borrower.place) as kept, open_weights(place) as own:
            assert kept.fingerprint() == own.fingerprint()
        if place.is_file():
            text = "To be, or not to be"
            there = borrowed_place(tmp_path / "shares", loan.files)
            assert load_tokenizer(there).encode(text) == load_tokenizer(place).encode(text)


def test_only_the_read_part_of_a_wide_matrix_comes(tmp_path: Path) -> None:
    """Half of the columns of a matrix of 4096 halves is little more than half of its bytes."""
    from safetensors.numpy import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    matrix = np.random.default_rng(1).standard_normal((64, 4096)).astype(np.float16)
    save_file({"w": matrix}, folder / "model.safetensors")
    with lent(folder) as loan, Borrower(loan, tmp_path / "shares", LIMIT) as borrower:
        with open_weights(borrower.place, borrower.bring) as weights:
            half = weights.read(Piece("w", range(64), range(2048)))
        assert np.array_equal(half, matrix[:, :2048])
        assert borrower.fetched < 0.6 * matrix.nbytes


def test_a_lender_that_is_gone_is_named_and_what_came_is_kept(tmp_path: Path) -> None:
    folder = a_file(tmp_path / "model", 8 * PAGE)
    with lent(folder) as loan:
        borrower = Borrower(loan, tmp_path / "shares", LIMIT)
        file = borrower.place / "model.safetensors"
        borrower.bring(file, [(0, 2 * PAGE)])
    with closing(borrower):
        borrower.bring(file, [(0, 2 * PAGE)])
        with pytest.raises(LendingError, match=r"node 'pc'.*lost|does not lend the model any more"):
            borrower.bring(file, [(0, 3 * PAGE)])
    with lent(folder) as loan, Borrower(loan, tmp_path / "shares", LIMIT) as again:
        again.bring(file, [(0, 3 * PAGE)])
        assert again.fetched == PAGE


def test_other_files_than_were_planned_are_refused(tmp_path: Path) -> None:
    with lent(a_file(tmp_path / "model", PAGE)) as loan:
        loan.files = "0" * 64
        with pytest.raises(LendingError, match="lends other files than were planned"):
            Borrower(loan, tmp_path / "shares", LIMIT)


def test_a_file_that_has_become_shorter_is_told(tmp_path: Path) -> None:
    folder = a_file(tmp_path / "model", 8 * PAGE)
    with lent(folder) as loan, Borrower(loan, tmp_path / "shares", LIMIT) as borrower:
        os.truncate(folder / "model.safetensors", PAGE)
        with pytest.raises(LendingError, match="has become shorter"):
            borrower.bring(borrower.place / "model.safetensors", [(4 * PAGE, 10)])


def test_a_full_disk_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with lent(a_file(tmp_path / "model", 8 * PAGE)) as loan, Borrower(loan, tmp_path / "shares", LIMIT) as borrower:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Mirror, "fill", full)
        with pytest.raises(LendingError, match=r"No space left on device.*`motley join --cache`"):
            borrower.bring(borrower.place / "model.safetensors", [(0, 10)])


def test_mirrors_that_nobody_uses_make_room(tmp_path: Path) -> None:
    def mirror(name: str, limit: int) -> Mirror:
        return Mirror(tmp_path, Files("", (LentFile(name, 40 * PAGE, 1, 0),)), limit)

    def filled(name: str) -> Path:
        with mirror(name, LIMIT) as made:
            ((path, _),) = made
            made.fill(path, [(0, 40 * PAGE)], memoryview(os.urandom(40 * PAGE)))
            return path

    old, used = filled("old"), filled("used")
    os.utime(old.parents[1] / "files.json", ns=(0, 0))
    with mirror("used", LIMIT), mirror("new", 50 * PAGE):
        assert not old.parents[1].exists()
        assert used.exists(), "it is in use, though the limit is passed"
    assert sorted(found.size for found in found_mirrors(tmp_path))[-1] >= 40 * PAGE
    with mirror("new", PAGE) as new:
        assert not [found for found in found_mirrors(tmp_path) if found.remove()], "one that is used stays"
        ((path, _),) = new
        assert path.exists()
        assert not used.parents[1].exists()


def test_two_processes_that_begin_a_mirror_at_once_write_one_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files("", (LentFile("a", PAGE, 1, 0),))
    others: list[Mirror] = []

    def lock_beside_another(file: IO[bytes], *, exclusive: bool) -> bool:
        monkeypatch.undo()
        others.append(Mirror(tmp_path, files, PAGE))  # has opened, locked and written it meanwhile
        return lock_file(file, exclusive=exclusive)

    monkeypatch.setattr(mirror, "lock_file", lock_beside_another)
    with Mirror(tmp_path, files, PAGE) as own, others[0]:
        assert borrowed_place(tmp_path, files.key) == own.place


def test_a_mirror_that_is_begun_while_another_is_removed_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files("", (LentFile("a", PAGE, 1, 0),))
    with Mirror(tmp_path, files, PAGE):
        pass
    (found,) = found_mirrors(tmp_path)
    begun: list[Mirror] = []

    def remove_late(folder: Path, **_: object) -> None:
        monkeypatch.undo()
        begun.append(Mirror(tmp_path, files, PAGE))
        shutil.rmtree(folder)

    monkeypatch.setattr(shutil, "rmtree", remove_late)
    assert not found.remove(), "it is there again"
    with begun[0]:
        assert borrowed_place(tmp_path, files.key).is_dir()


def test_what_an_interrupted_removal_leaves_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Mirror(tmp_path, Files("", (LentFile("a", PAGE, 1, 0),)), PAGE):
        pass
    (tmp_path / "borrowed" / "begun").mkdir()
    (found,) = found_mirrors(tmp_path)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(shutil, "rmtree", lambda folder, **_: None)
        found.remove()
    assert not found_mirrors(tmp_path)
    assert len(list((tmp_path / "borrowed").iterdir())) == 2
    sweep_mirrors(tmp_path)
    assert not list((tmp_path / "borrowed").iterdir())


def test_a_damaged_list_of_files_is_written_anew(tmp_path: Path) -> None:
    files = Files("", (LentFile("a", PAGE, 1, 0),))
    with Mirror(tmp_path, files, PAGE):
        pass
    (listed,) = tmp_path.rglob("files.json")
    for damaged in (listed.read_bytes() * 2, b""):
        listed.write_bytes(damaged)
        with Mirror(tmp_path, files, PAGE) as own:
            assert borrowed_place(tmp_path, files.key) == own.place


def test_a_mirror_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(LendingError, match="what was borrowed of a model is gone"):
        borrowed_place(tmp_path, "0" * 64)


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\x09\x00\x00\x00\x00",
        pack(Kind.BYTES),
        pack(Kind.READ, 7) + pack_stretches([(0, 1)]),
        pack(Kind.READ, 1) + pack_stretches([(8 * PAGE - 1, 2)]),
        pack(Kind.READ, 1) + pack_stretches([(0, 8 * PAGE)] * (MOST_BYTES // (8 * PAGE) + 1)),
        pack(Kind.READ, 1) + b"abc",
    ],
)
def test_a_question_that_makes_no_sense_is_refused(question: bytes, tmp_path: Path) -> None:
    with closing(Lender(a_file(tmp_path / "model", 8 * PAGE))) as lender:
        kind, _, why = read(memoryview(b"".join(lender.answer(memoryview(question)))))
        assert kind is Kind.REFUSED
        assert why


@given(body=st.binary(max_size=200))
def test_stretches_of_any_bytes_are_in_the_file_or_refused(body: bytes) -> None:
    try:
        stretches = read_stretches(memoryview(body), 1000)
    except LendingError:
        return
    assert all(offset >= 0 and offset + length <= 1000 for offset, length in stretches)


GOOD = {"main": "", "files": [{"name": "a", "size": 5, "modified": 1, "needed": 5}]}


@pytest.mark.parametrize(
    "change",
    [
        {"main": "b"},
        {"files": [{**GOOD["files"][0], "name": "../a"}]},  # type: ignore[dict-item]
        {"files": [{**GOOD["files"][0], "name": "a\0"}]},  # type: ignore[dict-item]
        {"files": [{**GOOD["files"][0], "needed": 6}]},  # type: ignore[dict-item]
        {"files": [{**GOOD["files"][0], "size": -1}]},  # type: ignore[dict-item]
        {"files": [{**GOOD["files"][0], "size": "5"}]},  # type: ignore[dict-item]
        {"files": [*GOOD["files"], *GOOD["files"]]},
        {"files": [{"name": "a"}]},
        {"files": 3},
    ],
)
def test_lists_of_files_that_make_no_sense_are_refused(change: dict[str, object]) -> None:
    assert Files.read(json.dumps(GOOD).encode()).files[0].name == "a"
    with pytest.raises(LendingError, match="makes no sense"):
        Files.read(json.dumps({**GOOD, **change}).encode())


def test_files_that_others_put_stretches_into_have_not_changed() -> None:
    """Two workers of a machine borrow the same model at a time: one sees a file that the other has just written to."""
    source, borrower = SimpleNamespace(stamp=lambda: json.dumps([["a", 5, 7], ["b", 6, 9]])), SimpleNamespace()
    borrower.modified = {"a": 1, "other": 2}
    assert json.loads(stamp_of(cast(Any, source), cast(Any, borrower))) == [["a", 5, 1], ["b", 6, 9]]
    assert stamp_of(cast(Any, source), None) == source.stamp()
