"""A process that uses a cache of shares, started by test_cache.py: ``cache_process.py WHAT FOLDER ...``."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

from motley.daemon.weights.cache import Label, ShareCache
from motley.daemon.weights.spec import SHARE_FILE

LABELLED = Label("some/model", "int4", 32, 0.5)


def content(key: str, size: int) -> bytes:
    """What belongs to a key."""
    return random.Random(key).randbytes(size)


class Writer:
    """Writes what belongs to a key, in pieces as a real share; counts how often."""

    def __init__(self, key: str, size: int) -> None:
        self.content = content(key, size)
        self.written = 0

    def __call__(self, file: Path) -> None:
        self.written += 1
        with file.open("wb") as opened:
            for start in range(0, len(self.content), 1 << 18):
                opened.write(self.content[start : start + (1 << 18)])


def keep(cache: ShareCache, key: str, size: int, *, write: Callable[[Path], None] | None = None) -> None:
    """Take a share, look at every byte of it, and leave it again."""
    with cache.hold(key, LABELLED, size, write or Writer(key, size)) as file:
        assert file.name == SHARE_FILE
        assert file.read_bytes() == content(key, size)


def once(cache: ShareCache, key: str, size: int) -> None:
    """Take a share when told to; says how often it had to write it."""
    write = Writer(key, size)
    say("here")
    sys.stdin.readline()
    keep(cache, key, size, write=write)
    say(f"written {write.written}")


def many(cache: ShareCache, seed: int, size: int, keys: list[str]) -> None:
    """Take shares at random from a cache that is too small for them."""
    cache.limit = 3 * size
    choice = random.Random(seed)
    for _ in range(40):
        keep(cache, choice.choice(keys), size)
    say("right every time")


def stall(cache: ShareCache, key: str, size: int) -> None:
    """Stop in the middle of writing."""

    def write(file: Path) -> None:
        file.write_bytes(b"half")
        say("half")
        sys.stdin.read()

    with cache.hold(key, LABELLED, size, write):
        pass


def hold(cache: ShareCache, key: str, size: int) -> None:
    """Keep a share in use."""
    with cache.hold(key, LABELLED, size, Writer(key, size)):
        say("held")
        sys.stdin.read()


def say(what: str) -> None:
    print(what, flush=True)


def main() -> None:
    what, folder, first, size, *rest = sys.argv[1:]
    cache = ShareCache(Path(folder))
    match what:
        case "once":
            once(cache, first, int(size))
        case "many":
            many(cache, int(first), int(size), rest)
        case "stall":
            stall(cache, first, int(size))
        case "hold":
            hold(cache, first, int(size))


if __name__ == "__main__":
    main()
