"""Errors that end a worker, in the form of the control plane."""

from __future__ import annotations

from motley.daemon.experts.calls import ExpertsMissing
from motley.daemon.lending.wire import LendingError
from motley.daemon.loading.answers import GateError
from motley.daemon.loading.fetching import LoadError
from motley.daemon.models.cutting.share import ShareError
from motley.daemon.models.keys import ConfigError
from motley.daemon.pipe.daemon import OrderError
from motley.daemon.rank.blocks.far_file import DiskFull
from motley.daemon.rank.loading import GpuFull
from motley.daemon.rank.steps import StepError
from motley.daemon.sampling.parameters import SamplingError
from motley.daemon.sampling.summary import SummaryError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.hub import ModelNotFound
from motley.daemon.weights.share_file import ShareFileError
from motley.plugins.engine import EngineError, EngineLostError, EngineMemoryError
from motley.protocol import mesh_pb2 as pb
from motley.transport import PeerLost, PeerTimeout, TransportError


def failure_of(error: Exception) -> pb.Failure:
    """Say what an error means to the orchestrator: a stable code, a message, and the rank that is to blame, if one is.

    An error that is none of those which can be expected has the code ``internal_error``.
    """
    match error:
        case TransportError():
            code = {PeerLost: "peer_lost", PeerTimeout: "peer_timeout"}.get(type(error), "transport_error")
            finder = error.finder if isinstance(error, PeerLost) else None
            return pb.Failure(
                code=code,
                message=str(error),
                lost_rank=0 if error.rank is None else error.rank + 1,
                found_by=0 if finder is None else finder + 1,
            )
        case OrderError():
            return pb.Failure(code="timeout", message=str(error))
        case ExpertsMissing():
            return pb.Failure(code="experts_missing", message=str(error))
        case StepError() | SummaryError() | SamplingError():
            return pb.Failure(code="step_error", message=str(error))
        case ConfigError() | ShareError() | CheckpointError() | ShareFileError():
            return pb.Failure(code="load_failed", message=str(error))
        case ModelNotFound() | LoadError() | LendingError():
            return pb.Failure(code="load_failed", message=str(error))
        case GpuFull():
            return pb.Failure(code="insufficient_memory", message=str(error))
        case DiskFull():
            return pb.Failure(code="disk_full", message=str(error))
        case GateError():
            return pb.Failure(code="wrong_results", message=str(error))
        case EngineMemoryError():
            return pb.Failure(code="out_of_memory", message=str(error))
        case EngineLostError():
            return pb.Failure(code="device_lost", message=str(error))
        case EngineError():
            return pb.Failure(code="engine_error", message=str(error))
        case MemoryError():
            return pb.Failure(code="out_of_memory", message="this rank ran out of memory; give it a smaller share")
    return pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")
