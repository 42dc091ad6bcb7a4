"""The settings of an assignment reach the engine, which refuses those that it does not know."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.rank.loading import load_rank
from motley.daemon.rank.peers import Peers
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.worker.membership import _agreement
from motley.plugins.engine import EngineError
from motley.protocol import mesh_pb2 as pb
from motley.transport import Listener, Membership, Plain, connect_mesh
from tests.models.cases import golden_cases, whole_share

CASE = golden_cases()[0]


@pytest.fixture
def alone() -> Iterator[Peers]:
    member = Membership("s", 1, 0, 1, bytes(32), bytes(32))
    with (
        closing(Listener("127.0.0.1")) as listener,
        connect_mesh(listener, member, ["nowhere:1"], security=Plain()) as communicator,
    ):
        yield Peers(communicator)


def assignment(engine: str, options: dict[str, str]) -> pb.Assignment:
    share = whole_share(units(CASE.model, "fp32", 32))
    ranges = {
        name: pb.Range(start=own.start, stop=own.stop)
        for name, own in (("attention", share.attention), ("mlp", share.mlp), ("vocabulary", share.vocabulary))
    }
    with SafetensorsCheckpoint(CASE.folder) as checkpoint:
        return pb.Assignment(
            model=pb.ModelSpec(source=str(CASE.folder), quantisation="fp32", block=32),
            fingerprint=checkpoint.fingerprint(),
            size=1,
            shares=[pb.Share(attention_split=1, **ranges)],
            context=CASE.model.context,
            cache_blocks=CASE.model.context // 32,
            cache_block_tokens=32,
            engine=engine,
            engine_options=options,
        )


@pytest.mark.parametrize(
    ("engine", "options", "words"),
    [
        ("reference", {"device": "cuda"}, r"needs CuPy for device 'cuda' .*\[gpu\]"),
        ("reference", {"devise": "cuda"}, "engine 'reference' has no option devise; it has: dtype, device"),
        ("onnxruntime", {"device": "cpu"}, "engine 'onnxruntime' has no option device; it has: none"),
    ],
)
def test_what_the_engine_cannot_do_is_named(
    engine: str, options: dict[str, str], words: str, alone: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    order, cache = assignment(engine, options), ShareCache(tmp_path)
    with (
        pytest.raises(EngineError, match=words),
        load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None),
    ):
        pass


def test_a_device_that_is_there_loads(alone: Peers, tmp_path: Path) -> None:
    order, cache = assignment("reference", {"device": "cpu", "dtype": "float32"}), ShareCache(tmp_path)
    with load_rank(order, 0, alone, models=None, cache=cache, threads=1, progress=lambda done, total: None) as rank:
        assert rank.vocabulary == CASE.model.vocabulary


def test_ranks_may_have_other_settings_than_their_peers() -> None:
    """Of what ranks prove to each other, they are no part."""
    one, other = assignment("reference", {"device": "cuda"}), assignment("onnxruntime", {})
    assert _agreement(one) == _agreement(other)
