"""Two micro-chunks in flight: the same bits as one chunk, at any split, on any engine, and a clean end in between."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import motley.cli
from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.reading import read_model
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.engine import F32, ROW_TILE, EngineFactory, EngineOptions, Pending, Span, micro_chunks
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.transport import Communicator, Listener, Membership, PeerLost, Plain, connect_mesh
from tests.models.cases import LocalSession, uneven_shares

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
TOKENS = [index * 37 % 1024 for index in range(100)]


@given(st.integers(1, 10_000), st.booleans())
def test_micro_chunks_tile_the_rows(rows: int, halved: bool) -> None:
    chunks = micro_chunks(rows, halved)
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    assert len(chunks) == (2 if halved and rows > 1 else 1)
    assert all(chunk.start % ROW_TILE == 0 for chunk in chunks if rows >= 2 * ROW_TILE)


def session(
    folder: Path,
    ranks: int,
    quantisation: str = "fp32",
    block: int = 32,
    factory: EngineFactory | Sequence[EngineFactory] = OnnxRuntimeEngine,
) -> LocalSession:
    shares = uneven_shares(units(read_model(BUNDLED), quantisation, block), ranks)
    assert ranks < 3 or not shares[1].mlp, "one has nothing to do"
    return LocalSession(BUNDLED, factory, shares, folder, quantisation, block)


def run(ranks: LocalSession, sequence: int, halved: bool) -> list[F32]:
    """Logits of chunks of all kinds and of a token after them."""
    logits, position = [], 0
    for rows in (32, 41, 2, 22):
        logits.append(ranks.step(TOKENS[position : position + rows], position, sequence=sequence, halved=halved))
        position += rows
    logits.append(ranks.step(TOKENS[position : position + 1], position, sequence=sequence))
    return logits


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(("quantisation", "block"), [("fp32", 32), ("int8", 32), ("int4", 32), ("int4", 128)])
def test_halves_give_the_bits_of_the_whole(quantisation: str, block: int, count: int, tmp_path: Path) -> None:
    with session(tmp_path, count, quantisation, block) as ranks:
        for whole, halves in zip(run(ranks, 0, False), run(ranks, 1, True), strict=True):
            np.testing.assert_array_equal(halves, whole)
        assert all(member.advances for member in ranks.members), (
            "sums are looked after while the other half is computed"
        )


@pytest.mark.parametrize(("quantisation", "block"), [("fp32", 32), ("int8", 128), ("int4", 128)])
def test_the_size_of_chunks_leaves_no_trace(quantisation: str, block: int, tmp_path: Path) -> None:
    """As long as they begin at even rows and none is a single row, as kernels for floats may take rows by twos."""
    tokens = [index * 37 % 1024 for index in range(300)]
    expected: list[F32] = []
    with session(tmp_path, 2, quantisation, block) as ranks:
        for sequence, sizes in enumerate([(64,) * 5, (128,) * 3, (256, 44), (62, 238), (2, 256, 42)]):
            position = 0
            for size in sizes:
                last = tokens[position : position + size]
                logits = ranks.step(last, position, 1, sequence, halved=sequence % 2 == 1)
                position += len(last)
            got = [logits, *(ranks.step([token], position + token, sequence=sequence) for token in range(3))]
            expected = expected or got
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_array_equal(one, other)
            ranks.sequences.close(sequence)


def test_engines_that_overlap_and_engines_that_do_not_make_the_same_sums(tmp_path: Path) -> None:
    with session(tmp_path / "one", 2) as ranks:
        expected = run(ranks, 0, True)
    with session(tmp_path / "mixed", 2, factory=[OnnxRuntimeEngine, ReferenceEngine]) as ranks:
        for got, wanted in zip(run(ranks, 0, True), expected, strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-3)


class _Leaving:
    """A rank that is gone in the middle of a step, after so many sums were started."""

    def __init__(self, communicator: Communicator, starts: int) -> None:
        self._communicator = communicator
        self._left = starts
        self.rank = communicator.rank
        self.size = communicator.size

    def all_reduce(self, buffer: npt.NDArray[Any]) -> None:
        self._communicator.all_reduce(buffer)

    def all_reduce_start(self, buffer: npt.NDArray[Any]) -> Pending:
        if self._left == 0:
            self._communicator.close()
        self._left -= 1
        return self._communicator.all_reduce_start(buffer)


@pytest.mark.parametrize("starts", [0, 1, 2, 5])
def test_a_peer_lost_between_two_micro_chunks_is_named_and_leaves_nothing_behind(starts: int, tmp_path: Path) -> None:
    config = read_model(BUNDLED)
    shares = uneven_shares(units(config, "fp32", 32), 2)
    listeners = [Listener("127.0.0.1") for _ in shares]
    addresses = [f"127.0.0.1:{listener.port}" for listener in listeners]
    hidden = np.ones((64, config.hidden), np.float32)
    span = Span(np.arange(64, dtype=np.int32), 0, len(hidden), wanted=1)

    def work(rank: int) -> list[Exception]:
        declared = build_rank_graph(config, shares, rank, "fp32", 32, 128)
        share_file = tmp_path / str(rank) / SHARE_FILE
        share_file.parent.mkdir()
        with SafetensorsCheckpoint(BUNDLED) as checkpoint:  # of its own: one at a time may read from it
            write_share(checkpoint, declared.weights, declared.share_bytes, share_file)
        member = Membership("test", epoch=1, rank=rank, size=2, secret=bytes(32), agreement=bytes(32))
        errors: list[Exception] = []
        with connect_mesh(listeners[rank], member, addresses, security=Plain()) as communicator:
            collectives = communicator if rank == 0 else _Leaving(communicator, starts)
            engine = OnnxRuntimeEngine(declared.bind(share_file), collectives, EngineOptions())
            for _ in range(2):  # the second time nothing is waited for
                try:
                    engine.step(hidden, [span], halved=True)
                except Exception as error:
                    errors.append(error)
            engine.close()
        return errors

    with closing(listeners[0]), closing(listeners[1]), ThreadPoolExecutor(2) as pool:
        survivor, _ = pool.map(work, range(2))
    assert [type(error) for error in survivor] == [PeerLost, PeerLost]
    assert "rank 1" in str(survivor[0])
