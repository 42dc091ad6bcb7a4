"""Compiled kernels on disk, so that a process need not compile what another has compiled before.

A file is named by all that decides about its code, and begins with the SHA-256 of what follows: whoever finds it
damaged compiles again. It appears whole, by renaming; processes that write the same one write the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import platformdirs

log = logging.getLogger(__name__)

DIGEST_BYTES = 32


def kept_or_compiled(decisive: Sequence[bytes], compiled: Callable[[], bytes]) -> bytes:
    """Code from disk, or else what `compiled` gives, which is then kept if the disk allows that.

    Args:
        decisive: all that decides about the code.
    """
    key = sha256(b"".join(sha256(each).digest() for each in decisive)).hexdigest()
    file = platformdirs.user_cache_path("motley", appauthor=False) / "kernels" / f"{key}.cubin"
    code = _read(file)
    if code is None:
        code = compiled()
        try:
            _write(file, code)
        except OSError as error:
            log.info("compiled kernels are not kept for the next start: %s", error)
    return code


def _read(file: Path) -> bytes | None:
    try:
        held = file.read_bytes()
    except OSError:
        return None
    digest, code = held[:DIGEST_BYTES], held[DIGEST_BYTES:]
    return code if sha256(code).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, prefix=".", delete=False) as writing:
        try:
            writing.write(sha256(code).digest() + code)
            writing.close()
            os.replace(writing.name, file)
        except BaseException:
            writing.close()
            with suppress(OSError):
                os.unlink(writing.name)
            raise
