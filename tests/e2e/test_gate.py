"""A rank that computes wrongly serves nobody: real worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from motley.bench import local_mesh
from motley.bench.local_mesh import LocalMesh, MeshError, MeshSpec

ROOT = Path(__file__).parents[2]


async def test_the_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    async def start(**options: object) -> local_mesh.RankWorker:
        return await begin(**{**options, "entry": ("tests.e2e.faulty_rank",)})  # type: ignore[arg-type]

    begin = local_mesh.RankWorker.start
    monkeypatch.setattr(local_mesh.RankWorker, "start", start)
    spec = MeshSpec(model=ROOT / "cli" / "models" / "shakespeare-2.6m", weights=[1, 1, 1], context=1024)
    message = "rank 1: this rank computes wrongly: layer 0 attention of 3 tokens from position 1020 differs"
    with pytest.raises(MeshError, match=message):
        async with LocalMesh(spec):
            pass
