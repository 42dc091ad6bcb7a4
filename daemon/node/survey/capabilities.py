"""What this machine is and how fast: the facts that the planner shares a model by."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from motley.daemon.machine.gpus import gpus, why_no_gpu
from motley.daemon.machine.memory import available_memory, memory_bandwidth
from motley.daemon.machine.processor import cpu_name, usable_cores
from motley.plugins.expert_engine import expert_engine_names
from motley.protocol import mesh_pb2 as pb

AS_STARTED = "; so it was when this node started: start it again once that has changed"
"""Follows what a node lacks: it looks for that when it starts, and its people may have installed it since."""


def measure(engines: Sequence[pb.Engine], memory_limit: int | None = None, cores: int | None = None) -> pb.Capabilities:
    """This machine's capabilities. Takes half a second, for the bandwidth.

    Args:
        engines: `motley.daemon.node.survey.engines.installed_engines`.
        memory_limit: bytes that ranks may use here at most; what is available bounds it.
        cores: cores that ranks may use here at most.
    """
    available = available_memory()
    found = gpus()
    usable = usable_cores()
    cores = usable if cores is None else min(cores, usable)
    return pb.Capabilities(
        platform=sys.platform,
        cpu=cpu_name(),
        cores=cores,
        memory_bytes=available if memory_limit is None else min(memory_limit, available),
        memory_bandwidth=memory_bandwidth(cores),
        gpus=found,
        no_gpu="" if found else why_no_gpu(),
        engines=engines,
        expert_engines=expert_engine_names(),
    )


def tell_when(machine: pb.Capabilities) -> None:
    """Have all that a machine lacks say when that was looked for, for those who read it later, elsewhere."""
    texts = [(machine, "no_gpu"), (machine, "cannot_train"), *((engine, "lacking") for engine in machine.engines)]
    for message, field in texts:
        if why := getattr(message, field):
            setattr(message, field, why + AS_STARTED)
