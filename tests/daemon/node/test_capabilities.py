"""What a machine says of itself: the whole message."""

from __future__ import annotations

import sys

import psutil
import pytest

from motley.daemon.node.survey import capabilities
from motley.daemon.node.survey.engines import installed_engines
from motley.protocol import mesh_pb2 as pb

MIB = 2**20


async def test_the_whole_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "memory_bandwidth", lambda threads: 1e9 * threads)
    machine = capabilities.measure(await installed_engines())
    assert machine.platform == sys.platform
    assert machine.cpu
    assert 1 <= machine.cores <= (psutil.cpu_count() or 1)
    assert 0 < machine.memory_bytes <= psutil.virtual_memory().total
    assert machine.memory_bandwidth == 1e9 * machine.cores
    engines = {engine.name: engine for engine in machine.engines}
    assert {name: (engine.on_gpu, engine.keeps_fp16) for name, engine in engines.items()} == {
        "onnxruntime": (False, False),
        "onnxruntime-cuda": (True, False),
        "onnxruntime-tensorrt-rtx": (True, False),
        "reference": (False, True),
        "cuda": (True, True),
        "tensorrt": (True, True),
        "tensorrt-whole": (True, True),
        "webgpu": (True, False),
    }
    assert engines["onnxruntime"].lacking == engines["reference"].lacking == ""
    assert machine.gpus or (engines["cuda"].lacking.startswith("engine 'cuda': ") and engines["tensorrt"].lacking)
    limited = capabilities.measure([], memory_limit=5 * MIB, cores=1)
    assert (limited.memory_bytes, limited.cores) == (5 * MIB, 1)
    assert capabilities.measure([], memory_limit=2**60).memory_bytes <= psutil.virtual_memory().total


def test_what_a_node_lacks_says_that_this_is_of_its_start() -> None:
    machine = pb.Capabilities(no_gpu="no driver", engines=[pb.Engine(name="a", lacking="pip install b"), pb.Engine()])
    capabilities.tell_when(machine)
    again = "; so it was when this node started: start it again once that has changed"
    assert (machine.no_gpu, machine.cannot_train) == (f"no driver{again}", "")
    assert [engine.lacking for engine in machine.engines] == [f"pip install b{again}", ""]
