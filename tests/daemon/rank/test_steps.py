"""Step messages: what is encoded is decoded, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.adapters.messages import (
    FindAdapter,
    FoundAdapter,
    LoadAdapter,
    Piece,
    ReadAdapter,
    WriteAdapter,
)
from motley.daemon.rank.blocks.kept_block import KeptBlock
from motley.daemon.rank.steps import (
    Able,
    Close,
    Keep,
    Message,
    More,
    Move,
    Moved,
    Open,
    Renumber,
    Restore,
    Restored,
    SpanPlan,
    Step,
    StepError,
    Stop,
    decode,
    join,
    split,
)

counts = st.integers(0, 2**32 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50).map(lambda ids: np.array(ids, np.int32))


def columns(number: int) -> st.SearchStrategy[list[list[int]]]:
    """So many lists of numbers, all equally long."""
    return st.integers(1, 9).flatmap(
        lambda count: st.lists(
            st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count), min_size=number, max_size=number
        )
    )


@st.composite
def opens(draw: st.DrawFn) -> Open:
    known = draw(tokens)
    return Open(draw(counts), draw(st.integers(0, len(known))), draw(st.binary(max_size=60)), known, draw(counts))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    numbers = st.integers(0, 2**31 - 1)
    spans = []
    for slot in draw(st.lists(numbers, min_size=1, max_size=5, unique=True)):
        rows = draw(st.integers(1, 9))
        wanted = draw(st.integers(0, rows))
        words = draw(st.integers(0, 3)) if wanted else 0
        allowed = np.arange(wanted * words, dtype=np.int32).reshape(wanted, words) - 3 if words else None
        new = draw(tokens), draw(tokens)
        spans.append(SpanPlan(slot, draw(numbers), rows, wanted, draw(numbers), *new, allowed))
    count = sum(span.rows for span in spans)
    known = draw(st.lists(numbers, min_size=count, max_size=count))
    return Step(spans, np.array(known, np.int32), draw(st.booleans()))


whats = st.integers(0, 2**64 - 1)
places = st.integers(-1, 2**31 - 1)
kept = st.lists(
    st.builds(KeptBlock, places, places, whats, whats, whats, tokens.map(lambda ids: tuple(ids.tolist()))), max_size=3
)
pairs = columns(2).map(lambda fields: np.ascontiguousarray(np.array(fields, np.int32).T))
names = st.binary(min_size=32, max_size=32).map(bytes.hex)
names_or_none = names.map(lambda name: "" if name == "00" * 32 else name)
adapters = st.one_of(
    st.builds(FindAdapter, names_or_none, st.text(max_size=20), st.booleans(), st.booleans()),
    st.builds(FoundAdapter, names_or_none, counts, whats, whats, st.text(max_size=20), st.booleans()),
    st.builds(ReadAdapter, counts, names, whats),
    st.builds(Piece, st.binary(max_size=20)),
    st.builds(Piece, st.just(b""), st.text(max_size=20)),
    st.just(Piece(pending=True)),
    st.builds(WriteAdapter, names, whats, whats, st.binary(max_size=20)),
    st.builds(LoadAdapter, names, counts),
)
messages = st.one_of(
    adapters,
    st.builds(Able, st.integers(1, 2**32 - 1), whats, st.lists(st.floats(0), max_size=3).map(tuple)),
    st.builds(Keep, kept),
    st.builds(Restore, kept),
    st.builds(Restored, st.lists(st.integers(0, 255), max_size=9).map(tuple)),
    st.builds(Move, pairs),
    st.builds(Moved, st.text(max_size=20)),
    st.builds(Renumber, pairs),
    columns(3).map(lambda fields: More(*np.array(fields, np.int32))),
    opens(),
    steps(),
    st.builds(Close, counts),
    st.builds(Stop),
)


def plain(value: object) -> object:
    """The same with lists for arrays, to be compared."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(each) for each in value]
    if isinstance(value, SpanPlan):
        return fields(value)
    return value


def fields(message: Message | SpanPlan) -> dict[str, object]:
    return {name: plain(value) for name, value in vars(message).items()}


@given(messages)
def test_round_trip(message: Message) -> None:
    again = decode(message.encode())
    assert type(again) is type(message)
    assert fields(again) == fields(message)


@given(messages, st.data())
def test_a_message_cut_short_is_refused_or_another_message(message: Message, data: st.DataObject) -> None:
    encoded = message.encode()
    short = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    try:
        again = decode(short)
    except StepError:
        return
    lists = (
        Open | Move | Moved | Renumber | Keep | Restore | Restored | FindAdapter | FoundAdapter | Piece | WriteAdapter
    )
    assert isinstance(message, lists), "only their lists and words can be shorter"
    assert again.encode() == short


@given(st.binary(max_size=100))
def test_garbage_is_refused_or_a_message(data: bytes) -> None:
    try:
        message = decode(data)
    except StepError:
        return
    assert message.encode() == data


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"\x00", b"\x06", b"\x08", b"\x05\x00", b"\x03\x00", b"\x07\0\0\0\0"),
        Step([], np.zeros(0, np.int32)).encode(),
        Step([SpanPlan(0, 0, 2, 1, 1, np.zeros(0, np.int32))], np.zeros(3, np.int32)).encode(),
        Step([SpanPlan(0, 0, 2, 3, 1, np.zeros(0, np.int32))], np.zeros(2, np.int32)).encode(),
        Step([SpanPlan(0, -1, 2, 1, 1, np.zeros(0, np.int32))], np.zeros(2, np.int32)).encode(),
        Open(0, 3, b"", np.zeros(2, np.int32)).encode(),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(StepError):
        decode(data)


@given(st.lists(st.binary(max_size=20), max_size=6), st.data())
def test_summaries_are_split_as_they_were_joined(summaries: list[bytes], data: st.DataObject) -> None:
    joined = join(summaries)
    assert split(joined, len(summaries)) == summaries
    short = joined[: data.draw(st.integers(0, len(joined)))]
    if short != joined:
        with pytest.raises(StepError):
            split(short, len(summaries))
    wrong = data.draw(st.integers(0, 7).filter(lambda count: count != len(summaries)))
    with pytest.raises(StepError, match=f"{len(summaries)} summaries, not {wrong}"):
        split(joined, wrong)
