"""`motley models pull` in a mesh: each node fetches from the hub what its own share needs, and serves with that."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.losses.test_survival import GREEDY, undisturbed
from tests.e2e.network.test_lending import taken
from tests.e2e.processes import BUNDLED, last_json, mesh, motley
from tests.weights.local_hub import LocalHub

WEIGHTS = "model.safetensors"


async def test_each_node_fetches_its_own_share(tmp_path: Path) -> None:
    """Neither could hold the model alone. What was pulled is not fetched again when the session starts."""
    whole = (BUNDLED / WEIGHTS).stat().st_size
    hub = LocalHub()
    hub.repositories = {"acme/bard": BUNDLED}
    async with hub.serving(), mesh(tmp_path) as there:
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
        for name in "ab":
            await there.join(name, memory="208MB", cache=tmp_path / name, **where)
        for name in "ab":
            before = hub.sent[WEIGHTS]
            how = ("--node", name, "--cache", str(tmp_path / name), "--context", "64", "--url", there.url)
            pulled = await last_json("models", "pull", "acme/bard", *how, **where)
            sent = hub.sent[WEIGHTS] - before
            assert 0 < sent < whole
            assert pulled["bytes"] > whole > taken(tmp_path / name) >= sent
            (there_now,) = (await last_json("models", "ls", "--cache", str(tmp_path / name), "--json", **where))[
                "models"
            ]
            assert (there_now["name"], there_now["from"]) == ("acme/bard", "hub, in part")
            assert 0 < there_now["bytes"] < pulled["bytes"]
        pulled_of_both, asked = hub.sent[WEIGHTS], {"quantisation": "stored", "context": 64, "exact": False}
        await there.session(model="acme/bard", name="pulled", **asked)
        assert hub.sent[WEIGHTS] == pulled_of_both
        await undisturbed(there.url, {**GREEDY, "max_tokens": 20, "model": "pulled"})
    assert hub.sent[WEIGHTS] == pulled_of_both
    removing = ("models", "rm", "acme/bard", "--cache", str(tmp_path / "a"), "--yes")
    status, out, err = await motley(*removing, **where)
    assert (status, "removed acme/bard" in out) == (0, True), err
    assert taken(tmp_path / "a") == 0
