"""Which models' tokenizers have been read on this machine before, and whether the models chat.

Libraries that are not ours read a tokenizer and compile a chat template, which come from strangers: they may take the
process with them, and they take half a second to load. A model that has been read once is described without them.
"""

from __future__ import annotations

import contextlib
from hashlib import sha256
from pathlib import Path

from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.hub import ModelNotFound, find_here

FOLDER = "read"
"""Of the cache: a small file for each model, named by where its files are, how large, and when they were changed."""
LIMIT = 256
"""Of more models than these, those that were read last are remembered."""


class ReadBefore:
    """What is known of a model's tokenizer, by the model's files as they are now."""

    def __init__(self, source: str, models: Path | None, cache: ShareCache) -> None:
        """
        Args:
            source: of the model, as a session names it.
            models: the folder in which model names are looked up, if there is one.
            cache: beside whose shares this is kept.
        """
        self._note: Path | None = None  # of a model that is not here
        with contextlib.suppress(ModelNotFound, OSError):
            if place := find_here(source, models):
                files = sorted(place.iterdir()) if place.is_dir() else [place]
                stats = [(str(file), status.st_size, status.st_mtime_ns) for file in files if (status := file.stat())]
                self._note = cache.folder / FOLDER / sha256(repr(stats).encode()).hexdigest()

    def chats(self) -> bool | None:
        """Whether it has a chat template; None: nobody has read it, or a full disk or a power cut took the note."""
        with contextlib.suppress(OSError):
            return None if self._note is None else {b"chats": True, b"writes": False}.get(self._note.read_bytes())
        return None

    def keep(self, chats: bool) -> None:
        """Remember that it can be read, and whether it chats; not if that cannot be written."""
        if self._note is not None:
            with contextlib.suppress(OSError):
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.write_bytes(b"chats" if chats else b"writes")
                for old in sorted(self._note.parent.iterdir(), key=lambda note: note.stat().st_mtime)[:-LIMIT]:
                    old.unlink(missing_ok=True)
