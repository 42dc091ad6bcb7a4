"""How a join token gets to a machine whose owner types a short code: both ends of a key exchange by password (SPAKE2).

Whoever listens in, or stands in the middle, learns nothing of the code or of the key; each guess at the code takes an
exchange with the orchestrator, which allows few. What is handed over is sealed with the key (AES-GCM), so that a wrong
code shows when it is opened.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from spake2 import SPAKE2_A, SPAKE2_B, SPAKEError
from spake2.ed25519_basic import NotOnCurve

DIGITS = 8
"""Of a code: 100 million of them, where an orchestrator allows some 90 guesses an hour."""
NAME = "motley-name"
"""Metadata: what the machine calls itself, percent-encoded."""
PAIRING = "motley-pairing"
"""Metadata: the id of a pairing."""
PAKE = "motley-pake-bin"
"""Metadata: an end's message of the key exchange."""
WAITS = "motley-waits"
"""Metadata: the id of a pairing whose machine is there for as long as this call lasts."""
GIVES_UP = "motley-gives-up"
"""Metadata: the id of a pairing whose machine does without its code; the end of `WAITS` says so, too, but not to
orchestrators of before it."""
SEALED = "motley-sealed-bin"
"""Metadata: the join token, sealed."""
_ENDS = {"idA": b"motley joining machine", "idB": b"motley orchestrator"}
_NONCE = bytes(12)
"""A key seals one thing only."""
_MESSAGE_BYTES = 33
_MALFORMED = (SPAKEError, NotOnCurve, ValueError, AssertionError)
"""What the exchange raises on a message that is none."""


class WrongCode(Exception):
    """The two ends had different codes, or something else was sealed."""


def new_code() -> str:
    """A code, in digits."""
    return f"{secrets.randbelow(10**DIGITS):0{DIGITS}}"


def shown(code: str) -> str:
    """A code as people read it: ``4831 0926``."""
    return f"{code[: DIGITS // 2]} {code[DIGITS // 2 :]}"


def typed(text: str) -> str:
    """The code that somebody has typed, with whatever between the digits.

    Raises:
        ValueError: it is none.
    """
    digits = "".join(letter for letter in text if letter in "0123456789")
    if len(digits) != DIGITS or any(letter.isalpha() for letter in text):
        raise ValueError(f"a code has {DIGITS} digits, such as {shown('12345678')}")
    return digits


class Joining:
    """The end of the machine that joins. For one exchange.

    Attributes:
        message: for the orchestrator.
    """

    def __init__(self, code: str) -> None:
        self._exchange = SPAKE2_A(code.encode(), **_ENDS)
        self.message: bytes = self._exchange.start()

    def open(self, message: bytes, sealed: bytes) -> str:
        """What the orchestrator hands over.

        Args:
            message: of its end.

        Raises:
            WrongCode: the codes differ, or what came is damaged.
        """
        try:
            key = self._exchange.finish(_checked(message))
            return AESGCM(key).decrypt(_NONCE, sealed, None).decode()
        except (InvalidTag, *_MALFORMED) as error:
            raise WrongCode("that is not the code") from error


def hand_over(code: str, message: bytes, token: str) -> tuple[bytes, bytes]:
    """The orchestrator's end: its message, and a token that only who has the code can open.

    Args:
        message: of the machine that joins.

    Raises:
        WrongCode: the message is none.
    """
    exchange = SPAKE2_B(code.encode(), **_ENDS)
    own: bytes = exchange.start()
    try:
        key = exchange.finish(_checked(message))
    except _MALFORMED as error:
        raise WrongCode("that is no message of a key exchange") from error
    return own, AESGCM(key).encrypt(_NONCE, token.encode(), None)


def _checked(message: bytes) -> bytes:
    """
    Raises:
        ValueError: it is too long or too short.
    """
    if len(message) != _MESSAGE_BYTES:
        raise ValueError(f"a message has {_MESSAGE_BYTES} bytes, not {len(message)}")
    return message
