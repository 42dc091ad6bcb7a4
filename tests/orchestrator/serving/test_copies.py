"""The copies of a model that nodes have: all that lack it are named, and whoever's differs."""

from __future__ import annotations

from typing import Any

import pytest

from motley.orchestrator.serving import lending
from motley.orchestrator.serving.errors import ServingError
from motley.orchestrator.serving.lending import Loans
from motley.orchestrator.serving.plans import descriptions
from motley.orchestrator.serving.plans.copies import check_copies, is_missing
from motley.orchestrator.workers import Worker
from motley.protocol.mesh_pb2 import Credentials, Describe, Described, Failure, Loan, ModelProfile

from ..conftest import small_profile


def has(files: str) -> Described:
    return Described(profile=ModelProfile(fingerprint=files))


def lacks() -> Described:
    return Described(failure=Failure(code="model_missing", message="no model 'bard': there is no folder /models/bard"))


def refused(**copies: Described) -> str:
    with pytest.raises(ServingError) as refusal:
        check_copies("bard", copies, copies)
    assert refusal.value.failure.param == "model"
    return f"{refusal.value.failure.code}: {refusal.value.failure.message.splitlines()[0]}"


def test_the_odd_one_out_is_named_wherever_it_is() -> None:
    assert refused(a=has("2"), b=has("1"), c=has("1")) == (
        "models_differ: node 'a' has other files of 'bard' than nodes 'b' and 'c'; give every node the same. Their"
        " fingerprints:"
    )
    assert "node 'c' has other files of 'bard' than nodes 'a' and 'b';" in refused(a=has("1"), b=has("1"), c=has("2"))
    assert "nodes 'b' and 'd' have other" in refused(a=has("1"), b=has("2"), c=has("1"), d=has("3"), e=has("1"))


def test_without_a_majority_all_are_named() -> None:
    assert "node 'a' and node 'b' have different files of 'bard';" in refused(a=has("1"), b=has("2"))
    said = refused(a=has("1"), b=has("2"), c=has("2"), d=has("1"))
    assert "nodes 'a' and 'd' and nodes 'b' and 'c' have different files of 'bard';" in said


def test_all_that_lack_it_are_named_and_how_to_go_on() -> None:
    said = refused(a=has("1"), b=lacks(), c=has("1"), d=lacks())
    assert said.startswith("model_missing: nodes 'b' and 'd' have no model 'bard'. Put it there, at this path or in")
    assert "`motley join --models FOLDER`" in said
    assert said.endswith(" Or use only nodes that have it: `--nodes a,c`.")
    assert "use only" not in refused(a=lacks(), b=lacks())


def test_what_several_nodes_say_alike_is_told_once() -> None:
    other = Described(failure=Failure(code="model_missing", message="it is private"))
    with pytest.raises(ServingError) as refusal:
        check_copies("bard", {"a": lacks(), "b": other, "c": lacks()}, "abc")
    told = refusal.value.failure.message.splitlines()[1:]
    assert told == ["  a, c: no model 'bard': there is no folder /models/bard", "  b: it is private"]


def test_who_mistypes_a_short_name_is_told_it() -> None:
    for nodes in ("a", "ab"):
        with pytest.raises(ServingError, match=r"Did you mean qwen3-8b( or qwen|\?)"):
            check_copies("Qwen3-8B", dict.fromkeys(nodes, lacks()), nodes)
        with pytest.raises(ServingError) as refused:  # what qwen3-8b stands for
            check_copies("Qwen/Qwen3-8B-AWQ", dict.fromkeys(nodes, lacks()), nodes)
        assert "Did you mean" not in str(refused.value)


def test_what_is_fetched_and_who_has_not_answered_is_no_difference() -> None:
    old = Described(profile=ModelProfile(fingerprint="0"), from_hub=True)
    hub = {"a": has("1"), "b": Described(from_hub=True), "d": old}
    check_copies("owner/name", hub, ["a", "b", "c", "d"])
    assert [is_missing(hub, name, "1") for name in "abcd"] == [False, True, False, True]
    assert not is_missing(hub, "d", "0")
    check_copies("bard", {"a": has("1"), "b": has("1"), "c": has("2"), "d": lacks()}, ["a", "b"])


async def test_a_model_that_nobody_has_is_refused_and_all_are_named(mesh: Any, new_node: Any) -> None:
    for name in ("b", "d"):
        node = await mesh.join(new_node(name))
        node.on_describe = lambda _: lacks()
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "nodes": ["b", "d"]})
    assert (status, body["error"]["code"], body["error"]["param"]) == (422, "model_missing", "model")
    assert "nodes 'b' and 'd' have no model 'bard'" in body["error"]["message"]
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


@pytest.fixture
async def four(mesh: Any, new_node: Any) -> dict[str, Any]:
    """Nodes by name, of which `b` and `d` have no files."""
    nodes = {name: await mesh.join(new_node(name)) for name in ("a", "b", "c", "d")}
    nodes["b"].on_describe = nodes["d"].on_describe = lambda _: lacks()
    return nodes


def loans_of(node: Any) -> list[Any]:
    return [command.assign.loan for command in node.commands if command.WhichOneof("body") == "assign"]


@pytest.mark.parametrize("taking", [["a", "b", "d"], ["b", "a", "d"], ["b", "d"]])
async def test_ranks_without_the_model_borrow_it(taking: list[str], mesh: Any, four: dict[str, Any]) -> None:
    """Of a node that has it, which need not take part; each has a certificate of its own."""
    await mesh.serve(nodes=taking)
    (order,) = four["a"].lends
    assert not any(four[name].lends for name in "bcd")
    assert (order.source, order.fingerprint) == ("bard", small_profile().fingerprint)
    assert order.members > 2, "one of them lends"
    certificates, members = {order.tls.certificate}, {0}
    for name in taking:
        (loan,) = loans_of(four[name])
        if name == "a":
            assert not loan.id
            continue
        assert (loan.id, loan.node, loan.address, loan.files) == (order.id, "a", "a:5000", "f1")
        assert (loan.members, loan.secret) == (order.members, order.secret)
        assert loan.member < loan.members
        members.add(loan.member)
        certificates.add(loan.tls.certificate)
    assert len(certificates) == len(members) == 3
    _, body = await mesh.call("GET", "/api/sessions")
    assert "loan" not in str(body), "credentials are nobody's business"


def test_who_borrows_is_told_how_and_one_too_many_is_refused() -> None:
    loans = Loans(Loan(id="l"), frozenset({"b"}), [Credentials(key=bytes([number])) for number in range(3)])
    workers = [Worker(index, "", name, 0) for index, name in enumerate("abb")]
    loans.give(workers)
    assert [worker.loan and (worker.loan.id, worker.loan.member, worker.loan.tls.key) for worker in workers] == [
        None,
        ("l", 1, b"\1"),
        ("l", 2, b"\2"),
    ]
    with pytest.raises(ServingError, match="lends them to 2 at most"):
        loans.give([*workers, Worker(3, "", "b", 0)])


async def test_too_many_borrowers_are_refused_before_anybody_lends(
    mesh: Any, four: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lender would wait for them, and they for it; nodes that are only there may be left out by the plan."""
    monkeypatch.setattr(lending, "MOST", 1)
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "nodes": ["a", "b", "d"]})
    assert (status, body["error"]["code"], body["error"]["param"]) == (422, "model_missing", "model")
    assert "2 ranks and expert hosts are on nodes without files of the model" in body["error"]["message"]
    assert not any(four[name].lends for name in "abcd")
    await mesh.serve(nodes=["a", "b"])
    assert len(four["a"].lends) == 1


async def test_a_draft_model_is_borrowed_too(mesh: Any, four: dict[str, Any]) -> None:
    """Of the first node that has it beside the model; the one that computes it has neither."""
    await mesh.serve(nodes=["b", "a"], draft_model="small", context=100)
    lent = {order.source: order for order in four["a"].lends}
    assert lent.keys() == {"bard", "small"}
    (assigned,) = [command.assign for command in four["b"].commands if command.WhichOneof("body") == "assign"]
    assert (assigned.loan.id, assigned.draft.loan.id) == (lent["bard"].id, lent["small"].id)
    assert not any(four[name].lends for name in "bcd")


async def test_who_cannot_lend_is_passed_over(mesh: Any, four: dict[str, Any]) -> None:
    four["a"].refuses_to_lend = "the files have changed"
    await mesh.serve(nodes=["a", "b", "c"])
    assert [len(four[name].lends) for name in "abcd"] == [1, 0, 1, 0]
    assert loans_of(four["b"])[0].node == "c"


async def test_where_nobody_can_lend_the_reasons_are_told(mesh: Any, four: dict[str, Any]) -> None:
    four["a"].refuses_to_lend, four["c"].refuses_to_lend = "the files have changed", "no port is free"
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "nodes": ["a", "b", "c"]})
    assert (status, body["error"]["code"]) == (422, "model_missing")
    assert "a: the files have changed\n  c: no port is free" in body["error"]["message"]


async def test_a_session_can_be_planned_for_nodes_without_the_model(mesh: Any, four: dict[str, Any]) -> None:
    status, _ = await mesh.call("POST", "/api/plan", {"model": "bard", "nodes": ["b", "d"]})
    assert status == 200
    assert not four["a"].lends


async def test_after_a_loss_who_has_borrowed_borrows_again(mesh: Any, four: dict[str, Any]) -> None:
    session = await mesh.serve(nodes=["b", "a"])
    died = Failure(code="worker_died", message="its worker process was killed by signal 9")
    await four["b"].event(four["b"].commands[0], failed=died)
    await mesh.poll(f"/api/sessions/{session['id']}", lambda body: body["epoch"] == 2 and body["state"] == "ready")
    first, second = loans_of(four["b"])
    assert first.id != second.id
    assert [order.id for order in four["a"].lends] == [first.id, second.id]


async def test_a_differing_copy_is_named_before_anything_is_loaded(mesh: Any, new_node: Any) -> None:
    """Also where it is the one that has described the model; only it is asked what the model costs."""
    odd = small_profile()
    odd.fingerprint = "ffff"
    asked: dict[str, list[bool]] = {"a": [], "b": [], "c": []}
    for name in asked:
        node = await mesh.join(new_node(name))

        def describe(order: Describe, name: str = name) -> Described:
            asked[name].append(order.only_here)
            return Described(profile=odd if name == "a" else small_profile())

        node.on_describe = describe
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "nodes": ["a", "b", "c"]})
    assert (status, body["error"]["code"]) == (422, "models_differ")
    assert body["error"]["message"].startswith("node 'a' has other files of 'bard' than nodes 'b' and 'c'")
    assert asked == {"a": [False], "b": [True], "c": [True]}
    assert [node.commands for node in mesh.nodes] == [[], [], []]


async def test_a_node_too_small_to_take_part_need_not_have_the_model(mesh: Any, new_node: Any) -> None:
    await mesh.join(new_node("pc"))
    tiny = await mesh.join(new_node("tiny", memory=500))
    tiny.on_describe = lambda _: lacks()
    session = await mesh.serve()
    assert [rank["node"] for rank in session["ranks"]] == ["pc"]


async def test_a_node_that_does_not_say_what_it_has_is_not_waited_for(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descriptions, "LOOK_S", 0.01)
    await mesh.join(new_node("pc"))
    mute = await mesh.join(new_node("mute"))
    mute.on_describe = lambda _: None
    assert len((await mesh.serve(nodes=["pc", "mute"]))["ranks"]) == 2
    assert await mute.cancelled.get()
