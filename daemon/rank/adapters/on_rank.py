"""What one rank has of the adapters of its session: their files on this machine's disk, its share of them in slots."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

from motley.daemon.adapters.cutting import cut_adapter
from motley.daemon.adapters.fetching import fetched_adapter
from motley.daemon.adapters.reading import Adapter, expert_tensors, read_adapter
from motley.daemon.adapters.store import AdapterStore, AdapterStoreError, is_adapter, lacks, read_piece, size_of
from motley.daemon.experts.factors import ExpertsAdapter
from motley.daemon.experts.keys import ExpertKey
from motley.daemon.models.cutting.profile import adapter_elements
from motley.daemon.models.description.model import Model
from motley.daemon.models.graph.rank_graph import Declared
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.adapters.beginnings import Beginnings, beginnings
from motley.daemon.rank.adapters.kept_products import AdapterShare, KeptProducts
from motley.daemon.rank.adapters.lookups import Alive, Lookups
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
from motley.daemon.weights.hub import is_network_path, stays_inside
from motley.plugins.adapted_engine import AdaptedEngine, AdapterProduct
from motley.plugins.engine import F32
from motley.plugins.expert_engine import experts_take_adapters
from motley.transport import MAX_MESSAGE

ELEMENT_BYTES = 4
"""For so many of each element of an adapter the planner has left room."""
HEADER_BYTES = 16 << 20
"""What files of an adapter may have beside the matrices for which there is room."""
PATIENCE_S = 0.002
"""An adapter that is not read so soon is asked for again, after the next step."""
ANSWERS_KEPT = 64
_WRONG = (AdapterStoreError, CheckpointError, ConfigError)


class _Sought(NamedTuple):
    """An adapter that is looked for.

    Attributes:
        fingerprint, source, fetch: as in `FindAdapter`; this rank fetches.
    """

    fingerprint: str
    source: str
    fetch: bool


class _Read(NamedTuple):
    """An adapter that was read.

    Attributes:
        share: this rank's.
    """

    told: FoundAdapter
    place: Path
    share: AdapterShare


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
        expert_engine: computes routed experts on their hosts; None: they are not on hosts.
        experts: what adapters in slots add to experts on hosts.
    """

    engine: AdaptedEngine
    model: Model
    declared: Declared
    number: int
    slots: int
    rank: int
    store: AdapterStore
    models: Path | None
    expert_engine: str | None = None
    experts: dict[int, ExpertsAdapter] = field(default_factory=dict)
    _places: dict[str, Path] = field(default_factory=dict)
    """Where the files of adapters are, as far as they have been looked for."""
    _found: dict[str, FoundAdapter] = field(default_factory=dict)
    """What was said of those."""
    _kept: KeptProducts = field(init=False)
    _lookups: Lookups[_Sought, _Read] = field(init=False)
    _pieces: Lookups[tuple[Path, int], bytes] = field(init=False)
    _answers: OrderedDict[_Sought, FoundAdapter] = field(default_factory=OrderedDict)
    """What was said last of what was looked for."""
    _embeddings: dict[int, Beginnings | None] = field(default_factory=dict)
    """Of the adapters in slots."""

    def __post_init__(self) -> None:
        self._kept = KeptProducts(self.slots * self._room)
        self._lookups = Lookups(self._look)
        self._pieces = Lookups(lambda own, alive: read_piece(*own))

    def do(self, message: FindAdapter | ReadAdapter | WriteAdapter | LoadAdapter) -> FoundAdapter | Piece | Moved:
        """Do what rank 0 says, and say how it went.

        Raises:
            StepError: there is no such slot.
            motley.plugins.engine.EngineError: the engine cannot have what every other rank has.
        """
        match message:
            case FindAdapter(fingerprint, source, again, fetch):
                return self._find(_Sought(fingerprint, source, fetch and self.number == 0), again)
            case ReadAdapter(holder, fingerprint, start):
                return self._piece(fingerprint, start) if holder == self.number else Piece()
            case WriteAdapter(fingerprint, start, size, data):
                if size > self._largest:
                    return Moved(f"adapter {fingerprint[:12]} has {size} bytes; there is room for {self._largest}")
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

    def embed(self, slot: int, rows: F32, tokens: Sequence[int]) -> None:
        """Have the rows that tokens begin with here, f32[T, D or more], be those of the adapter in a slot."""
        if (own := self._embeddings.get(slot)) is not None:
            own.change(rows, tokens)

    def close(self) -> None:
        """Forget what has come of an adapter of which the rest does not come."""
        self.store.close()

    def _find(self, sought: _Sought, again: bool) -> FoundAdapter:
        """Look for an adapter, and have it in memory; that is read beside the steps."""
        fingerprint = sought.fingerprint
        known = self._found.get(fingerprint)
        if known is not None and self._kept.get(fingerprint) is not None:
            return known
        last = self._answers.get(sought) if again else None
        if last is not None and (last.trouble or self._kept.get(last.fingerprint) is not None):
            return last
        self._answers.pop(sought, None)
        read = self._lookups.ask(sought, PATIENCE_S)
        if read is None:
            return FoundAdapter("", pending=True)
        answer = FoundAdapter("", trouble=read) if isinstance(read, str) else read.told
        if isinstance(read, str):
            self._places.pop(fingerprint, None)
        else:
            self._found[answer.fingerprint], self._places[answer.fingerprint] = answer, read.place
            self._kept.put(answer.fingerprint, read.share)
        self._answers[sought] = answer
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        return answer

    def _look(self, sought: _Sought, alive: Alive) -> _Read:
        """An adapter and this rank's share of it, in a thread of its own.

        Raises:
            AdapterStoreError, CheckpointError, ConfigError: there is none; or the one in the last place is not right.
            motley.daemon.weights.hub.ModelNotFound: it cannot be fetched.
            EngineMemoryError: there is no room for it.
        """
        trouble: Exception = AdapterStoreError(
            f"no node of this session has a folder {sought.source!r} with an adapter"
        )
        candidates = [fetched_adapter(sought.source, alive)] if sought.fetch else self._candidates(sought)
        for place in candidates:
            if lacking := lacks(place):
                trouble = AdapterStoreError(f"{place} has no {lacking}, so it is no adapter in PEFT's format")
                continue
            alive()
            try:
                adapter = self._read(place, alive)
                size = size_of(place)
            except _WRONG as error:
                trouble = error
                continue
            if sought.fingerprint and adapter.fingerprint != sought.fingerprint:
                trouble = AdapterStoreError(f"{place} has changed: it is another adapter than it was; add it again")
                continue
            told = FoundAdapter(adapter.fingerprint, max(adapter.ranks, default=0), adapter.bytes, size)
            prepared = self.engine.prepare_adapter(*cut_adapter(adapter, self.declared.adapted))
            embedding = beginnings(adapter.embedding) if self.declared.stage.first else None
            return _Read(told, place, AdapterShare(prepared, embedding, self._for_hosts(adapter)))
        raise trouble

    def _candidates(self, sought: _Sought) -> list[Path]:
        """The folders and files that may be an adapter."""
        source = sought.source
        kept = self.store.find(sought.fingerprint) if sought.fingerprint else None
        places = [each for each in (self._places.get(sought.fingerprint), kept) if each]
        if source and not is_network_path(source):
            places.append(Path(source).absolute())
            if self.models is not None and stays_inside(source):
                places.append((self.models / source).absolute())
        return [place for place in dict.fromkeys(places) if is_adapter(place) or place.is_dir()]

    def _read(self, place: Path, alive: Alive) -> Adapter:
        """An adapter that fits the model and a slot.

        Raises:
            AdapterStoreError, CheckpointError, ConfigError: it does not.
        """
        adapter = read_adapter(place, self.model, alive, self._largest)
        largest = max(adapter.ranks, default=0)
        if largest > self.rank:
            raise AdapterStoreError(
                f"{place} has matrices of rank {largest}; this session has room for adapters of rank {self.rank}: start"
                f" it with --adapter-rank {largest}"
            )
        if (hosted := self._for_hosts(adapter)) is not None:
            instead = "start it with experts 'sliced', or leave experts out of the adapter"
            if not experts_take_adapters(self.expert_engine or ""):
                raise AdapterStoreError(
                    f"{place} adds to experts; this session has them on hosts, whose engine {self.expert_engine!r}"
                    f" cannot compute with adapters: start it with engine 'onnxruntime'; or {instead}"
                )
            if hosted.largest > MAX_MESSAGE:
                raise AdapterStoreError(
                    f"{place} has {hosted.largest} bytes for an expert; this session has experts on hosts, which are"
                    f" sent {MAX_MESSAGE} at most: {instead}"
                )
        if adapter.bytes > self._room:
            enough = ceil(adapter.bytes / (ELEMENT_BYTES * adapter_elements(self.model)))
            raise AdapterStoreError(
                f"{place} has matrices of {adapter.bytes} bytes, as it changes more than the layers; this session has"
                f" room for {self._room} bytes of an adapter: start it with --adapter-rank {enough}"
            )
        return adapter

    def _for_hosts(self, adapter: Adapter) -> ExpertsAdapter | None:
        """What an adapter adds to experts that are on hosts; None: nothing."""
        own: dict[ExpertKey, dict[str, AdapterProduct]] = {}
        for tensor, key in expert_tensors(self.model).items() if self.expert_engine is not None else ():
            if tensor in adapter.products:
                own.setdefault(key, {})[tensor] = adapter.products[tensor]
        return ExpertsAdapter(bytes.fromhex(adapter.fingerprint), own) if own else None

    @property
    def _room(self) -> int:
        """Bytes that the planner has left for an adapter."""
        return self.rank * ELEMENT_BYTES * adapter_elements(self.model)

    @property
    def _largest(self) -> int:
        """Bytes that an adapter's files may have."""
        return self._room + HEADER_BYTES

    def _piece(self, fingerprint: str, start: int) -> Piece:
        """A piece of an adapter's files, which are read beside the steps."""
        try:
            read = self._pieces.ask((self._place(fingerprint), start), PATIENCE_S)
        except AdapterStoreError as error:
            return Piece(trouble=str(error))
        if read is None:
            return Piece(pending=True)
        return Piece(trouble=read) if isinstance(read, str) else Piece(read)

    def _place(self, fingerprint: str) -> Path:
        place = self._places.get(fingerprint) or self.store.find(fingerprint)
        if place is None:
            raise AdapterStoreError(f"the files of adapter {fingerprint[:12]} are not here any more")
        return place

    def _load(self, fingerprint: str, slot: int) -> Moved:
        share = self._kept.get(fingerprint)
        if share is None:
            return Moved(f"adapter {fingerprint[:12]} is not in memory any more")
        self.engine.load_adapter(slot, share.prepared)
        self._embeddings[slot] = share.embedding
        self.experts.pop(slot, None)
        if share.experts is not None:
            self.experts[slot] = share.experts
        self._kept.loaded(slot, fingerprint)
        return Moved()
