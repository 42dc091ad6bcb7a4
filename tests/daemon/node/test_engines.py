"""The installed engines are asked apart: what they print, do not know or die of is told and stays there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from motley.daemon.node.survey import engines
from motley.plugins.engine import CACHE_FORMATS
from motley.plugins.installed import _installed, engine_names

PACKAGE = """
import os

class Chatty:
    on_gpu = has_whole_caches = True
    print("loading")
    os.system("echo from below")

    @staticmethod
    def check_machine():
        from motley.plugins.engine import EngineError
        raise EngineError("no such device")

class Broken:
    @staticmethod
    def check_machine():
        raise ValueError("oh")

class Deadly:
    @staticmethod
    def check_machine():
        os._exit(7)

class Unasked: ...
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a distribution with these engines where Python looks for packages, for this process and its children."""

    def act(**wanted: str) -> None:
        (tmp_path / "somebody_elses.py").write_text(PACKAGE)
        info = tmp_path / "somebody_elses-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-elses\nVersion: 1\n")
        lines = [f"{name} = somebody_elses:{kind}" for name, kind in wanted.items()]
        (info / "entry_points.txt").write_text("\n".join(["[motley.engines]", *lines]) + "\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        _installed.cache_clear()

    yield act
    _installed.cache_clear()


async def test_all_are_asked(install: Callable[..., None]) -> None:
    install(chatty="Chatty", broken="Broken", missing="Nothing")
    told = {engine.name: engine for engine in await engines.installed_engines()}
    assert told.keys() == set(engine_names())
    assert (told["chatty"].on_gpu, told["chatty"].keeps_fp16, told["chatty"].lacking) == (True, False, "no such device")
    assert told["broken"].lacking == "ValueError: oh"
    assert told["missing"].lacking.startswith("AttributeError: ")
    assert (told["chatty"].has_whole_caches, told["reference"].has_whole_caches) == (True, False)
    assert list(told["onnxruntime"].cache_formats) == list(told["reference"].cache_formats) == [*CACHE_FORMATS]
    assert [each.name for each in told.values() if each.keeps_prefixes] == ["onnxruntime"]
    assert list(told["chatty"].cache_formats) == list(told["tensorrt"].cache_formats) == ["fp32"]
    assert (told["onnxruntime"].lacking, told["reference"].keeps_fp16) == ("", True)
    assert [name for name in ("tensorrt", "reference", "cuda") if told[name].keeps_windows] == ["reference", "cuda"]


async def test_one_that_crashes_takes_nobody_along_but_those_not_asked_yet(install: Callable[..., None]) -> None:
    install(aaa="Unasked", bbb="Deadly")
    told = {engine.name: engine.lacking for engine in await engines.installed_engines()}
    assert told["aaa"] == ""
    assert set(told.values()) - {""} == {"asking it what it needs ended with status 7"}
    assert told["bbb"]
