"""Kernels of the engine, compiled for the host and run there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motley.plugins.cuda.kernels import THREADS
from motley.plugins.cuda.modules import module_of
from tests.transport.cuda.host_kernels import launch


def launch_kernel(kernel: str, blocks: int, arguments: Sequence[Any], threads: int = THREADS) -> None:
    """Run a kernel on addresses of the host, with what it is compiled with on a device."""
    launch(module_of(kernel), kernel, blocks, threads, arguments)
