"""One description of what a client asks for: read, told and typed by the same fields."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from motley.cli.errors import CliError
from motley.cli.typed import options
from motley.daemon.rank.pooling import POOLINGS
from motley.orchestrator.api.mesh.session_parameters import SESSION, session_request
from motley.orchestrator.api.schema import FieldError
from motley.orchestrator.serving.plans.substitutes import among, anywhere
from motley.orchestrator.session_request import (
    CACHE_FORMATS,
    Block,
    ContradictionError,
    Embeddings,
    Layout,
    Quantisation,
    SessionRequest,
)
from motley.plugins import engine
from motley.protocol import BLOCKS

UNUSUAL: dict[str, Any] = {
    "name": "poet",
    "quantisation": "int4",
    "block": 32,
    "nodes": ("pc", "laptop"),
    "shares": (3.0, 1.0),
    "context": 100,
    "cache_tokens": 1000,
    "cache_disk_tokens": 5000,
    "cache_format": "int8",
    "keep_prefixes": True,
    "sequences": 3,
    "queue": 0,
    "draft_model": "small",
    "engine": "warp",
    "quantisations": {"pc": "fp16"},
    "engines": {"laptop": "cuda"},
    "adapters": 8,
    "adapter_rank": 16,
    "wire": "bf16",
    "threads": 3,
    "experts": "sliced",
}


def test_every_field_has_a_default_and_is_published() -> None:
    published = SESSION.json_schema()
    assert list(published["properties"]) == [field.name for field in dataclasses.fields(SessionRequest)]
    assert published["required"] == ["model"]
    assert session_request(SessionRequest("bard").to_json()) == SessionRequest("bard")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        UNUSUAL,
        {"exact": True},
        {"stages": 2},
        {"stages": (1, 2), "nodes": ("pc", "laptop", "pc")},
        {"experts": "parallel", "replicas": 2, "trunk": 3},
        {"draft_model": "small", "draft_engine": "cuda"},
        *({f: UNUSUAL[f]} for f in UNUSUAL),
    ],
)
def test_a_body_is_read_as_what_it_was_made_of(fields: dict[str, Any]) -> None:
    request = SessionRequest("bard", **fields)
    assert request.body().keys() == {"model", *fields}, "what has its default is left out"
    assert session_request(request.body()) == request


def test_auto_is_the_processor_where_a_node_has_several_ranks() -> None:
    request = SessionRequest("bard", nodes=("pc", "laptop", "cuda@pc", "auto@box"))
    assert [request.engine_at(place) for place in request.places] == ["onnxruntime", "auto", "cuda", "auto"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"replicas": 2}, "on 'pc' an engine of its own, which is for sliced experts: use engines"),
        ({"exact": True}, "have engine 'webgpu' on 'pc', 'onnxruntime' elsewhere: exact=true needs the same on all"),
    ],
)
def test_an_engine_of_a_single_rank_is_not_for_all_sessions(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ContradictionError, match=words) as refused:
        SessionRequest("bard", nodes=("pc", "webgpu@pc"), **fields).check()
    assert refused.value.field == "nodes"


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"stages": 2, "shares": (1.0, 2.0)}, "shares", "cannot be given for stages"),
        ({"stages": 2, "replicas": 2}, "replicas", "which ranks in stages cannot have"),
        ({"stages": (1, 2)}, "stages", "are of 3 ranks, and nodes names 0"),
        ({"stages": 3, "nodes": ("pc", "laptop")}, "stages", "need as many nodes: 2 are named"),
        ({"embeddings": "mean", "draft_model": "small"}, "draft_model", "embeddings have none: leave it out"),
        ({"stages": 2, "draft_model": "own"}, "stages", "without the model's own head"),
        ({"embeddings": "last", "keep_prefixes": True}, "keep_prefixes", "made of all of its text: leave it out"),
    ],
)
def test_what_excludes_each_other(fields: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ContradictionError, match=words) as refused:
        SessionRequest("bard", **fields).check()
    assert refused.value.field == field


@pytest.mark.parametrize("stages", [-1, [2], [0, 1], "2", 1.5, [1, "2"]])
def test_stages_are_a_number_or_the_ranks_of_each(stages: object) -> None:
    with pytest.raises(FieldError, match="stages"):
        session_request({"model": "bard", "stages": stages})


@pytest.mark.parametrize(("typed", "read"), [("2", 2), ("1", 1), ("2+1", [2, 1]), ("1+1+3", [1, 1, 3])])
def test_stages_on_the_command_line(typed: str, read: object) -> None:
    assert options.parse_stages(typed) == read
    for wrong in ("0", "", "2+", "a", "1+0", "-1"):
        with pytest.raises(CliError, match="--stages wants"):
            options.parse_stages(wrong)


@pytest.mark.parametrize(
    ("stages", "there", "left"),
    [
        ((1, 2), "abc", (1, 2)),
        ((1, 2), "ac", (1, 1)),
        ((1, 2), "bc", 0),
        ((2, 1), "bc", (1, 1)),
        (2, "ab", 2),
        (3, "ab", 0),
        (0, "ab", 0),
    ],
)
def test_stages_of_nodes_that_are_left(stages: int | tuple[int, ...], there: str, left: object) -> None:
    request = SessionRequest("bard", nodes=("a", "b", "c"), stages=stages)
    assert among(request, {*there}).stages == left
    assert anywhere(request, {*there}).stages == (stages if isinstance(stages, int) and left == stages else 0)


def test_the_command_line_has_the_same_words() -> None:
    assert {*options.Quantisation} == {*get_args(Quantisation)}
    assert {*options.Experts} == {*get_args(Layout)}
    assert {"", *options.Pooling} == {*get_args(Embeddings)} == {"", *POOLINGS}
    assert {*options.CacheFormat} == {*CACHE_FORMATS}


def test_nodes_and_the_orchestrator_have_the_same_formats_of_caches() -> None:
    assert CACHE_FORMATS == engine.CACHE_FORMATS
    assert get_args(Block) == BLOCKS


@pytest.mark.parametrize(
    ("fields", "asking"),
    [
        ({}, []),
        ({"experts": "sliced"}, []),
        ({"experts": "parallel"}, ["experts"]),
        ({"replicas": 2}, ["replicas"]),
        ({"trunk": 2, "experts": "parallel"}, ["experts", "trunk"]),
    ],
)
def test_who_wants_parallel_experts(fields: dict[str, Any], asking: list[str]) -> None:
    request = SessionRequest("mix", **fields)
    assert request.asking_for_parallel == asking
    assert request.wants_parallel is bool(asking)
