"""`motley cache`: what it lists, and what a name that is typed stands for."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from motley.cli.commands.machine import cache as command
from motley.cli.errors import CliError
from motley.daemon.weights.cache import Label, ShareCache
from tests.weights.cache_process import Writer

DENSE, MOE, OTHER = "/home/me/models/dense", "owner/moe", "/mnt/models/dense"


def keep(cache: ShareCache, number: int, label: Label) -> str:
    key = f"{number:08x}" * 8
    with cache.hold(key, label, 1000, Writer(key, 1000)):
        return key


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> ShareCache:
    cache = ShareCache(tmp_path_factory.mktemp("c"))
    monkeypatch.setattr(command, "results", Console(file=io.StringIO(), width=80))
    for number in range(12):
        keep(cache, number, Label(MOE, "int4", 128, 0.01, f"layer {number // 4} expert {number % 4}"))
    keep(cache, 100, Label(MOE, "int4", 128, 0.4))
    keep(cache, 200, Label(DENSE, "fp32", 128, 0.5))
    keep(cache, 201, Label(DENSE, "fp32", 128, 0.5))
    keep(cache, 202, Label(DENSE, "int8", 64, 1.0))
    return cache


def listed(cache: ShareCache, model: str = "") -> list[list[str]]:
    """The cells of every row."""
    file = io.StringIO()
    command.results.file = file
    command.ls(model, cache.folder)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]


def keys_of(cache: ShareCache, typed: str) -> list[str]:
    return command._find(typed, cache.entries(), [entry.key for entry in cache.entries()])


def test_a_model_is_a_row_for_each_way_it_is_held(kept: ShareCache) -> None:
    rows = {(row[0], row[1]): row[2:4] for row in listed(kept)}
    assert rows == {
        (MOE, "int4/128"): ["1, 12 experts", "13 kB"],
        (DENSE, "fp32"): ["2", "2 kB"],
        (DENSE, "int8/64"): ["1", "1 kB"],
    }


def test_the_shares_of_a_model_are_listed_by_themselves(kept: ShareCache) -> None:
    assert sorted(row[:3] for row in listed(kept, "dense")) == [
        ["000000c8", "fp32", "50 %"],
        ["000000c9", "fp32", "50 %"],
        ["000000ca", "int8/64", "100 %"],
    ]
    assert ["00000007", "int4/128", "layer 1 expert 3"] in [row[:3] for row in listed(kept, MOE)]


@pytest.mark.parametrize("typed", ["moe", "owner/moe", "owner\\moe", "./moe", "moe/"])
def test_a_model_is_removed_by_its_name_or_path(kept: ShareCache, typed: str) -> None:
    assert len(keys_of(kept, typed)) == 13
    command.rm([typed], cache=kept.folder)
    assert {entry.label.model for entry in kept.entries()} == {DENSE}


def test_a_share_is_removed_by_the_beginning_of_its_key(kept: ShareCache) -> None:
    command.rm(["000000c8", "dense"], cache=kept.folder)  # one of them twice
    assert {entry.label.model for entry in kept.entries()} == {MOE}
    for typed, words in (("0000", "13 shares have keys that begin"), ("ens", "no model is called so"), ("", "13 sh")):
        with pytest.raises(CliError, match=words):
            command.rm([typed], cache=kept.folder)
    assert len(kept.entries()) == 13


def test_a_name_of_several_models_is_refused_unless_it_is_all_of_one(kept: ShareCache) -> None:
    keep(kept, 300, Label(OTHER, "fp32", 128, 1.0))
    with pytest.raises(CliError, match=f"can be any of {DENSE}, {OTHER}; say more of it"):
        command.rm(["dense"], cache=kept.folder)
    assert keys_of(kept, OTHER) == [f"{300:08x}" * 8]
    assert len(keys_of(kept, "me/models/dense")) == 3
    keep(kept, 301, Label(f"/srv/{MOE}", "fp32", 128, 1.0))
    assert len(keys_of(kept, MOE)) == 13
