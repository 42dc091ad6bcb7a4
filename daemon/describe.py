"""What a model costs, told to the planner: the node that has the files reads their headers, the orchestrator plans."""

from __future__ import annotations

from pathlib import Path

from motley.daemon.models.config import read_config
from motley.daemon.models.profile import profile
from motley.daemon.models.tensors import expected_shapes
from motley.daemon.weights.checkpoint import Checkpoint
from motley.daemon.weights.hub import resolve
from motley.protocol import mesh_pb2 as pb


def describe(model: pb.ModelSpec, models: Path | None) -> pb.ModelProfile:
    """Read a model's config and headers; no weights are read.

    Raises:
        ModelNotFound, ConfigError, CheckpointError: the model cannot be served.
    """
    folder = resolve(model.source, models)
    config = read_config(folder)
    told = profile(config, model.quantisation, model.block)
    with Checkpoint(folder) as checkpoint:
        checkpoint.expect(expected_shapes(config))
        told.fingerprint = checkpoint.fingerprint()
    told.name = folder.name
    return told
