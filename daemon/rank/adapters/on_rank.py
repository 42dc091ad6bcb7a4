"""What one rank has of the adapters of its session: their files on this machine's disk, its share of them in slots."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from motley.daemon.adapters.config import CONFIG
from motley.daemon.adapters.cutting import cut_adapter
from motley.daemon.adapters.reading import Adapter, read_adapter
from motley.daemon.adapters.store import AdapterStore, AdapterStoreError, read_piece, size_of
from motley.daemon.models.cutting.profile import adapter_elements
from motley.daemon.models.description.model import Model
from motley.daemon.models.graph.rank_graph import Declared
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.adapters.kept_products import KeptProducts
from motley.daemon.rank.adapters.messages import (
    FindAdapter,
    FoundAdapter,
    LoadAdapter,
    Piece,
    ReadAdapter,
    WriteAdapter,
)
from motley.daemon.rank.steps import Moved, StepError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.hub import stays_inside
from motley.plugins.engine import AdaptedEngine, EngineMemoryError, PreparedAdapter

ELEMENT_BYTES = 4
"""For so many of each element of an adapter the planner has left room."""
PATIENCE_S = 0.002
"""An adapter that is not read so soon is asked for again, after the next step."""
_WRONG = (AdapterStoreError, CheckpointError, ConfigError)


class _Read(NamedTuple):
    """An adapter that was read.

    Attributes:
        share: this rank's.
    """

    told: FoundAdapter
    place: Path
    share: PreparedAdapter


@dataclass
class RankAdapters:
    """See `motley.daemon.rank.executor.Adapters`.

    Attributes:
        engine: has the slots.
        model: whose adapters they are.
        declared: this rank's share of it.
        number: of this rank.
        slots: that the engine has.
        rank: the largest that a product of an adapter may have.
        store: has what other ranks have sent.
        models: the folder in which sources are looked up, if there is one.
    """

    engine: AdaptedEngine
    model: Model
    declared: Declared
    number: int
    slots: int
    rank: int
    store: AdapterStore
    models: Path | None
    _places: dict[str, Path] = field(default_factory=dict)
    """Where the files of adapters are, as far as they have been looked for."""
    _found: dict[str, FoundAdapter] = field(default_factory=dict)
    """What was said of those."""
    _kept: KeptProducts = field(init=False)
    _reader: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "adapters"))
    _reading: Future[_Read | str] | None = None
    """What is looked for."""
    _answered: FoundAdapter | None = None
    """What was said when that was found."""

    def __post_init__(self) -> None:
        self._kept = KeptProducts(self.slots * self.rank * ELEMENT_BYTES * adapter_elements(self.model))

    def do(self, message: FindAdapter | ReadAdapter | WriteAdapter | LoadAdapter) -> FoundAdapter | Piece | Moved:
        """Do what rank 0 says, and say how it went.

        Raises:
            StepError: there is no such slot.
            motley.plugins.engine.EngineError: the engine cannot have what every other rank has.
        """
        match message:
            case FindAdapter(fingerprint, source, again):
                return self._find(fingerprint, source, again)
            case ReadAdapter(holder, fingerprint, start):
                try:
                    return Piece(read_piece(self._place(fingerprint), start) if holder == self.number else b"")
                except AdapterStoreError as error:
                    return Piece(trouble=str(error))
            case WriteAdapter(fingerprint, start, size, data):
                try:
                    if fingerprint not in self._places:
                        self.store.write(fingerprint, start, size, data)
                except AdapterStoreError as error:
                    return Moved(str(error))
                return Moved()
            case LoadAdapter(fingerprint, slot):
                if not 1 <= slot <= self.slots:
                    raise StepError(f"an adapter is for slot {slot}; there are {self.slots}")
                return self._load(fingerprint, slot)

    def close(self) -> None:
        """Forget what has come of an adapter of which the rest does not come, and read nothing more."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.store.close()

    def _find(self, fingerprint: str, source: str, again: bool) -> FoundAdapter:
        """Look for an adapter, and have it in memory; that is read beside the steps."""
        known = self._found.get(fingerprint)
        if known is not None and self._kept.get(fingerprint) is not None:
            return known
        if again and self._answered is not None:
            return self._answered
        if not again or self._reading is None:
            self._answered, self._reading = None, self._reader.submit(self._look, fingerprint, source)
        try:
            read = self._reading.result(PATIENCE_S)
        except TimeoutError:
            return FoundAdapter("", pending=True)
        self._reading = None  # which would keep what was read
        if isinstance(read, str):
            self._places.pop(fingerprint, None)
            self._answered = FoundAdapter("", trouble=read)
            return self._answered
        name = read.told.fingerprint
        self._found[name], self._places[name] = read.told, read.place
        self._kept.put(name, read.share)
        self._answered = read.told
        return read.told

    def _look(self, fingerprint: str, source: str) -> _Read | str:
        """An adapter and this rank's share of it; or why there is none."""
        trouble = f"no node of this session has a folder {source!r} with an adapter"
        for place in self._candidates(fingerprint, source):
            try:
                adapter = self._read(place)
                size = size_of(place)
            except _WRONG as error:
                trouble = str(error)
                continue
            if fingerprint and adapter.fingerprint != fingerprint:
                trouble = f"{place} has changed: it is another adapter than it was; add it again"
                continue
            told = FoundAdapter(adapter.fingerprint, max(adapter.ranks, default=0), adapter.bytes, size)
            return _Read(told, place, self.engine.prepare_adapter(cut_adapter(adapter, self.declared)))
        return trouble

    def _candidates(self, fingerprint: str, source: str) -> list[Path]:
        """The folders in which an adapter may be."""
        kept = self.store.find(fingerprint) if fingerprint else None
        places = [kept] if kept else []
        if source and not source.startswith(("//", "\\\\")):  # a network path would make this machine log in there
            places.append(Path(source).absolute())
            if self.models is not None and stays_inside(source):
                places.append((self.models / source).absolute())
        return [place for place in places if (place / CONFIG).is_file()]

    def _read(self, place: Path) -> Adapter:
        """An adapter that fits the model and a slot.

        Raises:
            AdapterStoreError, CheckpointError, ConfigError: it does not.
        """
        adapter = read_adapter(place, self.model)
        largest = max(adapter.ranks, default=0)
        if largest > self.rank:
            raise AdapterStoreError(
                f"{place} has matrices of rank {largest}; this session has room for adapters of rank {self.rank}: start"
                f" it with --adapter-rank {largest}"
            )
        return adapter

    def _place(self, fingerprint: str) -> Path:
        place = self._places.get(fingerprint) or self.store.find(fingerprint)
        if place is None:
            raise AdapterStoreError(f"the files of adapter {fingerprint[:12]} are not here any more")
        return place

    def _load(self, fingerprint: str, slot: int) -> Moved:
        try:
            share = self._kept.get(fingerprint)
            if share is None:
                place = self._place(fingerprint)
                adapter = self._read(place)
                if adapter.fingerprint != fingerprint:
                    raise AdapterStoreError(f"{place} has changed: it is another adapter than it was; add it again")
                share = self.engine.prepare_adapter(cut_adapter(adapter, self.declared))
                self._kept.put(fingerprint, share)
            self.engine.load_adapter(slot, share)
            self._kept.loaded(slot, fingerprint)
        except (*_WRONG, EngineMemoryError) as error:
            self._places.pop(fingerprint, None)
            return Moved(str(error))
        return Moved()
