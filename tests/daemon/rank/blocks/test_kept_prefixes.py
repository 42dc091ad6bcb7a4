"""Prefixes that are kept on disks: the next session begins with them, and its texts are what they would have been."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.blocks import kept_file, kept_prefixes
from motley.daemon.rank.blocks.far_file import DiskFull
from motley.daemon.rank.blocks.kept_block import (
    FIRST,
    KeptBlock,
    decode_blocks,
    found_in,
    label_bytes,
    plan_of,
    what_of,
)
from motley.daemon.rank.blocks.kept_file import KeptFile, kept_files, plan_key
from motley.daemon.rank.steps import Able, Keep, Restore
from motley.plugins.engine import CacheBlocks, CacheSpec
from motley.protocol import mesh_pb2 as pb
from tests.daemon.rank.test_scheduler import WINDOWED, Session, assert_as_alone, drawn_requests, request

BLOCKS = CacheBlocks(20, 5)
KEY = f"{7:064x}"
SYSTEM = [*range(30, 70)]
"""A prompt that is known: eight whole blocks."""
A_LOT = 1 << 40


def key_of(rank: int) -> str:
    return f"{rank + 1:016x}{0:048x}"


@contextmanager
def kept(folder: Path, blocks: CacheBlocks = BLOCKS, ranks: int = 1) -> Iterator[list[KeptFile]]:
    """The files of some ranks, as `Session` has them."""
    layers = [CacheSpec(0, 1, 2), *([CacheSpec(1, 1, 2, blocks.window)] if blocks.windowed else [])]
    with ExitStack() as stack:
        files = [KeptFile(folder / str(rank), key_of(rank), blocks, layers, A_LOT) for rank in range(ranks)]
        for file in files:
            stack.callback(file.close)
        yield files


def answered(session: Session, prompt: Sequence[int] = (*SYSTEM, 7)) -> int:
    """How many tokens of a prompt a session finds; its text is as it has to be."""
    asked = request("asked", prompt, 5)
    session.run([asked])
    session._scheduler.keep_prefixes(1e9)
    assert_as_alone(session, [asked], most=[engine.most_spans for engine in session.engines])
    return session.cached.get("asked", 0)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_next_session_begins_with_what_this_one_knew(ranks: int, tmp_path: Path) -> None:
    most = [16] * ranks
    found = []
    for prompt in ([*SYSTEM, 7], [*SYSTEM, 8, 9], [*SYSTEM, 7, 100, 101]):
        with kept(tmp_path, ranks=ranks) as files:
            found.append(answered(Session(most, BLOCKS, kept=files), prompt))
    assert found == [0, 40, 41]


def test_a_known_prompt_is_read_before_the_first_request(tmp_path: Path) -> None:
    """What a request that comes at once could not find, it would compute."""
    with kept(tmp_path) as files:
        answered(Session((16,), BLOCKS, kept=files))
    with kept(tmp_path) as files, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_prefixes, "PIECE_BYTES", 1)  # in many pieces
        assert answered(Session((16,), BLOCKS, kept=files)) == 40


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("block", "found"), [(0, 0), (3, 15), (7, 35)])
def test_a_damaged_block_is_computed_again(
    rank: int, block: int, found: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And so are those that hang on it, on whichever rank it is."""
    with kept(tmp_path, ranks=2) as files:
        session = Session((16, 16), BLOCKS, kept=files)
        answered(session)
        numbers = [each.number for each in found_in(files[0].blocks(), plan_of([file.plan for file in files]))]
        assert len(numbers) >= 8
    with (path := Path(files[rank]._file.name)).open("r+b") as file:
        file.seek((numbers[block] + 1) * files[rank].size // BLOCKS.count - 3)
        flipped = bytes([file.read(1)[0] ^ 16])
        file.seek(-1, os.SEEK_CUR)
        file.write(flipped)
    with kept(tmp_path, ranks=2) as files:
        assert answered(Session((16, 16), BLOCKS, kept=files)) == found
    assert f"block {numbers[block]} in {path} is damaged; its tokens are computed again" in caplog.text
    with kept(tmp_path, ranks=2) as files:
        assert answered(Session((16, 16), BLOCKS, kept=files)) == 40, "it has been written again"


def test_what_hangs_on_a_damaged_block_is_not_taken_for_the_beginning_of_a_text(tmp_path: Path) -> None:
    with kept(tmp_path) as files:
        answered(Session((16,), BLOCKS, kept=files))
        first, *_ = found_in(files[0].blocks(), plan_of([files[0].plan]))
    with Path(files[0]._file.name).open("r+b") as file:
        file.seek((first.number + 1) * files[0].size // BLOCKS.count - 3)
        file.write(b"?")
    with kept(tmp_path) as files:
        assert answered(Session((16,), BLOCKS, kept=files), [*SYSTEM[5:], 7]) == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_lost_its_file_has_all_computed_again(rank: int, tmp_path: Path) -> None:
    with kept(tmp_path, ranks=2) as files:
        answered(Session((16, 16), BLOCKS, kept=files))
    Path(files[rank]._file.name).unlink()
    for found in (0, 40):
        with kept(tmp_path, ranks=2) as files:
            assert answered(Session((16, 16), BLOCKS, kept=files)) == found


def test_what_was_kept_when_another_rank_computed_otherwise_is_not_found(tmp_path: Path) -> None:
    """Though this rank's own file is the same."""
    with kept(tmp_path, ranks=2) as files:
        answered(Session((16, 16), BLOCKS, kept=files))
    with kept(tmp_path, ranks=2) as files:
        files[1].plan += 1
        assert answered(Session((16, 16), BLOCKS, kept=files)) == 0


def test_a_disk_that_fails_is_told_and_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("Input/output error")

    with kept(tmp_path, ranks=2) as files:
        session = Session((16, 16), BLOCKS, kept=files)
        with monkeypatch.context() as patch:
            patch.setattr(files[1], "write", full)
            answered(session)
            kept_ones = session._scheduler._kept
            assert kept_ones is not None
            assert kept_ones.trouble == "rank 1: prefixes cannot be kept on the disk: Input/output error"
            assert session._scheduler._activity().trouble == kept_ones.trouble
        session._scheduler.keep_prefixes(1e9)
        assert kept_ones.trouble, "it is not tried at once"
        monkeypatch.setattr(kept_ones, "_due", 0.0)
        session._scheduler.keep_prefixes(1e9)
        assert not kept_ones.trouble
    with kept(tmp_path, ranks=2) as files:
        assert answered(Session((16, 16), BLOCKS, kept=files)) == 40


@given(
    st.data(),
    st.sampled_from(((16,), (16, 3))),
    st.sampled_from((CacheBlocks(60, 1), CacheBlocks(16, 4), CacheBlocks(9, 7), CacheBlocks(3, 7, far=6), *WINDOWED)),
    st.integers(1, 8),
)
def test_texts_are_those_of_requests_alone_whatever_was_kept(
    data: st.DataObject, most: tuple[int, ...], blocks: CacheBlocks, number: int
) -> None:
    """In whatever state sessions end, and whatever becomes of files meanwhile."""
    requests = drawn_requests(data, number)
    known: dict[str, tuple[list[int], str]] = {}
    with TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        folder = Path(temporary)
        patch.setattr(kept_prefixes, "PIECE_BYTES", data.draw(st.sampled_from((1, 200, A_LOT))))
        for _ in range(3):
            now = [each for each in requests if data.draw(st.booleans())]
            arrivals = {each.request_id: data.draw(st.integers(0, 40)) for each in now}
            with kept(folder, blocks, len(most)) as files:
                session = Session(most, blocks, kept=files)
                session.run(now, arrivals)
                session._scheduler.keep_prefixes(1e9 if data.draw(st.booleans()) else 0.0)
            assert_as_alone(session, now, known, most=most, blocks=blocks)
            for file in files:
                path = Path(file._file.name)
                content = bytearray(path.read_bytes())
                for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
                    content[at] ^= data.draw(st.integers(1, 255))
                path.write_bytes(content)


def test_a_label_is_read_as_it_was_written() -> None:
    blocks = [KeptBlock(3, -1, 2**64 - 1, 5, 0, (1, 2, 3)), KeptBlock(0, 7, 1, FIRST, 2**64 - 1, (9,))]
    told = b"".join(block.encode() for block in blocks)
    assert (decode_blocks(told), len(told)) == (blocks, label_bytes(3) + label_bytes(1))
    with pytest.raises(ValueError, match="malformed at 48"):
        decode_blocks(told[:-1])


def test_what_hangs_on_nothing_is_not_found() -> None:
    first = what_of(1, FIRST, 0, (1, 2))
    second = what_of(1, first, 0, (3, 4))
    a, b = KeptBlock(0, -1, first, FIRST, 0, (1, 2)), KeptBlock(1, -1, second, first, 0, (3, 4))
    assert found_in([b, a, a._replace(number=5)], 1) == [a, b]
    assert found_in([b], 1) == []
    assert found_in([a._replace(tokens=(1, 3)), b], 1) == []
    assert found_in([a, b], 2) == []


def test_files_are_as_large_as_the_caches_and_taken_at_once(tmp_path: Path) -> None:
    for blocks in (BLOCKS, CacheBlocks(40, 5, windowed=3, window=4)):
        with kept(tmp_path, blocks) as (file,):
            status = os.stat(file._file.name)
            layers = [CacheSpec(0, 1, 2), *([CacheSpec(1, 1, 2, 4)] if blocks.windowed else [])]
            labels = blocks.count * (8 + label_bytes(5)) + blocks.windowed * 16
            assert status.st_size == file.size == blocks.bytes_of(layers) + labels
            assert (status.st_blocks * 512 >= file.size, status.st_mode & 0o777) == (True, 0o600)
        Path(file._file.name).unlink()


def test_a_full_disk_is_told_before_anything_is_computed(tmp_path: Path) -> None:
    huge = CacheBlocks(1 << 20, 1 << 20)
    with pytest.raises(
        DiskFull, match=r"prefixes of 1099511627776 tokens cannot be kept in .*without keeping prefixes"
    ):
        KeptFile(tmp_path, KEY, huge, [CacheSpec(0, 8, 128)], A_LOT)
    with pytest.raises(DiskFull, match="cannot be kept in /proc/nowhere"):
        KeptFile(Path("/proc/nowhere"), KEY, BLOCKS, [CacheSpec(0, 1, 2)], A_LOT)


def test_sessions_at_the_same_time_have_files_of_their_own(tmp_path: Path) -> None:
    with kept(tmp_path) as (first,), kept(tmp_path) as (second,):
        assert first._file.name != second._file.name
    with kept(tmp_path) as (again,):
        assert again._file.name == first._file.name


def test_files_that_were_not_used_for_longest_make_room(tmp_path: Path) -> None:
    def made(number: int, limit: int) -> Path:
        file = KeptFile(tmp_path, f"{number:064x}", BLOCKS, [CacheSpec(0, 1, 2)], limit)
        file.close()
        os.utime(file._file.name, (number, number))
        return Path(file._file.name)

    size = made(1, A_LOT).stat().st_size
    one, two, three = made(1, A_LOT), made(2, A_LOT), made(3, A_LOT)
    four = made(4, 3 * size)
    assert [path.exists() for path in (one, two, three, four)] == [False, True, True, True]
    with two.open("r+b") as used:
        assert kept_file.own_file(used)
        five = made(5, size)
    assert sorted(tmp_path.iterdir()) == sorted([two, five]), "what a session has stays"


def test_a_file_that_a_rank_takes_while_it_is_removed_stays_or_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kept(tmp_path):
        pass
    folder, unlink, ranks = tmp_path / "0", Path.unlink, ExitStack()

    def take(path: Path) -> None:
        monkeypatch.undo()
        ranks.enter_context(kept(tmp_path))
        unlink(path)

    with ranks:
        monkeypatch.setattr(Path, "unlink", take)
        (found,) = kept_files(folder)
        assert found.remove()
        (path,) = folder.iterdir()
        assert not kept_files(folder)[0].remove(), "a rank has it"
    assert path.exists()


@pytest.mark.parametrize("after", [(Path, "touch"), (os, "open"), (kept_file, "own_file"), (os, "fstat")])
def test_a_file_that_is_removed_while_a_rank_takes_it_is_made_again(
    after: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name = after
    do = getattr(where, name)

    def remove(*given: Any, **more: Any) -> Any:
        done = do(*given, **more)
        for path in (tmp_path / "0").iterdir():
            monkeypatch.undo()
            path.unlink()
        return done

    monkeypatch.setattr(where, name, remove)
    with kept(tmp_path) as (file,):
        assert os.fstat(file._file.fileno()).st_nlink == 1


def order(**fields: object) -> pb.Assignment:
    whole = {"fingerprint": "f", "size": 2, "context": 100, "engine": "onnxruntime", "cache_blocks": 4} | fields
    return pb.Assignment(model=pb.ModelSpec(source="here", quantisation="int8"), **whole)  # type: ignore[arg-type]


def test_a_key_is_of_all_that_decides_about_the_bits() -> None:
    same = plan_key(order(), 0, "share")
    tls, draft = pb.Credentials(key=b"k"), order()
    for alike in (
        order(secret=b"s", tls=tls, sequences=3, draft=draft, far_blocks=7, keep_prefixes=True),
        order(hosts=[pb.HostedExperts()]),
    ):
        alike.model.source = "there"
        assert plan_key(alike, 0, "share") == same
    for other in (
        order(fingerprint="g"),
        order(engine="reference"),
        order(shares=[pb.Share(attention_split=2)]),
        order(cache_blocks=5),
        order(wire="bf16"),
        order(engine_options={"a": "b"}),
    ):
        assert plan_key(other, 0, "share") != same
    narrow = order()
    narrow.model.cache_format = "int8"
    assert len({same, plan_key(narrow, 0, "share"), plan_key(order(), 1, "share"), plan_key(order(), 0, "other")}) == 4


def test_a_rank_that_keeps_nothing_says_so() -> None:
    session = Session((16,), BLOCKS)
    executor = session._scheduler.executor
    assert executor.able == Able(16, 0)
    block = KeptBlock(0, -1, 1, FIRST, 0, (1,))
    for message in (Keep([block]), Restore([block])):
        with pytest.raises(ValueError, match="of which this rank keeps none"):
            executor.execute(message)


@pytest.mark.parametrize("block", [KeptBlock(20, -1, 1, FIRST, 0, (1,)), KeptBlock(0, 0, 1, FIRST, 0, (1,))])
def test_blocks_that_there_are_not_are_refused(block: KeptBlock, tmp_path: Path) -> None:
    with kept(tmp_path) as files:
        executor = Session((16,), BLOCKS, kept=files)._scheduler.executor
        for message in (Keep([block]), Restore([block]), Restore([block._replace(number=0, windowed=-1, tokens=())])):
            with pytest.raises(ValueError, match="is to be kept or read; there are 20 blocks"):
                executor.execute(message)
