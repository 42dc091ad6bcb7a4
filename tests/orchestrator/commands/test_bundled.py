"""The models that come with Motley are found by their names, and proposed to who has mistyped one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from motley.cli.bundled import FIRST, FOLDER, bundled, bundled_meant, bundled_names
from motley.protocol.mesh_pb2 import Describe, Described, Failure

from ..conftest import small_profile

Motley = Callable[..., Awaitable[tuple[int, str, str]]]


def test_their_names() -> None:
    assert bundled_names() == [FIRST, "shakespeare-moe-1.5m"]
    assert bundled(FIRST) == str(FOLDER / FIRST)
    assert bundled("./shakespeare-2.6m") == "./shakespeare-2.6m"
    assert bundled_meant("Shakespear") == f" Did you mean {FIRST!r}, which comes with Motley?"
    assert bundled_meant("bard") == ""


async def test_one_is_run_and_planned_by_its_name(mesh: Any, new_node: Any, motley: Motley) -> None:
    asked = await describing(mesh, new_node)
    status, out, err = await motley("run", FIRST, "Hi", "--raw")
    assert (status, out) == (0, "Hello, world\n"), err
    assert err.startswith(f"{FIRST} is not served yet: looking for it\n")
    status, _, err = await motley("plan", FIRST)
    assert (status, err) == (0, "")
    assert set(asked) == {str(FOLDER / FIRST)}


async def test_what_is_served_by_that_name_comes_first(mesh: Any, new_node: Any, motley: Motley) -> None:
    asked = await describing(mesh, new_node)
    await mesh.serve(model="/elsewhere/poet", name=FIRST)
    status, out, err = await motley("run", FIRST, "Hi", "--raw")
    assert (status, out) == (0, "Hello, world\n"), err
    assert set(asked) == {"/elsewhere/poet"}


async def test_who_has_mistyped_one_is_asked(mesh: Any, new_node: Any, motley: Motley) -> None:
    node = await mesh.join(new_node())
    failure = Failure(code="model_missing", message="no model 'shakespear'")
    node.on_describe = lambda _: Described(failure=failure)
    for command in (("run", "shakespear", "Hi"), ("plan", "shakespear")):
        status, _, err = await motley(*command)
        assert status == 1
        said = err.rpartition("motley: ")[2].splitlines()
        assert said[0] == f"no model 'shakespear'. Did you mean '{FIRST}', which comes with Motley?"
        assert len(said) == 2, "what else can be given"


async def test_a_hint_does_not_hide_why_a_path_or_a_hub_id_is_no_model(
    mesh: Any, new_node: Any, motley: Motley
) -> None:
    node = await mesh.join(new_node())
    node.on_describe = lambda _: Described(failure=Failure(code="model_missing", message="the hub cannot be reached"))
    for model, hint in (("somebody/shakespeare-2.6", True), ("somebody/bard", False)):
        status, _, err = await motley("run", model, "Hi")
        assert status == 1
        assert "the hub cannot be reached" in err
        assert (f"motley: no model {model!r}. Did you mean" in err) == hint


async def describing(mesh: Any, new_node: Any) -> list[str]:
    """A node joins that has every model; of which ones it is asked."""
    asked: list[str] = []

    def describe(order: Describe) -> Described:
        asked.append(order.model.source)
        return Described(profile=small_profile())

    node = await mesh.join(new_node())
    node.on_describe = describe
    return asked


async def test_there_is_nothing_to_fetch_of_one(motley: Motley) -> None:
    status, _, err = await motley("models", "pull", FIRST)
    assert (status, err) == (1, f"motley: {FIRST} comes with Motley and is here: `motley chat {FIRST}`\n")
