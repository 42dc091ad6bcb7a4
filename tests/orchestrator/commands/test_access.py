"""`motley keys`, `motley token` and `motley nodes`, as people run them."""

from __future__ import annotations

import json
from typing import Any


async def test_keys_are_made_listed_and_removed(mesh: Any, motley: Any) -> None:
    status, out, err = await motley("keys", "create", "--note", "a friend")
    key = out.strip()
    assert (status, key.startswith("motley-")) == (0, True)
    assert "not shown again" in err
    assert (await motley("keys", "create", "--scope", "everything"))[0] == 2
    _, out, _ = await motley("keys", "ls", "--json")
    (told,) = json.loads(out)
    assert (told["scope"], told["note"]) == ("use", "a friend")
    assert key not in out
    assert told["id"] in (await motley("keys", "ls"))[1]
    assert (await motley("keys", "rm", told["id"]))[0] == 0
    assert (await motley("keys", "ls"))[1].strip() == "none"
    status, _, err = await motley("keys", "rm", told["id"])
    assert (status, "there is no API key" in err) == (1, True)


async def test_tokens_nodes_and_usage(mesh: Any, motley: Any, bard: Any, new_node: Any) -> None:
    _, out, err = await motley("token", "create", "--single-use", "--expires", "30m", "--note", "for the laptop")
    assert "for one machine, for 0.5 h" in err
    laptop = new_node("laptop")
    await laptop.join(mesh.orchestrator.local_target, out.strip())
    assert "for the laptop" not in (await motley("token", "ls"))[1], "it is used up"
    assert (await motley("token", "create", "--expires", "soon"))[0] == 1
    _, out, _ = await motley("token", "create", "--expires", "never", "--json")
    made = json.loads(out)
    assert made["expires"] is None
    assert (await motley("token", "rm", made["id"]))[0] == 0
    assert (await motley("token", "codes"))[1].strip() == "none"
    _, out, _ = await motley("nodes", "ls")
    assert "laptop" in out
    assert "pc" in out
    status, out, _ = await motley("nodes", "revoke", "laptop")
    assert (status, "laptop is shut out" in out) == (0, True)
    await laptop.ended()
    await laptop.leave()
    await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi"})
    _, out, _ = await motley("keys", "usage", "--json")
    assert [(row["caller"], row["requests"]) for row in json.loads(out)] == [("this machine", 1)]
