"""Secrets that are made here, and what is kept of them.

A secret has 256 random bits, so its SHA-256 tells nobody anything: there is nothing to guess at, and a slow hash (which
makes guessing at *passwords* dear) would only make every request dear. As the digest is what is looked up, how long
that takes says nothing of the secret either.
"""

from __future__ import annotations

import hashlib
import secrets


def new_secret() -> str:
    """43 letters, digits, "_" or "-": 256 random bits."""
    while True:  # one that begins with "-" would be taken for an option on a command line
        made = secrets.token_urlsafe(32)
        if not made.startswith("-"):
            return made


def new_id() -> str:
    """What something that has a secret is called: 8 hexadecimal digits."""
    return secrets.token_hex(4)


def digest(secret: str) -> str:
    """What is kept of a secret: SHA-256, in 64 hexadecimal digits."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
