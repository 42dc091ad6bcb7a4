"""A model of the hub of which a part is here: a mirror like that of a lent model, filled by HTTP Range requests.

Where it came from lies beside its files, so that it is found again, and opened without asking the hub: requests are
made for bytes that are missing alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from motley.daemon.lending.mirror import FOLDER, FoundMirror, Mirror, found_mirrors, no_room
from motley.daemon.lending.wire import Files, LendingError, LentFile, Stretch
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.header import header_end
from motley.daemon.weights.closing import Closing
from motley.daemon.weights.hub import ModelNotFound, RemoteFile, find_fetched, find_here, range_of, remote_files
from motley.protocol.files import write_private
from motley.protocol.wording import human_bytes

ORIGIN = "hub.json"
"""In a mirror's folder, where its files come from."""
FIRST = 1 << 20
"""So many bytes of a GGUF file come first. How long its header is, with the vocabulary, it tells itself: where it goes
on, twice as many come."""
LONGEST_HEADER = 1 << 29
"""A longer one is taken for damage."""
GAP = 1 << 14
"""Bytes between two wanted stretches that cost less to fetch than another request."""
AT_ONCE = 4
"""Requests under way at a time."""


@dataclass(frozen=True)
class _Origin:
    """Where a mirror's files come from: the model as it was asked for, and the files in the order of the mirror."""

    source: str
    urls: tuple[str, ...]


class HubMirror(Closing):
    """What is here of a model of the hub, for as long as the context lasts; the rest is fetched where it is read.

    Attributes:
        place: where the model is opened, with `bring` for the bytes that are missing.
        total: bytes of the whole model.
        fetched: bytes that have come.
    """

    def __init__(self, origin: _Origin, files: Files, shares: Path, limit: int) -> None:
        """Have here what is needed to open the model: configs, the tokenizer, headers of GGUF. Use `begin_pull` or
        `open_pulled`.

        Raises:
            LendingError: as `bring`.
        """
        self.fetched, self.total = 0, sum(each.size for each in files.files)
        self._origin = origin
        own = shares / FOLDER / files.key
        try:
            self._mirror = Mirror(shares, files, limit)
            told = json.dumps(asdict(origin)).encode()
            if not (own / ORIGIN).exists() or (own / ORIGIN).read_bytes() != told:
                write_private(own / ORIGIN, told)
        except OSError as error:
            raise self._no_room(own, error) from error
        self.place = self._mirror.place
        self._asking = ThreadPoolExecutor(AT_ONCE)
        try:
            for path, kept in self._mirror:
                self.bring(path, [(0, kept.needed)])
                if path.suffix == ".gguf":
                    self._bring_header(path, kept)
        except BaseException:
            self.close()
            raise

    @property
    def modified(self) -> dict[str, int]:
        """See `Mirror.modified`."""
        return self._mirror.modified

    def bring(
        self, file: Path, stretches: Sequence[Stretch], progress: Callable[[int], None] = lambda came: None
    ) -> None:
        """Have stretches of a file here, see `motley.daemon.weights.checkpoints.tensor_files.Bring`.

        Args:
            progress: called with the bytes of each answer.

        Raises:
            LendingError: the hub cannot be reached or refuses, or there is no room here.
        """
        wanted = [each for missing in self._mirror.missing(file, stretches) for each in joined(missing)]
        for first in range(0, len(wanted), AT_ONCE):
            some = wanted[first : first + AT_ONCE]
            for (offset, length), data in zip(some, self._asking.map(self._asked(file), some), strict=True):
                try:
                    self._mirror.fill(file, [(offset, length)], memoryview(data))
                except OSError as error:
                    raise self._no_room(file, error) from error
                self.fetched += length
                progress(length)

    def missing_bytes(self, file: Path, stretches: Sequence[Stretch]) -> int:
        """How many bytes `bring` would fetch."""
        return sum(length for asked in self._mirror.missing(file, stretches) for _, length in joined(asked))

    def end(self) -> None:
        """Nothing is held of the hub between two requests, so that later readers may bring more."""

    def close(self) -> None:
        """Let the files go; what has come is kept for the next start."""
        self._asking.shutdown()
        self._mirror.close()

    def _bring_header(self, file: Path, kept: LentFile) -> None:
        """Have all of a GGUF file's header here; what is wrong with it is told where the model is opened."""
        here = kept.needed
        with contextlib.suppress(CheckpointError):
            while header_end(file, here) is None:
                if here >= LONGEST_HEADER:
                    raise LendingError(
                        f"{self._origin.source}: the header of {file.name} does not end within {human_bytes(here)}, as"
                        " if it were damaged; to have the file whole: `motley models pull --whole`"
                    )
                here = min(kept.size, 2 * here)
                self.bring(file, [(0, here)])

    def _asked(self, file: Path) -> Callable[[Stretch], bytes]:
        url = self._origin.urls[self._mirror.number(file)]

        def ask(stretch: Stretch) -> bytes:
            try:
                return range_of(url, *stretch)
            except ModelNotFound as error:
                raise LendingError(f"{self._origin.source}: {error}") from error

        return ask

    def _no_room(self, path: Path, error: OSError) -> LendingError:
        what = f"what is fetched of {self._origin.source}"
        return no_room(path, error, what, self.fetched, "or choose another folder (`--cache`)")


def begin_pull(source: str, shares: Path, limit: int) -> HubMirror:
    """Ask the hub for a model's files, and have here what is needed to open it.

    Args:
        source: a hub id, see `motley.daemon.weights.hub.resolve`.
        shares: the folder in which shares are kept; what comes is kept beside them.
        limit: bytes that mirrors may take there.

    Raises:
        ModelNotFound: the hub has no such model, refuses, or cannot be reached.
        LendingError: there is no room here.
    """
    remote = remote_files(source)
    kept = tuple(map(_kept, remote))
    main = next((each.name for each in kept if each.name.endswith(".gguf")), "")
    return HubMirror(_Origin(source, tuple(each.url for each in remote)), Files(main, kept), shares, limit)


def open_pulled(source: str, models: Path | None, shares: Path, limit: int) -> HubMirror | None:
    """A model of which a part was pulled, as it is here; None: none was, or all of it is here.

    Args:
        models: the folder in which model names are looked up, if there is one.
        shares, limit: as `begin_pull` has them.

    Raises:
        ModelNotFound: it is not here, and `source` is no hub id.
        LendingError: there is no room here.
    """
    if find_here(source, models) or find_fetched(source):
        return None
    found = _pulled(source, shares)
    return HubMirror(*found, shares, limit) if found else None


def pulled_in_part(shares: Path) -> Iterator[tuple[str, FoundMirror]]:
    """The models of which a part was pulled, as they were asked for, those used last first.

    Args:
        shares: the folder in which shares are kept.
    """
    for mirror in reversed(found_mirrors(shares)):
        if (origin := _origin(mirror)) is not None:
            yield origin.source, mirror


def _pulled(source: str, shares: Path) -> tuple[_Origin, Files] | None:
    """What was pulled of a model last."""
    for mirror in reversed(found_mirrors(shares)):
        if (origin := _origin(mirror)) is not None and origin.source == source:
            with contextlib.suppress(OSError, LendingError):  # removed meanwhile
                files = mirror.files()
                if len(origin.urls) == len(files.files):
                    return origin, files
    return None


def _origin(mirror: FoundMirror) -> _Origin | None:
    """Where a mirror's files come from; None: a node has lent them, or it was cut off while it was made."""
    try:
        told = json.loads((mirror.path / ORIGIN).read_text("utf-8"))
        return _Origin(told["source"], tuple(told["urls"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _kept(remote: RemoteFile) -> LentFile:
    """A file of the hub as a mirror keeps it, in no folder of its own. Its time is made of what the hub knows it by:
    another file, another."""
    name = remote.name.rpartition("/")[2]
    needed = {".gguf": min(remote.size, FIRST), ".safetensors": 0}.get(Path(name).suffix, remote.size)
    return LentFile(name, remote.size, int(sha256(remote.etag.encode()).hexdigest()[:12], 16), needed)


def joined(stretches: Sequence[Stretch]) -> Iterator[Stretch]:
    """Ascending stretches, with what lies in short gaps between them."""
    begin = end = -1
    for offset, length in stretches:
        if begin >= 0 and offset - end <= GAP:
            end = max(end, offset + length)
            continue
        if begin >= 0:
            yield begin, end - begin
        begin, end = offset, offset + length
    if begin >= 0:
        yield begin, end - begin
