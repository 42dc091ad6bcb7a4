"""`motley doctor` on a real mesh in which one node cannot reach another."""

from __future__ import annotations

import json
from typing import Any

from motley.protocol.mesh_pb2 import Probed


async def test_it_says_which_way_between_which_nodes_fails(mesh: Any, new_node: Any, motley: Any) -> None:
    pc, laptop = new_node("pc"), new_node("laptop")
    pc.ways = {"laptop": Probed(failure="nothing answers at laptop:4000 within 5 s")}
    laptop.ways = {"pc": Probed(latency_s=1e-3, bandwidth=1e8)}
    for node in (pc, laptop):
        await mesh.join(node)
    await mesh.poll("/api/nodes", lambda body: all(len(node["links"]) == 1 for node in body["nodes"]))
    status, out, err = await motley("doctor", "--json")
    assert status == 1, err
    found = json.loads(out)
    bad = [each for each in found if each["level"] == "bad" and each["about"] != "addresses"]
    assert [each["what"] for each in bad] == [
        "pc cannot reach laptop (127.0.0.1): nothing answers at laptop:4000 within 5 s"
    ]
    assert {"disk", "ports", "drivers", "mesh", "versions", "clocks"} <= {each["about"] for each in found}
