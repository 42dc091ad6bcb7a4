from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from motley.transport import Membership
from motley.transport.links.wire import (
    HEADER_SIZE,
    MAX_MESSAGE,
    Blame,
    Decoder,
    Frame,
    Handshake,
    Header,
    Op,
    Purpose,
    Refusal,
    WireError,
    mismatch,
    pack_abort,
    pack_frame,
    unpack_abort,
    unpack_header,
)

FRAMES = st.lists(
    st.builds(
        lambda op, dtype, step, sequence, payload: Frame(Header(op, dtype, step, sequence, len(payload)), payload),
        st.sampled_from(Op).map(int),
        st.integers(0, 255),
        st.integers(0, (1 << 32) - 1),
        st.integers(0, (1 << 64) - 1),
        st.binary(max_size=100),
    ),
    max_size=5,
)


def encode(frames: list[Frame]) -> bytes:
    return b"".join(frame.header.pack() + frame.payload for frame in frames)


@given(FRAMES, st.data())
def test_frames_come_out_however_the_bytes_arrive(frames: list[Frame], data: st.DataObject) -> None:
    stream = encode(frames)
    assert Decoder(100).feed(stream) == frames

    decoder = Decoder(100)
    assert [frame for byte in stream for frame in decoder.feed(bytes([byte]))] == frames

    cut = data.draw(st.integers(0, len(stream)))
    decoder = Decoder(100)
    assert decoder.feed(stream[:cut]) + decoder.feed(stream[cut:]) == frames


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("length", [0, 1, 77])
def test_every_kind_of_frame_whole_in_bytes_and_with_more_behind_it(op: Op, length: int) -> None:
    payload = bytes(range(length))
    frame = Frame(Header(op, sequence=3, length=length), payload)
    stream = pack_frame(op, payload, 3)
    assert Decoder(77).feed(stream) == [frame]

    decoder = Decoder(77)
    assert [decoder.feed(stream[i : i + 1]) for i in range(len(stream))] == [[]] * (len(stream) - 1) + [[frame]]
    assert decoder.missing == HEADER_SIZE

    decoder = Decoder(77)
    assert decoder.feed(stream + stream[:-1]) == [frame]
    assert decoder.feed(stream[-1:]) == [frame]


@given(FRAMES, st.binary(max_size=HEADER_SIZE - 1))
def test_trailing_bytes_wait_for_the_rest(frames: list[Frame], tail: bytes) -> None:
    last = pack_frame(Op.MESSAGE, b"last")
    decoder = Decoder(100)
    held = last[: len(tail)]
    assert decoder.feed(encode(frames) + held) == frames
    assert decoder.missing == HEADER_SIZE - len(held)
    assert decoder.feed(last[len(held) :]) == [Frame(Header(Op.MESSAGE, length=4), b"last")]


@given(FRAMES)
def test_reading_what_is_missing_never_reaches_into_the_next_frame(frames: list[Frame]) -> None:
    stream = encode(frames)
    decoder, start, got = Decoder(100), 0, []
    while start < len(stream):
        step = decoder.missing
        came = decoder.feed(stream[start : start + step])
        start += step
        assert len(came) <= 1
        got += came
    assert got == frames


@given(st.binary(max_size=200))
def test_fuzzed_bytes_are_frames_or_a_wire_error(data: bytes) -> None:
    try:
        frames = Decoder(64).feed(data)
    except WireError:
        return
    assert data.startswith(encode(frames))


@given(FRAMES.filter(len), st.data())
def test_a_flipped_bit_never_goes_unnoticed_in_a_header(frames: list[Frame], data: st.DataObject) -> None:
    header = bytearray(frames[0].header.pack())
    bit = data.draw(st.integers(0, 8 * HEADER_SIZE - 1))
    header[bit // 8] ^= 1 << bit % 8
    try:
        got = unpack_header(header)
    except WireError:
        return
    assert mismatch(frames[0].header, got)


def test_a_length_over_the_limit_is_refused_on_arrival() -> None:
    with pytest.raises(WireError, match=f"{1 << 40} bytes; at most {MAX_MESSAGE}"):
        Decoder(MAX_MESSAGE).feed(Header(Op.MESSAGE, length=1 << 40).pack())


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", b"SSH-2.0-OpenSSH\r\n", b"MX"])
def test_garbage_is_seen_in_its_first_bytes(garbage: bytes) -> None:
    with pytest.raises(WireError, match="not Motley's"):
        Decoder(100).feed(garbage)


def test_mismatch_names_what_differs() -> None:
    ours = Header(Op.ALL_REDUCE, dtype=4, step=1, sequence=7, length=64)
    for theirs, text in (
        (ours._replace(sequence=8), "another call: expected all_reduce 7, got all_reduce 8"),
        (ours._replace(op=Op.MESSAGE), "another call: expected all_reduce 7, got message 7"),
        (ours._replace(dtype=5), "expected element type float32, got float64"),
        (ours._replace(dtype=99), "got code 99"),
        (ours._replace(step=0), "expected algorithm step 1, got 0"),
        (ours._replace(length=60), "expected bytes of payload 64, got 60"),
    ):
        assert text in mismatch(ours, theirs)


def test_abort_carries_the_blame() -> None:
    (frame,) = Decoder(2000).feed(pack_abort(3, "gone"))
    assert unpack_abort(frame.payload) == (3, "gone", None)
    (frame,) = Decoder(2000).feed(pack_abort(3, "gone", 0))
    assert unpack_abort(frame.payload) == (3, "gone", 0)
    with pytest.raises(WireError):
        unpack_abort(b"")


@given(*[st.integers(0, 5)] * 4)
def test_nobody_blames_whoever_only_passes_it_on(blamed: int, finder: int, sender: int, listener: int) -> None:
    assume(sender != listener and blamed != finder)
    lost, how, found_by = Blame(blamed, "cut", finder).heard(sender, listener)
    assert {lost, found_by} <= {blamed, finder}
    assert lost != listener or finder == listener
    assert (how == "it gave up") == (lost == sender)


# -- handshake ------------------------------------------------------------------------------------------------------


def meet(dialler: Handshake, listener: Handshake, chunk: int = 1 << 20) -> None:
    """Carry bytes between two handshakes, `chunk` at a time, until nobody has anything to say."""
    to_listener, to_dialler = dialler.start(), listener.start()
    while to_listener or to_dialler:
        for start in range(0, len(to_listener), chunk):
            to_dialler += listener.receive(to_listener[start : start + chunk])
        to_listener = b""
        for start in range(0, len(to_dialler), chunk):
            to_listener += dialler.receive(to_dialler[start : start + chunk])
        to_dialler = b""


@pytest.fixture
def pair(membership: Callable[..., Membership]) -> Callable[..., tuple[Handshake, Handshake]]:
    def make(**changes: Any) -> tuple[Handshake, Handshake]:
        dialler = Handshake(
            membership(**({"rank": 2, "size": 3} | changes)), {(0, Purpose.DATA)}, dials_for=Purpose.DATA
        )
        return dialler, Handshake(membership(0, 3), {(1, Purpose.DATA), (2, Purpose.DATA)})

    return make


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_handshake_proves_both_ranks(pair: Callable[..., tuple[Handshake, Handshake]], chunk: int) -> None:
    dialler, listener = pair()
    meet(dialler, listener, chunk)
    assert (dialler.peer, listener.peer) == (0, 2)


@pytest.mark.parametrize(
    ("changes", "reason", "retry"),
    [
        ({"session": "other"}, "session 'other' is not the one served here", False),
        ({"epoch": 0}, "epoch 0; epoch 1 is current here", False),
        ({"epoch": 2}, "epoch 2; epoch 1 is current here", True),
        ({"size": 4}, "a mesh of 4 ranks; here it has 3", False),
        ({"rank": 0}, "rank 0 is not expected by rank 0", False),
        ({"agreement": bytes(32)}, "plan 000000000000; here it is", False),
        ({"secret": b"x" * 32}, "does not hold this session's secret", False),
    ],
)
def test_refusals_name_the_reason_on_both_sides(
    pair: Callable[..., tuple[Handshake, Handshake]], changes: dict[str, Any], reason: str, retry: bool
) -> None:
    dialler, listener = pair(**changes)
    with pytest.raises(Refusal, match=reason) as refused:
        meet(dialler, listener)
    assert refused.value.retry is retry
    with pytest.raises(Refusal, match=f"refused us: .*{reason}") as told:
        dialler.receive(refused.value.reply)
    assert told.value.retry is retry
    assert told.value.reply == b""
    assert listener.peer is None
    assert dialler.peer is None


@pytest.mark.parametrize("chunk", [1, 1000])
def test_a_refusal_is_understood_however_it_arrives(
    pair: Callable[..., tuple[Handshake, Handshake]], chunk: int
) -> None:
    dialler, listener = pair()
    reply = listener.refusal("not today", retry=True).reply
    with pytest.raises(Refusal, match="it refused us: not today") as told:  # noqa: PT012
        for start in range(0, len(reply), chunk):
            dialler.receive(reply[start : start + chunk])
    assert told.value.retry


@pytest.mark.parametrize("awaiting", ["hello", "proof", "nothing"])
def test_nothing_may_follow_what_was_awaited(pair: Callable[..., tuple[Handshake, Handshake]], awaiting: str) -> None:
    dialler, listener = pair()
    hello = dialler.start()
    if awaiting == "hello":
        with pytest.raises(Refusal, match="expected PROOF in the handshake, got MESSAGE"):
            listener.receive(hello + pack_frame(Op.MESSAGE))
        return
    proof = dialler.receive(listener.receive(hello))
    if awaiting == "proof":
        with pytest.raises(Refusal, match="expected nothing in the handshake, got BEAT"):
            listener.receive(proof + pack_frame(Op.BEAT))
        return
    listener.receive(proof)
    with pytest.raises(Refusal, match="expected nothing in the handshake, got PROOF"):
        listener.receive(proof)


@pytest.mark.parametrize("purpose", Purpose)
def test_the_listener_learns_what_the_link_is_for(membership: Callable[..., Membership], purpose: Purpose) -> None:
    dialler = Handshake(membership(1, 2), {(0, purpose)}, dials_for=purpose)
    listener = Handshake(membership(0, 2), {(1, expected) for expected in Purpose})
    meet(dialler, listener)
    assert listener.purpose is purpose


def test_a_link_for_another_purpose_is_refused(membership: Callable[..., Membership]) -> None:
    listener = Handshake(membership(0, 2), {(1, Purpose.DATA)})
    with pytest.raises(Refusal, match="rank 1 is not expected"):
        meet(Handshake(membership(1, 2), {(0, Purpose.BEATS)}, dials_for=Purpose.BEATS), listener)
    hello = bytearray(Handshake(membership(1, 2), {(0, Purpose.DATA)}, dials_for=Purpose.DATA).start())
    hello[HEADER_SIZE + 2] = 77
    with pytest.raises(Refusal, match="rank 1 is not expected"):
        Handshake(membership(0, 2), {(1, Purpose.DATA)}).receive(bytes(hello))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["rank-2.test"], None),
        (["gamma.example", "rank-2.test"], None),
        (["rank-1.test"], "its certificate is for rank-1.test, not for rank-2.test"),
        (["rank-2.other"], "its certificate is for rank-2.other, not for rank-2.test"),
        (["*.test"], "its certificate is for *.test, not for rank-2.test"),
        (["rank-22.test", "rank-2.test.org"], "not for rank-2.test"),
        ([], "its certificate is for nobody, not for rank-2.test"),
    ],
)
def test_a_certificate_is_for_one_rank_of_one_session(
    pair: Callable[..., tuple[Handshake, Handshake]], names: list[str], said: str | None
) -> None:
    dialler, listener = pair()
    listener.certified = names
    if said is None:
        meet(dialler, listener)
        assert listener.peer == 2
    else:
        with pytest.raises(Refusal, match=re.escape(said)):
            meet(dialler, listener)


def test_another_version_is_refused_whatever_follows_it(pair: Callable[..., tuple[Handshake, Handshake]]) -> None:
    _, listener = pair()
    with pytest.raises(Refusal, match="protocol version 6; version 5 is spoken here"):
        listener.receive(pack_frame(Op.HELLO, b"\x06\x00 a future layout"))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        pack_frame(Op.HELLO, b""),
        pack_frame(Op.HELLO, b"\x02\x00"),
        pack_frame(Op.PROOF, bytes(32)),
        pack_frame(Op.ALL_REDUCE, bytes(32)),
        Header(Op.HELLO, length=1 << 30).pack(),
    ],
)
def test_nonsense_is_refused(pair: Callable[..., tuple[Handshake, Handshake]], data: bytes) -> None:
    _, listener = pair()
    with pytest.raises(Refusal) as refused:
        listener.receive(data)
    assert unpack_header(refused.value.reply).op == Op.REFUSE


@given(st.binary(max_size=300))
def test_fuzzed_handshakes_are_never_accepted(data: bytes) -> None:
    member = Membership("test", 1, 0, 2, b"s" * 32, b"a" * 32)
    listener = Handshake(member, {(1, Purpose.DATA)})
    with suppress(Refusal):
        listener.receive(data)
    assert listener.peer is None


def test_a_recorded_handshake_cannot_be_replayed(pair: Callable[..., tuple[Handshake, Handshake]]) -> None:
    dialler, listener = pair()
    hello = dialler.start()
    proof = dialler.receive(listener.receive(hello))
    listener.receive(proof)
    assert listener.peer == 2

    _, fresh = pair()
    fresh.receive(hello)
    with pytest.raises(Refusal, match="proof is wrong"):
        fresh.receive(proof)


def test_a_listener_cannot_reflect_the_diallers_proof(pair: Callable[..., tuple[Handshake, Handshake]]) -> None:
    dialler, listener = pair()
    proof = dialler.receive(listener.receive(dialler.start()))
    with pytest.raises(Refusal, match="proof is wrong"):
        dialler.receive(proof)


def test_the_secret_never_travels(pair: Callable[..., tuple[Handshake, Handshake]], membership: Any) -> None:
    dialler, listener = pair()
    hello = dialler.start()
    answer = listener.receive(hello)
    proof = dialler.receive(answer)
    spoken = hello + answer + proof + listener.receive(proof)
    secret = membership(0, 3).secret
    assert secret not in spoken
    assert hmac.digest(secret, b"", "sha256") not in spoken
    assert secret.decode() not in repr(membership(0, 3))
