"""NCCL's numbers: results, data types, reductions. Values are those of its public API, version 2.28."""

from __future__ import annotations

from enum import IntEnum

import ml_dtypes
import numpy as np

from motley.transport import PeerLost, PeerTimeout, ProtocolError, UsageError
from motley.transport.cuda.errors import CudaError

DATA_TYPES = tuple(
    np.dtype(each)
    for each in (
        np.int8,
        np.uint8,
        np.int32,
        np.uint32,
        np.int64,
        np.uint64,
        np.float16,
        np.float32,
        np.float64,
        ml_dtypes.bfloat16,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )
)
"""What the values of ``ncclDataType_t`` mean."""


class Result(IntEnum):
    """``ncclResult_t``."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6


class Reduction(IntEnum):
    """``ncclRedOp_t``."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class NcclError(Exception):
    """A call that fails with this result."""

    def __init__(self, result: Result, why: str) -> None:
        super().__init__(result, why)
        self.result = result
        self.why = why

    def __str__(self) -> str:
        return self.why


def result_of(error: BaseException) -> tuple[Result, str]:
    """How NCCL's callers learn of an error: a code, and what ``ncclGetLastError`` says."""
    match error:
        case NcclError():
            return error.result, str(error)
        case PeerLost() | PeerTimeout() | ProtocolError():
            return Result.REMOTE_ERROR, str(error)
        case UsageError():
            return Result.INVALID_USAGE, str(error)
        case CudaError():
            return Result.UNHANDLED_CUDA_ERROR, str(error)
        case OSError() | MemoryError():
            return Result.SYSTEM_ERROR, f"{type(error).__name__}: {error}"
        case _:
            return Result.INTERNAL_ERROR, f"{type(error).__name__}: {error}"
