"""A rank that computes wrongly serves nobody: real worker processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from motley.bench.meshes import local_mesh
from motley.bench.meshes.local_mesh import LocalMesh, MeshError, MeshSpec
from tests.e2e.processes import BUNDLED, mesh, motley

ROOT = Path(__file__).parents[3]


def search_path(*first: Path) -> str:
    """Where Python shall look for packages: there, then where it does now."""
    return os.pathsep.join(filter(None, [*map(str, first), os.environ.get("PYTHONPATH", "")]))


async def test_the_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", search_path(ROOT))

    async def start(**options: object) -> local_mesh.RankWorker:
        return await begin(**{**options, "entry": ("tests.e2e.losses.faulty_rank",)})  # type: ignore[arg-type]

    begin = local_mesh.RankWorker.start
    monkeypatch.setattr(local_mesh.RankWorker, "start", start)
    spec = MeshSpec(model=ROOT / "cli" / "models" / "shakespeare-2.6m", weights=[1, 1, 1], context=1024)
    message = "rank 1: this rank computes wrongly: layer 0 attention of 3 tokens from position 1020 differs"
    with pytest.raises(MeshError, match=message):
        async with LocalMesh(spec):
            pass


@pytest.mark.soak
async def test_the_user_is_told_which_node_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "packages" / "faulty-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[motley.engines]\nfaulty = tests.e2e.losses.faulty_engine:FaultyEngine\n")
    monkeypatch.setenv("PYTHONPATH", search_path(info.parent, ROOT))
    said = "node 'a' (rank 0): this rank computes wrongly: layer 0 attention of 3 tokens from position 1020 differs"
    async with mesh(tmp_path, "a", "b") as there:
        faulty = ("--quant", "fp32", "--engine", "faulty", "--nodes", "a,b", "--shares", "1,1")
        status, _, err = await motley("run", str(BUNDLED), "ROMEO:", "--raw", *faulty, MOTLEY_URL=there.url)
        assert status == 1
        assert f"did not come up: {said}" in err
        assert "Leave this node out, or have it use another engine" in err
        again = ("--raw", "--max-tokens", "1")
        status, _, err = await motley("run", BUNDLED.name, "ROMEO:", *again, MOTLEY_URL=there.url)
        assert status == 0, err
        assert f"session {BUNDLED.name!r} has failed: {said}" in err
        assert (
            f"motley run {BUNDLED.resolve()} PROMPT --quant fp32 --engine faulty --context 1024 --nodes a,b"
            " --shares 1,1\n"
        ) in err
