"""Finding a model that may have to be downloaded first, with signs of life meanwhile and an end if nothing comes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

from motley.daemon.lending.hub_mirror import HubMirror, begin_pull, open_pulled
from motley.daemon.loading.progress import TELL_S, Progress, Watch
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.hub import fetched_bytes, find_fetched, find_here, resolve

DOWNLOAD_S = 120.0
"""A download that has brought nothing for so many seconds hangs."""


class LoadError(Exception):
    """A model's files do not come to this node, or are not the ones that were planned for; the message says which."""


def fetch(source: str, models: Path | None, progress: Progress) -> Path:
    """Find a model as `motley.daemon.weights.hub.resolve` does, downloading it if need be.

    Args:
        progress: called every `TELL_S` with (bytes of the model that are here, 0), until it is found.

    Raises:
        LoadError: the network is too slow, or nothing has come of a download for `DOWNLOAD_S`. That is left alone: what
            it has fetched is kept.
        ModelNotFound: as `resolve` raises it.
        Exception: what `progress` raises.
    """
    resolved: Future[Path] = Future()

    def work() -> None:
        try:
            resolved.set_result(resolve(source, models))
        except BaseException as error:
            resolved.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    fetched, watch = 0, Watch(DOWNLOAD_S)
    while not watch.hangs(fetched):
        try:
            return resolved.result(TELL_S)
        except TimeoutError as error:
            if resolved.done():  # it is the network's
                raise LoadError(f"{source} cannot be fetched: {error}; try again (what has come is kept)") from error
        fetched = fetched_bytes(source)
        progress(fetched, 0)
    raise LoadError(f"nothing of {source} has come for {DOWNLOAD_S:.0f} s; try again (what has been fetched is kept)")


@contextlib.contextmanager
def found(
    source: str, models: Path | None, cache: ShareCache, progress: Progress, *, in_part: bool = False
) -> Iterator[tuple[Path, HubMirror | None]]:
    """Find a model as `fetch` does, for as long as the context lasts; of one that was pulled in part, its mirror.

    Args:
        cache: beside whose shares mirrors are.
        in_part: fetch no more than is needed to open a model that is not here.

    Yields:
        where it is opened, and what brings bytes of it that are missing; None: all of it is here.

    Raises:
        LendingError: there is no room for a mirror, or what it lacks does not come.
        Exception: as `fetch` raises it.
    """
    mirror = open_pulled(source, models, cache.folder, cache.limit)
    if mirror is None and in_part and not (find_here(source, models) or find_fetched(source)):
        mirror = begin_pull(source, cache.folder, cache.limit)
    if mirror is None:
        yield fetch(source, models, progress), None
        return
    with mirror:
        yield mirror.place, mirror
