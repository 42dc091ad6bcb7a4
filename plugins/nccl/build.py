"""Builds the C library, when it is first wanted, into the user's cache folder; ``make nccl`` does it ahead of that.

One file without dependencies needs one command: of gcc or clang (``cc``, or what ``CC`` names) on Linux; of clang or,
in a developer prompt, MSVC's ``cl`` on Windows. The library has NCCL's name, which is what programs look for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import platformdirs

SOURCE = Path(__file__).with_name("library.c")
NAME = "nccl.dll" if sys.platform == "win32" else "libnccl.so.2"
_COMPILERS = ("clang", "cl") if sys.platform == "win32" else ("cc", "gcc", "clang")
_BUILD_S = 120


class BuildError(Exception):
    """The library cannot be built; the message says what is missing."""


def library() -> Path:
    """Where the library is; it is built if this version of it has not been.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    version = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    path = Path(platformdirs.user_cache_dir("motley", appauthor=False)) / "nccl" / version / NAME
    if not path.exists():
        build(path)
    return path


def build(path: Path) -> None:
    """Compile the library to `path`, which appears whole or not at all.

    Raises:
        BuildError: there is no compiler, or it failed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            line = command(_compiler(), Path(folder, NAME))
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=_BUILD_S)
            if done.returncode:
                raise BuildError(f"{' '.join(line)} failed:\n{(done.stderr + done.stdout).strip()}")
            if not path.exists():  # another process may have been faster; on Windows what is loaded cannot be replaced
                os.replace(Path(folder, NAME), path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the NCCL library cannot be built in {path.parent}: {error}") from error


def command(compiler: Sequence[str], out: Path) -> list[str]:
    """The command line that compiles the library."""
    if Path(compiler[0]).stem.lower() in ("cl", "clang-cl"):
        return [*compiler, "/nologo", "/std:c11", "/O2", "/W3", "/LD", str(SOURCE), f"/Fe:{out}"]
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-shared", "-fvisibility=hidden"]
    if sys.platform != "win32":
        flags += ["-fPIC", f"-Wl,-soname,{NAME}"]
    return [*compiler, *flags, str(SOURCE), "-o", str(out)]


def _compiler() -> list[str]:
    wanted = os.environ.get("CC", "").split()
    for candidate in [wanted] if wanted else [[name] for name in _COMPILERS]:
        if shutil.which(candidate[0]):
            return candidate
    names = " ".join(wanted) or " or ".join(_COMPILERS)
    where = "from a developer prompt of Visual Studio" if sys.platform == "win32" else "or set CC"
    raise BuildError(f"the NCCL library needs a C compiler once, and {names} is not on the PATH; install one, {where}")
