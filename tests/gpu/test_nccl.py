"""NCCL's calls on the streams of a real device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from motley.plugins.nccl import CudaDevice
from motley.plugins.nccl.binding import Process, Settings, _Comm
from motley.plugins.nccl.codes import Reduction
from motley.plugins.nccl.operations import Call, Kind
from motley.transport import Communicator
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.host_step import HostStep
from tests.transport.conftest import run_ranks as run_ranks
from tests.transport.cuda.memory import Memory

SIZES = (3, 1000, 1 << 16)


def test_a_call_sums_what_was_copied_before_it(gpu: CudaDriver, run_ranks: Callable[..., list[Any]]) -> None:
    """Several calls in one stream, without a wait in between, through staging that grows."""

    def work(ranks: Communicator) -> list[list[float]]:
        gpu.attach()
        device, shared = CudaDevice(form=HostStep.SPLIT, driver=gpu), _Comm(1, ranks.rank, ranks.size)
        process = Process(Settings(None, False, device), lambda *_: ctypes.addressof(shared))
        comm, stream = process.bind(ranks, None), gpu.create_stream()
        with Memory(gpu) as memory:
            buffers = [(memory.device(size), memory.pinned(size), memory.pinned(size)) for size in SIZES]
            for size, (buffer, before, after) in zip(SIZES, buffers, strict=True):
                before[:] = size + ranks.rank
                gpu.copy(buffer.address, before.ctypes.data, buffer.nbytes, stream)
                call = Call(
                    kind=Kind.ALL_REDUCE,
                    dtype=buffer.dtype,
                    op=Reduction.SUM,
                    peer=0,
                    count=size,
                    send=buffer.address,
                    recv=buffer.address,
                    stream=int(stream),
                    comm=comm,
                    child=0,
                    key=0,
                )
                process.run([call])
                gpu.copy(after.ctypes.data, buffer.address, buffer.nbytes, stream)
            process.end(comm, aborts=False)
            device.synchronise(int(stream))
            assert shared.async_error == 0, shared.async_message
            sums = [np.unique(after).tolist() for _, _, after in buffers]
        device.close()
        gpu.destroy_stream(stream)
        return sums

    assert run_ranks(2, work) == [[[2.0 * size + 1] for size in SIZES]] * 2
