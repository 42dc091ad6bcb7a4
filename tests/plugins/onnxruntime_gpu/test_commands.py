"""What the engine asks of a driver: commands of a token, which GPU of several, and what it says when that is lost.

Each in a process of its own, as a Vulkan layer counts what its whole process does.
"""

from __future__ import annotations

import os
import tempfile
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.cutting.units import units
from motley.plugins.engine import EngineLostError
from motley.plugins.onnxruntime_gpu.device import Gpu
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from motley.plugins.onnxruntime_gpu.preference import VARIABLE
from motley.plugins.onnxruntime_gpu.providers import WEBGPU
from tests.models.cases import LocalSession, golden_case, uneven_shares
from tests.plugins.onnxruntime_gpu.processes import said_by_process
from tests.plugins.onnxruntime_gpu.test_transfers import OF_A_TOKEN
from tests.vulkan_layer import KINDS, LOST, counted, layer_environment, opened

DEVICE_SELECTION = "/usr/share/vulkan/implicit_layer.d/VkLayer_MESA_device_select*.json"
"""Where Mesa tells of the layer by which a process is shown one GPU of several."""
LAYERS = 2
"""Of the model that is computed here."""


def said(function: str, folder: Path, *arguments: Any, **environment: str) -> Any:
    """What a function of this module returns in a process that has the layer."""
    return said_by_process(__name__, function, *arguments, **layer_environment(folder), **environment)


def of_a_token(ranks: int) -> dict[str, int]:
    """What a token of a small Llama takes, the second after what it needs has been prepared."""
    case = golden_case("llama-mha")
    assert len(case.model.layers) == LAYERS
    shares = uneven_shares(units(case.model, "int4", 32), ranks)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalSession(case.folder, WebGpuEngine, shares, Path(folder), "int4") as session,
    ):
        for position in range(3):
            session.step(case.tokens[position : position + 1], position)
        before = counted()
        session.step(case.tokens[3:4], 3)
        return counted().since(before)


def test_a_token_of_a_rank_alone_repeats_kernels_and_waits_once(tmp_path: Path) -> None:
    """A kernel that is not repeated takes a copy of its sizes, and a fill or two."""
    of = said("of_a_token", tmp_path, 1)
    assert of["waits"] == 1
    assert of["fills"] == 0
    assert of["copies"] == OF_A_TOKEN + 1
    assert of["dispatches"] <= 23 * LAYERS + 15
    assert of["submits"] <= OF_A_TOKEN + 4 * LAYERS + 5


def test_a_rank_of_two_waits_for_each_sum_and_the_logits(tmp_path: Path) -> None:
    of = said("of_a_token", tmp_path, 2)
    terms, sums = 3 * LAYERS, 4 * LAYERS  # the second rank has nothing of an MLP
    assert of["waits"] == terms + 1
    assert of["copies"] == 2 * OF_A_TOKEN + terms + sums + 1
    assert of["fills"] == 0


def gpu_opened() -> int:
    """The number of the GPU on which an array lies that was made before anything was computed."""
    Gpu(WEBGPU).empty((4,))
    return opened()


def shown_twice(folder: Path) -> dict[str, str]:
    """The environment of a process to which the software driver is two GPUs."""
    driver, again = Path(os.environ["VK_DRIVER_FILES"]), folder / "again.json"
    again.write_text(driver.read_text().replace("./", f"{driver.parent}/"))
    return {"VK_DRIVER_FILES": f"{driver}:{again}"}


@pytest.mark.parametrize(("wanted", "expected"), [("", 1), ("discrete", 1), ("integrated", 0)])
def test_the_gpu_that_is_asked_for_is_opened(wanted: str, expected: int, tmp_path: Path) -> None:
    """Of two, the first of which passes for the processor's, and the other for one with memory of its own."""
    assert said("gpu_opened", tmp_path, **shown_twice(tmp_path), **{KINDS: "12", VARIABLE: wanted}) == expected


@pytest.mark.skipif(
    not glob(DEVICE_SELECTION) and "CI" not in os.environ,
    reason="Mesa's layer chooses, of Debian's mesa-vulkan-drivers",
)
@pytest.mark.parametrize(("bus", "expected"), [(1, 0), (2, 1)])
def test_of_two_gpus_of_one_kind_the_one_on_a_bus_is_opened(bus: int, expected: int, tmp_path: Path) -> None:
    """As Mesa's layer shows the process no other."""
    chosen = {KINDS: "22", "DRI_PRIME": f"pci-0000_{bus:02}_00_0!"}
    assert said("gpu_opened", tmp_path, **shown_twice(tmp_path), **chosen) == expected


def lost() -> list[str]:
    """What is said when the GPU is lost, and when it is used again."""
    case = golden_case("llama-mha")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    words = []
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalSession(case.folder, WebGpuEngine, shares, Path(folder)) as session,
    ):
        session.step(case.tokens[:1], 0)
        Path(os.environ[LOST]).touch()
        for _ in range(2):
            try:
                session.step(case.tokens[1:2], 1)
            except EngineLostError as error:
                words.append(str(error))
    return words


def test_a_gpu_that_is_lost_says_so_and_what_to_do(tmp_path: Path) -> None:
    words = said("lost", tmp_path, **{LOST: str(tmp_path / "lost")})
    assert len(words) == 2
    assert all(word.startswith("engine 'webgpu' has lost its GPU: its driver gave up") for word in words)
