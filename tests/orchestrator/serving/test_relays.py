"""Ranks whose nodes cannot reach each other meet by a third node, as soon as all of them listen."""

from __future__ import annotations

from typing import Any

from motley.protocol.mesh_pb2 import Probed

from ..conftest import of_kind

NAMES = ["a", "b", "c"]


async def joined(mesh: Any, new_node: Any, *names: str) -> list[Any]:
    """Nodes of which b cannot reach a, once that is known."""
    nodes = []
    for name in names:
        node = new_node(name)
        node.ways = {other: Probed(latency_s=1e-3, bandwidth=1e8) for other in names if other != name}
        if name == "b":
            node.ways["a"] = Probed(failure="nothing answers at a:4000")
        nodes.append(await mesh.join(node))

    def is_known(body: Any) -> bool:
        return all(len(node["links"]) == len(names) - 1 for node in body["nodes"])

    await mesh.poll("/api/nodes", is_known)
    return nodes


async def test_a_rank_is_told_the_relay_in_place_of_whom_it_cannot_dial(mesh: Any, new_node: Any, motley: Any) -> None:
    a, b, c = await joined(mesh, new_node, *NAMES)
    await mesh.serve(nodes=["a", "b"])
    (relay,) = c.relays
    assert relay.target == "127.0.0.1:5000", "where rank 0 listens"
    assert list(of_kind(a, "peers")[0].peers.addresses) == ["127.0.0.1:5000", "127.0.0.1:5001"]
    assert list(of_kind(b, "peers")[0].peers.addresses) == ["c:7000", "127.0.0.1:5001"]
    _, out, _ = await motley("status")
    assert "b cannot reach a: nothing answers at a:4000; they meet by c" in out
    await mesh.serve(nodes=["b", "a"], name="other")
    assert len(c.relays) == 1, "a reaches b"


async def test_without_a_relay_they_have_no_ranks_of_one_session(mesh: Any, new_node: Any) -> None:
    await joined(mesh, new_node, "a", "b")
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "nodes": ["a", "b"]})
    assert (status, body["error"]["code"]) == (422, "unreachable_nodes")
    assert "b cannot reach a: nothing answers at a:4000" in body["error"]["message"]
    session = await mesh.serve()
    assert len(session["ranks"]) == 1
