"""The size of a prompt's chunks: every size is tried, the smallest of the fastest is kept."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.chunk_sizes import SIZES, TRIES, Chunk, ChunkSizes


def learn(sizes: ChunkSizes, seconds: Callable[[Chunk], float], prompts: int, length: int = 1000) -> list[Chunk]:
    """Compute prompts; the chunks of the last."""
    chunks: list[Chunk] = []
    for _ in range(prompts):
        chunks, position = [], 0
        while position < length:
            chunk = sizes.choose(position, length - position)
            sizes.took(chunk, position, seconds(chunk))
            chunks.append(chunk)
            position += chunk.rows
    return chunks


@given(st.integers(1, 300), st.booleans(), st.lists(st.floats(1e-6, 1e3), max_size=20), st.integers(1, 2000))
def test_chunks_fit_whatever_was_learnt(max_rows: int, halves: bool, times: list[float], left: int) -> None:
    sizes = ChunkSizes(max_rows, halves)
    for position in (0, 64):
        for seconds in [*times, 1.0]:
            chunk = sizes.choose(position, left)
            assert 1 <= chunk.rows <= min(left, max_rows)
            assert halves or not chunk.halved
            sizes.took(chunk, position, seconds)


@given(st.integers(1, 2000), st.booleans(), st.lists(st.floats(0.1, 10.0), max_size=12))
def test_every_row_meets_the_same_kernels_whatever_the_sizes(length: int, halves: bool, times: list[float]) -> None:
    sizes = ChunkSizes(256, halves)
    for seconds in times:
        learn(sizes, lambda chunk, seconds=seconds: chunk.rows * seconds, 1, 1000)  # type: ignore[misc]
    chunks = learn(sizes, lambda chunk: chunk.rows, 1, length)
    assert sum(chunk.rows for chunk in chunks) == length
    assert all(chunk.rows % 2 == 0 for chunk in chunks[:-1])
    assert length == 1 or chunks[-1].rows > 1


def test_every_size_is_tried_then_the_fastest_is_kept() -> None:
    cost = {64: 1.0, 128: 0.8, 256: 0.9}
    sizes = ChunkSizes(256, halves=True)
    chunks = learn(
        sizes, lambda chunk: chunk.rows * cost[chunk.rows] * (0.5 if chunk.halved else 1.0), 6 * TRIES + 1, 256
    )
    assert chunks == [Chunk(128, True)] * 2


def test_a_little_slower_is_better_than_to_keep_others_waiting() -> None:
    sizes = ChunkSizes(256, halves=True)
    assert learn(sizes, lambda chunk: chunk.rows + 1.0, 6 * TRIES + 1, 256) == [Chunk(64, False)] * 4


def test_the_first_time_is_not_the_last_word() -> None:
    met: set[Chunk] = set()

    def seconds(chunk: Chunk) -> float:
        cold = chunk not in met
        met.add(chunk)
        return chunk.rows * (100.0 if cold and chunk.rows == 256 else 2.0 if chunk.rows < 256 else 1.0)

    assert learn(ChunkSizes(256, halves=False), seconds, 3 * TRIES + 1, 256) == [Chunk(256, False)]


def test_only_the_first_chunk_of_a_prompt_is_timed() -> None:
    sizes = ChunkSizes(256, halves=False)
    for _ in range(50):
        sizes.took(Chunk(64, False), 64, 1e-9)
    learn(sizes, lambda chunk: 1.0, 3 * TRIES, 256)
    assert sizes.choose(256, 999) == Chunk(SIZES[-1], False)


def test_short_prompts_are_one_chunk() -> None:
    sizes = ChunkSizes(256, halves=True)
    assert sizes.choose(0, 40) == Chunk(40, False)
    learn(sizes, lambda chunk: 1.0 if chunk.halved else 2.0, 6 * TRIES, 256)
    assert sizes.choose(0, 40) == Chunk(40, True)
    assert sizes.choose(0, 20) == Chunk(20, False)
    assert sizes.choose(17, 1) == Chunk(1, False)
