"""Framing and handshake, sans-IO: bytes in, frames and decisions out. Nothing here touches a socket or a clock.

Theory of operation
-------------------
A link is one TCP connection between two ranks. Both directions are sequences of *frames*: a 24-byte header and
`length` bytes of payload, all integers little-endian::

    magic   op   dtype   step   sequence   length
    2s      u8   u8      u32    u64        u64

Because all ranks make the same collective calls in the same order, a receiver knows the next header of every link
before it arrives; it compares 24 bytes, and any difference is explained by `mismatch`. `sequence` counts the
collectives of the session (for messages: the messages of one direction of one link), `step` is the step of the
algorithm's schedule (`motley.transport.schedules.schedule`).

A link starts with a handshake. The dialling rank speaks first; both sides send the same two frames::

    dialler                          listener
    HELLO  (who I am, nonce)    ->
                                <-   HELLO  (who I am, nonce)
    PROOF  (HMAC)               ->
                                <-   PROOF  (HMAC)

    state       frame    next        action
    hello       HELLO    proof       check every field; the listener sends HELLO, the dialler PROOF
    proof       PROOF    done        check the HMAC; the listener sends PROOF
    any         REFUSE   -           raise `Refusal` with the peer's reason
    any         other    -           raise `Refusal` with ours, and the REFUSE frame to send

Under TLS (`motley.transport.links.security`) the same happens inside of it, and a HELLO's rank must be one that the
peer's certificate names. A HELLO also says what the link is for: each pair of ranks of a mesh has one for data and one
for beats, and any two ranks may have one for messages alone (`motley.transport.messages`).

A pair of a mesh that hears nothing of each other tries a connection of a fourth kind, a *knock*: it brings one BEAT
each way and ends. TCP repeats what is lost at ever longer intervals; a connection that is new does not wait for them.

PROOF is HMAC-SHA256, keyed with the session's secret, over the role of the sender and both HELLO payloads. The nonces
in them make it fresh, the role keeps it from being reflected, the payloads bind every field, and the secret itself
never travels. A listener proves itself only to a dialler that has proven itself.

After the handshake a link carries collectives and messages until it ends: with BYE when its owner closes it in peace,
with ABORT (the rank to blame, who found it, and why) when its owner gives up, with neither when its owner died. On a
link for beats there are BEAT frames instead (`motley.transport.links.liveness`), and it ends in the same ways. A BEAT's
`sequence` is the collective that its sender has come to, its payload (u64) the bytes that it has sent on the pair's
link for data.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Container
from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

VERSION = 5
MAGIC = b"MT"
MAX_MESSAGE = 64 << 20
"""Longest message in bytes; a header that announces more is refused before a byte of it is stored."""
MAX_HANDSHAKE = 1024
"""Longest payload, in bytes, of a frame of the handshake, and longest reason of an ABORT."""

_HEADER = Struct("<2sBBIQQ")
_HELLO = Struct("<HBIHH32s32s")
_BLAME = Struct("<HH")
_SENDER = 0xFFFF
_SENT = Struct("<Q")
HEADER_SIZE = _HEADER.size


class Op(IntEnum):
    """What a frame is part of."""

    HELLO = 1
    PROOF = 2
    REFUSE = 3
    MESSAGE = 4
    ALL_REDUCE = 5
    ALL_GATHER = 6
    BROADCAST = 7
    BYE = 8
    ABORT = 9
    BEAT = 10
    REDUCE_SCATTER = 11
    ALL_TO_ALL = 12
    BARRIER = 13


class Purpose(IntEnum):
    """What a link is for."""

    DATA = 0
    BEATS = 1
    MESSAGES = 2
    KNOCK = 3


DTYPE_CODES = {
    name: code
    for code, name in enumerate(("uint8", "int32", "int64", "float32", "float64", "float16", "bfloat16"), start=1)
}
"""Element types that may travel, by NumPy's names (little-endian); 0 is raw bytes."""
_DTYPE_NAMES = {0: "bytes"} | {code: name for name, code in DTYPE_CODES.items()}


class WireError(Exception):
    """Bytes that are not a frame, or a frame that may not be here. The caller knows which peer to blame."""


class Header(NamedTuple):
    """The header of a frame; what its fields mean is told at the top of this file."""

    op: int
    dtype: int = 0
    step: int = 0
    sequence: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """Give the 24 bytes of the header."""
        return _HEADER.pack(MAGIC, *self)


def pack_header(op: int, dtype: int, step: int, sequence: int, length: int) -> bytes:
    """The 24 bytes of a header, as `Header.pack`, without making the tuple: every frame of a collective needs it."""
    return _HEADER.pack(MAGIC, op, dtype, step, sequence, length)


def unpack_header(data: bytes | bytearray | memoryview) -> Header:
    """Read the first `HEADER_SIZE` bytes of `data`.

    Raises:
        WireError: they are not a header.
    """
    magic, op, dtype, step, sequence, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise WireError(f"these bytes are not Motley's: {bytes(data[:16])!r}")
    if op not in Op._value2member_map_:
        raise WireError(f"unknown operation {op} in a frame header")
    return Header(op, dtype, step, sequence, length)


def mismatch(expected: Header, got: Header) -> str:
    """Say how the header that came differs from the one this rank expected."""

    def name(header: Header) -> str:
        return f"{Op(header.op).name.lower()} {header.sequence}"

    if (got.op, got.sequence) != (expected.op, expected.sequence):
        return f"it is in another call: expected {name(expected)}, got {name(got)}"
    for field, ours, theirs in (
        ("element type", _DTYPE_NAMES.get(expected.dtype), _DTYPE_NAMES.get(got.dtype, f"code {got.dtype}")),
        ("algorithm step", expected.step, got.step),
        ("bytes of payload", expected.length, got.length),
    ):
        if ours != theirs:
            return f"{name(expected)}: expected {field} {ours}, got {theirs}"
    raise AssertionError("the headers are equal")


def pack_frame(op: Op, payload: bytes | memoryview = b"", sequence: int = 0) -> bytes:
    """A whole frame, for `payload` that is small or copied anyway."""
    return Header(op, sequence=sequence, length=len(payload)).pack() + payload


class Blame(NamedTuple):
    """What an ABORT says.

    Attributes:
        rank: the one to blame.
        why: for people.
        finder: the rank that has found it; None: the sender of the frame.
    """

    rank: int
    why: str
    finder: int | None = None

    def heard(self, sender: int, listener: int) -> Blame:
        """What it means to rank `listener`, which has it from rank `sender`: whom that one lost, and who found it.

        Who is blamed itself blames the one that does: of two that cannot reach each other each names the other, and
        none of them the third that has passed it on.
        """
        finder = sender if self.finder is None else self.finder
        lost = finder if self.rank == listener else self.rank
        return Blame(lost, "it gave up" if lost == sender else f"reported by rank {sender}", finder)


def pack_abort(blamed: int, why: str, finder: int | None = None) -> bytes:
    """The frame by which a rank that gives up tells which rank is to blame, why, and who has found it; None: itself."""
    told = _BLAME.pack(blamed, _SENDER if finder is None else finder)
    return pack_frame(Op.ABORT, told + why.encode()[:MAX_HANDSHAKE])


def unpack_abort(payload: bytes) -> Blame:
    """What the payload of an ABORT says.

    Raises:
        WireError: it is too short.
    """
    if len(payload) < _BLAME.size:
        raise WireError("an abort frame that blames nobody")
    blamed, finder = _BLAME.unpack_from(payload)
    why = payload[_BLAME.size :].decode(errors="replace")
    return Blame(blamed, why, None if finder == _SENDER else finder)


def pack_beat(sequence: int, sent: int) -> bytes:
    """A sign of life: which collective this rank has come to, and how many bytes it has sent on the link for data."""
    return pack_frame(Op.BEAT, _SENT.pack(sent), sequence)


def unpack_beat(payload: bytes) -> int:
    """The bytes that the sender of a BEAT has sent on the link for data, by the beat's payload.

    Raises:
        WireError: it is none.
    """
    if len(payload) != _SENT.size:
        raise WireError(f"a beat of {len(payload)} bytes")
    sent: int = _SENT.unpack(payload)[0]
    return sent


class Frame(NamedTuple):
    """A frame that has come whole."""

    header: Header
    payload: bytes


class Decoder:
    """Cuts a stream of bytes into frames, however it arrives."""

    def __init__(self, max_length: int) -> None:
        """`max_length`: of a payload, in bytes; a longer one is an error."""
        self._max_length = max_length
        self._buffer = bytearray()

    @property
    def missing(self) -> int:
        """How many bytes to read next at most: the rest of a header, or of its frame, but never of a later one."""
        held = len(self._buffer)
        if held < HEADER_SIZE:
            return HEADER_SIZE - held
        return HEADER_SIZE + unpack_header(self._buffer).length - held

    def feed(self, data: bytes) -> list[Frame]:
        """Take bytes, return the frames that they complete.

        Raises:
            WireError: the bytes are no header, or it announces more than the limit.
        """
        self._buffer += data
        frames = []
        # Garbage shows itself by its first bytes: do not wait for 24 of them.
        while self._buffer:
            if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
                raise WireError(f"these bytes are not Motley's: {bytes(self._buffer[:16])!r}")
            if len(self._buffer) < HEADER_SIZE:
                break
            header = unpack_header(self._buffer)
            if header.length > self._max_length:
                raise WireError(f"a frame of {header.length} bytes; at most {self._max_length} are allowed here")
            end = HEADER_SIZE + header.length
            if len(self._buffer) < end:
                break
            frames.append(Frame(header, bytes(self._buffer[HEADER_SIZE:end])))
            del self._buffer[:end]
        return frames


@dataclass(frozen=True)
class Membership:
    """A rank's place in a session: what both ends of a link must agree on before they trust it."""

    session: str
    epoch: int
    rank: int
    size: int
    secret: bytes
    """Shared by the session's ranks only; never travels."""
    agreement: bytes
    """SHA-256 of the plan: every rank must have the same one."""

    def __repr__(self) -> str:
        return f"Membership({self.session!r}, epoch {self.epoch}, rank {self.rank} of {self.size})"


def certified_name(rank: int, session: str) -> str:
    """The DNS name that a rank's certificate must carry."""
    return f"rank-{rank}.{session}"


class Refusal(Exception):
    """A handshake that failed.

    Attributes:
        reply: the REFUSE frame to send to the peer; empty if it was the peer that refused.
        retry: the same handshake may succeed later, as the peer is still in an older epoch.
    """

    def __init__(self, reason: str, *, reply: bytes, retry: bool) -> None:
        super().__init__(reason)
        self.reply = reply
        self.retry = retry


class Handshake:
    """One side of the handshake of one link: feed it what arrives, send what it returns, until `peer` is set."""

    def __init__(
        self, membership: Membership, expected: Container[tuple[int, Purpose]], *, dials_for: Purpose | None = None
    ) -> None:
        """
        Args:
            expected: the ranks that the peer may have, and what for.
            dials_for: what this rank dials the peer for; None if it is the peer that has dialled.
        """
        self.peer: int | None = None
        """The peer's proven rank once the handshake is done."""
        self.claimed: int | None = None
        """The rank that the peer says it has, unproven."""
        self.purpose = dials_for
        """What the link is for, once the dialler has said so."""
        self.certified: Collection[str] | None = None
        """The names that the peer's certificate proves; None if there are no certificates."""
        self._membership = membership
        self._expected = expected
        self._dials = dials_for is not None
        self._decoder = Decoder(MAX_HANDSHAKE)
        self._awaits = Op.HELLO
        self._peer_hello = b""
        self._hello = b""

    @property
    def missing(self) -> int:
        """How many bytes to read at most, so that nothing after the handshake is read."""
        return self._decoder.missing

    def start(self) -> bytes:
        """What to send before anything has arrived."""
        return self._say_hello() if self._dials else b""

    def receive(self, data: bytes) -> bytes:
        """Take bytes, return the bytes to send.

        Raises:
            Refusal: the peer is refused, or has refused us.
        """
        try:
            return b"".join([self._receive_frame(frame) for frame in self._decoder.feed(data)])
        except WireError as error:
            raise self.refusal(str(error)) from error

    def refusal(self, reason: str, *, retry: bool = False) -> Refusal:
        """A refusal for `reason`, with the frame that tells the peer."""
        reply = pack_frame(Op.REFUSE, bytes([retry]) + reason.encode()[: MAX_HANDSHAKE - 1])
        return Refusal(reason, reply=reply, retry=retry)

    def _receive_frame(self, frame: Frame) -> bytes:
        if frame.header.op == Op.REFUSE:
            reason = frame.payload[1:].decode(errors="replace")
            raise Refusal(f"it refused us: {reason}", reply=b"", retry=frame.payload[:1] == b"\x01")
        if self.peer is not None or frame.header.op != self._awaits:
            awaited = "nothing" if self.peer is not None else self._awaits.name
            raise self.refusal(f"expected {awaited} in the handshake, got {Op(frame.header.op).name}")
        if self._awaits is Op.HELLO:
            self._check_hello(frame.payload)
            self._peer_hello = frame.payload
            self._awaits = Op.PROOF
            if self._dials:
                return pack_frame(Op.PROOF, self._proof(by_dialler=True))
            return self._say_hello()
        if not hmac.compare_digest(frame.payload, self._proof(by_dialler=not self._dials)):
            raise self.refusal("the proof is wrong: it does not hold this session's secret")
        self.peer = self.claimed
        return b"" if self._dials else pack_frame(Op.PROOF, self._proof(by_dialler=False))

    def _say_hello(self) -> bytes:
        assert self.purpose is not None
        ours, nonce = self._membership, secrets.token_bytes(32)
        fields = (VERSION, self.purpose, ours.epoch, ours.rank, ours.size, ours.agreement, nonce)
        self._hello = _HELLO.pack(*fields) + ours.session.encode()
        return pack_frame(Op.HELLO, self._hello)

    def _check_hello(self, payload: bytes) -> None:
        """Check every field of the peer's HELLO, or raise the `Refusal` that names the first wrong one."""
        ours = self._membership
        version = int.from_bytes(payload[:2], "little")
        if version != VERSION:
            raise self.refusal(f"protocol version {version}; version {VERSION} is spoken here: update the older one")
        if len(payload) < _HELLO.size:
            raise self.refusal(f"a HELLO of {len(payload)} bytes; at least {_HELLO.size} are needed")
        _, purpose, epoch, rank, size, agreement, _ = _HELLO.unpack_from(payload)
        session = payload[_HELLO.size :].decode(errors="replace")
        self.claimed = rank
        if session != ours.session:
            raise self.refusal(f"session {session!r} is not the one served here")
        if self.certified is not None and certified_name(rank, session) not in self.certified:
            names = ", ".join(self.certified) or "nobody"
            raise self.refusal(f"its certificate is for {names}, not for {certified_name(rank, session)}")
        if epoch != ours.epoch:
            raise self.refusal(f"epoch {epoch}; epoch {ours.epoch} is current here", retry=epoch > ours.epoch)
        if size != ours.size:
            raise self.refusal(f"a mesh of {size} ranks; here it has {ours.size}")
        if purpose not in Purpose._value2member_map_ or (rank, purpose) not in self._expected:
            raise self.refusal(f"rank {rank} is not expected by rank {ours.rank} on this connection")
        if agreement != ours.agreement:
            raise self.refusal(
                f"plan {agreement.hex()[:12]}; here it is {ours.agreement.hex()[:12]}: both ranks need the same plan"
            )
        self.purpose = Purpose(purpose)

    def _proof(self, *, by_dialler: bool) -> bytes:
        hellos = (self._hello, self._peer_hello) if self._dials else (self._peer_hello, self._hello)
        text = b"".join(len(hello).to_bytes(4, "little") + hello for hello in hellos)
        role = b"dialler" if by_dialler else b"listener"
        return hmac.digest(self._membership.secret, role + text, hashlib.sha256)
