"""Adapters from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

from motley.daemon.adapters.config import CONFIG
from motley.daemon.adapters.reading import WEIGHTS
from motley.daemon.weights.hub import ModelNotFound, fetch

FETCH_S = 540.0
"""For so long an adapter may be fetched; connections that fall silent end sooner, by deadlines of the hub's library."""
SIGN_S = 1.0


def fetched_adapter(hub_id: str, alive: Callable[[], None]) -> Path:
    """The folder in PEFT's format or the GGUF file of an adapter, fetched unless it is here.

    Args:
        hub_id: ``owner/name``, ``owner/name@revision``, ``owner/name:file.gguf`` or ``owner/name@revision:file.gguf``.
        alive: is called every second meanwhile.

    Raises:
        ModelNotFound: it cannot be fetched, or not in time.
    """
    coming: Future[Path] = Future()

    def bring() -> None:
        try:
            coming.set_result(fetch(hub_id, [CONFIG, WEIGHTS]))
        except Exception as error:  # whoever waits is told
            coming.set_exception(error)

    Thread(target=bring, name="fetching an adapter", daemon=True).start()
    for _ in range(int(FETCH_S / SIGN_S)):
        alive()
        try:
            return coming.result(SIGN_S)
        except TimeoutError:
            if coming.done():
                raise
    raise ModelNotFound(f"{hub_id} could not be fetched within {FETCH_S:.0f} s; try again (what has come is kept)")
