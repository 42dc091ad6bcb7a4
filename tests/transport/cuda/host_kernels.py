"""Kernels compiled for the host: the same C++, thread by thread, on host memory."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from tests.conftest import KERNELS

_compiling = Lock()
_ENTRY = re.compile(r'extern "C" +void (\w+)\(')
"""A kernel, as the preprocessor leaves it."""


@cache
def _compile(sources: tuple[Path, ...]) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("compiling the kernels for the host needs g++ on Linux")
    import fcntl

    texts = [source.read_text() for source in sources if source.suffix == ".cu"]
    whole = "\n".join([Path(__file__).with_name("host.h").read_text(), *texts])
    # Without instructions of this very processor, every number of 16 bits would be a call.
    options = ["-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-ftls-model=initial-exec"]
    decisive = "\n".join([whole, *options, _compiler_and_processor(compiler)])
    library = KERNELS / f"{sha256(decisive.encode()).hexdigest()}.so"
    # Of the processes of a run, the first one compiles, unless another run has.
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source, made = library.with_suffix(".cpp"), library.with_suffix(".made")
            source.write_text(whole)
            expanded = subprocess.run([compiler, "-E", str(source)], capture_output=True, text=True, check=True).stdout
            source.write_text("\n".join([whole, *(f"KERNEL({name})" for name in _ENTRY.findall(expanded))]))
            subprocess.run(
                [compiler, *options, "-shared", "-fPIC", str(source), "-o", str(made)], check=True, timeout=100
            )
            made.replace(library)
    return ctypes.CDLL(str(library))


@cache
def _compiler_and_processor(compiler: str) -> str:
    """The compiler's version, and what it finds that this processor can do."""
    asked = ("--version",), ("-march=native", "-Q", "--help=target")
    return "".join(
        subprocess.run([compiler, *each], capture_output=True, text=True, check=True).stdout for each in asked
    )


def launch(sources: tuple[Path, ...], name: str, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
    """Run a kernel as `cuLaunchKernel` does, on addresses of the host."""
    with _compiling:
        library = _compile(sources)
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    library[f"launch_{name}"](blocks, threads, addresses)
