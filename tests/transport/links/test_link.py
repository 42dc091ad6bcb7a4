from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport import PeerLost, ProtocolError
from motley.transport.links.link import Incoming, IncomingMessage, Link
from motley.transport.links.wire import HEADER_SIZE, MAX_MESSAGE, Header, Op, pack_abort, pack_frame, pack_header

COLLECTIVES = [op for op in Op if op in (Op.ALL_REDUCE, Op.ALL_GATHER, Op.BROADCAST) or op > Op.BEAT]


class Wire:
    """A link to rank 1 and the other end of its connection."""

    def __init__(self) -> None:
        ours, self.peer = socket.socketpair()
        ours.setblocking(False)
        self.link = Link(0, 1, "there:1", ours, is_local=True)

    def expect(self, op: Op, payload: int, split: int = 0) -> tuple[Incoming, bytearray]:
        """An incoming frame, whose memory is in two parts if `split`; and this memory."""
        room = bytearray(HEADER_SIZE + payload)
        view = memoryview(room)
        incoming = Incoming(self.link, [view[:split], view[split:]] if split else [view])
        incoming.expect(pack_header(op, 4, 1, 7, payload))
        return incoming, room

    def close(self) -> None:
        self.link.socket.close()
        self.peer.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def pull(incoming: Incoming) -> bool:
    """Pull what is there; whether the frame is complete."""
    with suppress(BlockingIOError):
        while not incoming.pull():
            pass
        return True
    return False


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("split", [0, HEADER_SIZE])
def test_a_frame_whole_in_bytes_and_with_more_behind_it(wire: Wire, op: Op, split: int) -> None:
    frame = pack_header(op, 4, 1, 7, 40) + bytes(range(40))
    incoming, room = wire.expect(op, 40, split)
    wire.peer.sendall(frame)
    assert pull(incoming)
    assert room == frame

    incoming, room = wire.expect(op, 40, split)
    for position in range(len(frame)):
        assert not pull(incoming)
        wire.peer.sendall(frame[position : position + 1])
    assert pull(incoming)
    assert room == frame

    wire.peer.sendall(frame + frame)
    for _ in range(2):
        incoming, room = wire.expect(op, 40, split)
        assert pull(incoming)
        assert room == frame
    assert not wire.link.has_words()


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_a_message_whole_in_bytes_and_with_more_behind_it(wire: Wire, length: int) -> None:
    payload = bytes(length)
    stream = b"".join(pack_frame(Op.MESSAGE, payload, sequence) for sequence in range(3))
    frame = len(stream) // 3
    message = IncomingMessage(wire.link)
    for byte in stream[:frame]:
        assert not pull(message)
        wire.peer.sendall(bytes([byte]))
    assert pull(message)
    wire.peer.sendall(stream[frame:])
    for _ in range(2):
        wire.link.messages_in += 1
        message = IncomingMessage(wire.link)
        assert pull(message)
        assert message.payload == payload


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (Header(Op.ALL_REDUCE, 4, 1, 8, 40), "it is in another call: expected all_reduce 7, got all_reduce 8"),
        (Header(Op.ALL_GATHER, 4, 1, 7, 40), "it is in another call: expected all_reduce 7, got all_gather 7"),
        (Header(Op.ALL_REDUCE, 4, 2, 7, 40), "expected algorithm step 1, got 2"),
        (Header(Op.ALL_REDUCE, 5, 1, 7, 40), "expected element type float32, got float64"),
        (Header(Op.ALL_REDUCE, 4, 1, 7, 36), "expected bytes of payload 40, got 36"),
        (Header(Op.ALL_REDUCE, 4, 1, 7, 1 << 60), f"expected bytes of payload 40, got {1 << 60}"),
    ],
)
def test_a_wrong_frame_is_noticed_by_its_header(wire: Wire, header: Header, said: str) -> None:
    incoming, _ = wire.expect(Op.ALL_REDUCE, 40)
    wire.peer.sendall(header.pack())  # without any payload
    with pytest.raises(ProtocolError) as error:
        pull(incoming)
    assert error.value.rank == 1
    assert said in str(error.value)


def test_an_oversized_message_is_refused_before_anything_is_stored(wire: Wire) -> None:
    wire.peer.sendall(Header(Op.MESSAGE, length=MAX_MESSAGE + 1).pack())
    with pytest.raises(ProtocolError, match=f"a message of {MAX_MESSAGE + 1} bytes; at most {MAX_MESSAGE}"):
        pull(IncomingMessage(wire.link))


@pytest.mark.parametrize(
    ("last", "rank", "said"),
    [
        (pack_frame(Op.BYE), 1, "it left the session"),
        (pack_abort(2, "its cable"), 2, "reported by rank 1: its cable"),
        (pack_abort(0, "you"), 1, "it gave up (there:1): you"),
        (pack_abort(0, "you", 3), 3, "reported by rank 1: you"),
        (b"", 1, "it closed the connection"),
    ],
)
@pytest.mark.parametrize("seen", [False, True])
def test_last_words_instead_of_a_frame(wire: Wire, last: bytes, rank: int, said: str, seen: bool) -> None:
    incoming, _ = wire.expect(Op.ALL_REDUCE, 40)
    wire.peer.sendall(last)
    wire.peer.shutdown(socket.SHUT_WR)
    if seen and last == pack_frame(Op.BYE):
        assert wire.link.has_words()
    with pytest.raises(PeerLost) as loss:
        wire.link.has_words() if seen and last != pack_frame(Op.BYE) else pull(incoming)
    assert loss.value.rank == rank
    assert said in str(loss.value)


@pytest.mark.parametrize("begun", [1, HEADER_SIZE, HEADER_SIZE + 10])
def test_the_end_within_a_frame(wire: Wire, begun: int) -> None:
    incoming, _ = wire.expect(Op.ALL_REDUCE, 40)
    wire.peer.sendall((pack_header(Op.ALL_REDUCE, 4, 1, 7, 40) + bytes(40))[:begun])
    wire.peer.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLost, match="rank 1 is lost: it closed the connection"):
        pull(incoming)


@given(
    st.one_of(
        st.binary(max_size=100),
        st.builds(
            lambda header, payload: Header(*header).pack() + payload,
            st.tuples(
                st.sampled_from(Op).map(int),
                st.sampled_from([0, 4, 99]),
                st.sampled_from([0, 1]),
                st.sampled_from([0, 7]),
                st.sampled_from([0, 40, 1 << 40]),
            ),
            st.binary(max_size=60),
        ),
    ),
    st.sampled_from(["frame", "message"]),
)
def test_fuzzed_bytes_are_the_expected_frame_or_a_typed_error(data: bytes, kind: str) -> None:
    wire = Wire()
    try:
        wire.peer.sendall(data)
        wire.peer.shutdown(socket.SHUT_WR)
        incoming = wire.expect(Op.ALL_REDUCE, 40)[0] if kind == "frame" else IncomingMessage(wire.link)
        with suppress(PeerLost, ProtocolError):
            assert pull(incoming)
            assert data[2] == (Op.ALL_REDUCE if kind == "frame" else Op.MESSAGE)
    finally:
        wire.close()
