"""What a rank does with adapters: it finds them, sends and takes their files, and loads its own share of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import load_file

from motley.daemon.adapters import store
from motley.daemon.adapters.config import CONFIG
from motley.daemon.adapters.reading import WEIGHTS, expert_tensors
from motley.daemon.adapters.store import AdapterStore
from motley.daemon.models.cutting.profile import adapter_elements
from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.rank.adapters import lookups, on_rank
from motley.daemon.rank.adapters.messages import (
    FindAdapter,
    FoundAdapter,
    LoadAdapter,
    Piece,
    ReadAdapter,
    WriteAdapter,
)
from motley.daemon.rank.adapters.on_rank import RankAdapters
from motley.daemon.rank.steps import Moved, StepError
from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from tests.adapters.adapted import write_adapter
from tests.adapters.test_gguf_adapter import Type, to_gguf
from tests.models.cases import golden_case, uneven_shares

MODEL = golden_case("llama-mqa").model
A_LOT = 1 << 40


class Engine:
    """Remembers what is in its slots."""

    def __init__(self) -> None:
        self.slots: dict[int, PreparedAdapter] = {}
        self.loads = 0

    def prepare_adapter(self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor]) -> PreparedAdapter:
        matrices = [factor for each in products.values() for factor in each] + [*whole.values()]
        return PreparedAdapter({**products, **whole}, sum(each.nbytes for each in matrices))

    def load_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        self.slots[slot] = adapter
        self.loads += 1


def a_rank(folder: Path, number: int = 0, models: Path | None = None, rank: int = 4) -> tuple[RankAdapters, Engine]:
    """One of two, with a disk of its own."""
    shares = uneven_shares(units(MODEL, "fp32", 32), 2)
    declared = build_rank_graph(MODEL, shares, number, "fp32", 32, 64, adapters=2)
    engine = Engine()
    kept = AdapterStore(folder / f"kept-{number}", A_LOT)
    return RankAdapters(cast(Any, engine), MODEL, declared, number, 2, rank, kept, models), engine


def piece_of(rank: RankAdapters, read: ReadAdapter) -> Piece:
    while True:
        piece = rank.do(read)
        assert isinstance(piece, Piece)
        if not piece.pending:
            return piece


def found(rank: RankAdapters, name: str, source: str, fetch: bool = False) -> FoundAdapter:
    again = False
    while True:
        answer = rank.do(FindAdapter(name, source, again, fetch))
        assert isinstance(answer, FoundAdapter)
        if not answer.pending:
            assert rank.do(FindAdapter(name, source, True, fetch)) == answer, "while others still read"
            return answer
        again = True


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """An adapter of rank 2."""
    return write_adapter(tmp_path / "mine", MODEL, seed=3, rank=2)


def test_an_adapter_goes_from_one_rank_to_the_other_and_is_loaded_by_both(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PIECE_BYTES", 1000)
    (first, one), (second, other) = a_rank(tmp_path, 0, models=tmp_path), a_rank(tmp_path, 1)
    there = found(first, "", "mine")
    assert (there.rank, there.size) == (2, 8 + sum((folder / name).stat().st_size for name in (CONFIG, WEIGHTS)))
    assert not found(second, there.fingerprint, "mine").fingerprint
    assert found(second, "", "mine").trouble == "no node of this session has a folder 'mine' with an adapter"
    start = 0
    while start < there.size:
        read = ReadAdapter(0, there.fingerprint, start)
        piece = piece_of(first, read)
        assert second.do(read) == Piece()
        for rank in (first, second):
            assert rank.do(WriteAdapter(there.fingerprint, start, there.size, piece.data)) == Moved()
        start += len(piece.data)
    assert found(second, there.fingerprint, "mine") == there
    assert second.do(FindAdapter(there.fingerprint, "mine")) == there, "at once, as it is in memory"
    for rank, engine in ((first, one), (second, other)):
        assert rank.do(LoadAdapter(there.fingerprint, 2)) == Moved()
        assert [*engine.slots[2].parts] == [name for name in rank.declared.adapted if "layers" in name]
    assert not list((tmp_path / "kept-0").glob("*"))


def test_adapters_of_experts_are_kept_for_their_hosts_if_these_can_compute_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = golden_case("olmoe").model
    shares = uneven_shares(units(model, "fp32", 32), 1)
    declared = build_rank_graph(model, shares, 0, "fp32", 32, 64, adapters=2, experts_elsewhere=True)
    kept = AdapterStore(tmp_path / "kept", A_LOT)
    of_experts = write_adapter(tmp_path / "experts", model, seed=3, rank=2, experts=True)
    attention = write_adapter(tmp_path / "attention", model, seed=3, rank=2)
    rank = RankAdapters(cast(Any, Engine()), model, declared, 0, 2, 64, kept, None, "webgpu")
    told = found(rank, "", str(of_experts))
    assert "on hosts, whose engine 'webgpu' cannot compute with adapters" in told.trouble
    assert "start it with experts 'sliced'" in told.trouble
    assert found(rank, "", str(attention)).fingerprint
    rank = RankAdapters(cast(Any, Engine()), model, declared, 0, 2, 64, kept, None, "onnxruntime")
    names = [found(rank, "", str(each)).fingerprint for each in (of_experts, attention)]
    for slot, name in enumerate(names, 1):
        assert rank.do(LoadAdapter(name, slot)) == Moved()
    assert [*rank.experts] == [1]
    assert rank.experts[1].name.hex() == names[0]
    assert {*rank.experts[1].products} == {*expert_tensors(model).values()}
    assert rank.do(LoadAdapter(names[1], 1)) == Moved()
    assert not rank.experts
    monkeypatch.setattr(on_rank, "MAX_MESSAGE", 1000)
    rank = RankAdapters(cast(Any, Engine()), model, declared, 0, 2, 64, kept, None, "onnxruntime")
    assert "bytes for an expert" in found(rank, "", str(of_experts)).trouble


def test_whole_tables_are_where_their_rows_are_needed(tmp_path: Path) -> None:
    """Every rank of the first stage has all embeddings, each of the last one its rows of the head; all are counted."""
    folder = write_adapter(tmp_path / "whole", MODEL, seed=3, rank=2, whole=("model.embed_tokens", "lm_head"))
    needed = sum(each.size for each in load_file(folder / WEIGHTS).values())
    enough = -(-needed // adapter_elements(MODEL))
    told = found(a_rank(tmp_path, rank=2)[0], "", str(folder)).trouble
    assert f"start it with --adapter-rank {enough}" in told
    rows = 0
    for number in (0, 1):
        rank, engine = a_rank(tmp_path, number, rank=enough)
        there = found(rank, "", str(folder))
        assert (there.rank, there.weights) == (2, 4 * needed)
        assert rank.do(LoadAdapter(there.fingerprint, 2)) == Moved()
        table = load_file(folder / WEIGHTS)["base_model.model.model.embed_tokens.weight"]
        for slot, expected in ((2, table[[3, 7]]), (1, np.zeros((2, MODEL.hidden)))):
            begin = np.zeros((2, MODEL.hidden), np.float32)
            rank.embed(slot, begin, [3, 7])
            np.testing.assert_array_equal(begin, expected)
        own = sum(len(each) for each in engine.slots[2].parts.values() if not isinstance(each, AdapterProduct))
        assert own == len(rank.declared.words)
        rows += own
    assert rows == MODEL.vocabulary


def test_what_takes_turns_is_not_read_again(folder: Path, tmp_path: Path) -> None:
    rank, engine = a_rank(tmp_path)
    name = found(rank, "", str(folder)).fingerprint
    (folder / WEIGHTS).unlink()
    assert [rank.do(LoadAdapter(name, slot)) for slot in (1, 2, 1)] == [Moved()] * 3
    assert engine.loads == 3
    with pytest.raises(StepError, match="slot 3"):
        rank.do(LoadAdapter(name, 3))


def test_what_cannot_be_had_is_told(folder: Path, tmp_path: Path) -> None:
    rank, engine = a_rank(tmp_path, rank=1)
    assert "rank 2; this session has room for adapters of rank 1" in found(rank, "", str(folder)).trouble
    assert "no node" in found(rank, "", "//server/share").trouble
    for name in (WEIGHTS, CONFIG):
        half = tmp_path / f"half of {name}"
        half.mkdir()
        (half / name).touch()
        lacking = CONFIG if name == WEIGHTS else WEIGHTS
        assert found(rank, "", str(half)).trouble == f"{half} has no {lacking}, so it is no adapter in PEFT's format"
    rank, engine = a_rank(tmp_path)
    name = found(rank, "", str(folder)).fingerprint
    again, engine = a_rank(tmp_path)
    other = write_adapter(tmp_path / "other", MODEL, seed=4, rank=2)
    (folder / WEIGHTS).write_bytes((other / WEIGHTS).read_bytes())
    assert "has changed" in found(again, name, str(folder)).trouble
    assert again.do(LoadAdapter(name, 1)) == Moved(f"adapter {name[:12]} is not in memory any more")
    assert again.do(ReadAdapter(0, name, 0)) == Piece(trouble=f"the files of adapter {name[:12]} are not here any more")
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-9])
    assert "truncated" in found(again, "", str(folder)).trouble
    assert not engine.loads


def test_what_was_dropped_is_read_again_beside_the_steps(folder: Path, tmp_path: Path) -> None:
    """Where it was, though nobody says where that is; loading reads nothing."""
    rank, _ = a_rank(tmp_path)
    others = [write_adapter(tmp_path / str(seed), MODEL, seed=seed) for seed in (5, 6, 7)]
    name, *more = (found(rank, "", str(each)).fingerprint for each in (folder, *others))
    assert rank.do(LoadAdapter(name, 1)) == Moved(f"adapter {name[:12]} is not in memory any more")
    assert found(rank, name, "").fingerprint == name
    assert rank.do(LoadAdapter(name, 1)) == Moved()
    assert rank.do(LoadAdapter(more[-1], 2)) == Moved()
    (folder / CONFIG).unlink()
    assert "has matrices" not in found(rank, more[0], "").trouble


def test_what_was_dropped_while_others_read_is_read_again(folder: Path, tmp_path: Path) -> None:
    rank, _ = a_rank(tmp_path)
    others = [write_adapter(tmp_path / str(seed), MODEL, seed=seed) for seed in (5, 6, 7)]
    name, *_ = (found(rank, "", str(each)).fingerprint for each in (folder, *others))
    assert rank.do(LoadAdapter(name, 1)) == Moved(f"adapter {name[:12]} is not in memory any more")
    while (answer := rank.do(FindAdapter("", str(folder), again=True))) == FoundAdapter("", pending=True):
        pass
    assert isinstance(answer, FoundAdapter)
    assert answer.fingerprint == name
    assert rank.do(LoadAdapter(name, 1)) == Moved()


def test_a_file_for_which_there_is_no_room_is_not_read(folder: Path, tmp_path: Path) -> None:
    rank, _ = a_rank(tmp_path)
    with (folder / WEIGHTS).open("ab") as file:
        file.truncate(1 << 40)
    assert "there is room for" in found(rank, "", str(folder)).trouble
    said = rank.do(WriteAdapter("a" * 64, 0, 1 << 40, b"x"))
    assert isinstance(said, Moved)
    assert "there is room for" in said.trouble


def test_a_folder_that_never_answers_keeps_no_other_waiting(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, _ = a_rank(tmp_path)
    answers, is_file = threading.Event(), Path.is_file

    def slowly(path: Path) -> bool:
        if "network" in path.parts:
            answers.wait(30)
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", slowly)
    hanging = FindAdapter("", "/network/adapter")
    assert rank.do(hanging) == FoundAdapter("", pending=True)
    assert found(rank, "", str(folder)).fingerprint
    monkeypatch.setattr(lookups, "SILENT_S", 0.0)
    answer = rank.do(FindAdapter("", "/network/adapter", True))
    assert isinstance(answer, FoundAdapter)
    assert "a disk has not answered" in answer.trouble
    answers.set()


def test_what_came_damaged_is_told_before_it_is_loaded(folder: Path, tmp_path: Path) -> None:
    """And comes again in place of that."""
    (first, _), (second, _) = a_rank(tmp_path, 0), a_rank(tmp_path, 1)
    there = found(first, "", str(folder))
    piece = piece_of(first, ReadAdapter(0, there.fingerprint, 0))
    damaged = bytearray(piece.data)
    damaged[-1] ^= 1
    second.do(WriteAdapter(there.fingerprint, 0, there.size, bytes(damaged)))
    assert "has changed: it is another adapter" in found(second, there.fingerprint, "").trouble
    second.do(WriteAdapter(there.fingerprint, 0, there.size, piece.data))
    assert found(second, there.fingerprint, "") == there


def test_rank_0_alone_fetches_from_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if it is told to, as no rank has the folder."""
    asked: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **more: Any) -> str:
        asked.append({"repo": repo, **more})
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    first, second = (a_rank(tmp_path, number)[0] for number in (0, 1))
    assert not found(first, "", "owner/name").fingerprint
    assert not found(second, "", "owner/name", fetch=True).fingerprint
    assert not asked
    assert found(first, "", "owner/name@main", fetch=True).rank == 2
    assert (asked[0]["repo"], asked[0]["revision"], asked[0]["allow_patterns"]) == (
        "owner/name",
        "main",
        [CONFIG, WEIGHTS],
    )


def test_one_in_gguf_is_found(tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    file = to_gguf(case, write_adapter(tmp_path / "peft", MODEL, seed=1), tmp_path / "a.gguf", Type.F32)
    rank, _ = a_rank(tmp_path, models=tmp_path)
    there = found(rank, "", "a.gguf")
    assert (there.rank, there.size) == (4, 8 + file.stat().st_size)


def test_one_that_adds_to_more_than_the_layers_must_fit_into_their_room(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "head", MODEL, seed=3, rank=2, head=True)
    assert found(a_rank(tmp_path, rank=3)[0], "", str(adapter)).rank == 2
    told = found(a_rank(tmp_path, rank=2)[0], "", str(adapter)).trouble
    assert "changes more than the layers" in told
    assert "start it with --adapter-rank 3" in told
