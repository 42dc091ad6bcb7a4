"""`motley adapters` and `motley run --adapter`, against a real orchestrator whose node is scripted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motley.cli.commands.answering.run import named_adapters
from motley.cli.errors import CliError

from ..conftest import of_kind


@pytest.fixture
async def leader(mesh: Any, new_node: Any) -> Any:
    node = await mesh.join(new_node())
    await mesh.serve(adapters=2)
    return node


async def test_an_adapter_is_added_listed_pinned_and_removed(mesh: Any, leader: Any, motley: Any) -> None:
    status, out, err = await motley("adapters", "add", "poems=/poems")
    assert (status, out) == (0, "requests to 'bard:poems' are answered with it: rank 8, 4 kB\n"), err
    assert await motley("adapters", "pin", "poems", "--model", "bard") == (0, "'bard:poems': pinned\n", "")
    status, out, _ = await motley("adapters", "ls")
    assert all(word in out for word in ("bard:poems", "4 kB", "pinned", "/poems"))
    assert await motley("adapters", "pin", "poems", "--off") == (0, "'bard:poems': known\n", "")
    status, out, _ = await motley("adapters", "ls", "--json")
    assert [each["name"] for each in json.loads(out)["adapters"]] == ["poems"]
    assert await motley("adapters", "rm", "poems") == (0, "'bard:poems' is no more\n", "")
    status, _, err = await motley("adapters", "rm", "poems")
    assert (status, err) == (1, "motley: 'bard' has no adapter named 'poems'; it has: none\n")


async def test_the_model_is_to_be_named_where_it_is_not_clear(mesh: Any, new_node: Any, motley: Any) -> None:
    await mesh.join(new_node())
    await mesh.serve(name="plain")
    status, _, err = await motley("adapters", "add", "poems=/poems")
    assert (status, "none was started with --adapters" in err) == (1, True)
    for name in "ab":
        await mesh.serve(name=name, adapters=1)
    status, _, err = await motley("adapters", "rm", "poems")
    assert (status, "name one with --model: a, b" in err) == (1, True)


async def test_a_model_is_loaded_with_room_and_answers_with_an_adapter(
    mesh: Any, new_node: Any, motley: Any, tmp_path: Path
) -> None:
    node = await mesh.join(new_node())
    asked = ("run", "bard", "Hi", "--adapter-rank", "16", "--adapter", f"poems={tmp_path}", "--json")
    status, out, err = await motley(*asked)
    assert status == 0, err
    assert json.loads(out)["text"] == "Hello, world"
    (assigned,) = of_kind(node, "assign")
    assert (assigned.assign.adapters, assigned.assign.adapter_rank) == (2, 16)
    assert node.generated[-1].adapter.source == str(tmp_path)
    status, _, err = await motley("run", "bard", "Hi", "--adapter", "poems")
    assert status == 0, err
    status, _, err = await motley("run", "bard", "Hi", "--adapters", "3", "--adapter", "poems")
    assert (status, "with room for 2 adapters: leave out --adapters" in err) == (1, True)
    status, _, err = await motley("run", "bard", "Hi", "--adapter", "none")
    assert (status, "'bard' has no adapter 'none'; it has: poems" in err) == (1, True)


@pytest.mark.parametrize("words", [["=x"], ["a=x", "a=y"], [""]])
def test_what_names_no_adapter_is_refused(words: list[str]) -> None:
    with pytest.raises(CliError, match="--adapter wants NAME=FOLDER"):
        named_adapters(words)
