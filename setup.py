"""Builds Motley's C libraries with a C compiler that comes as a Python package: no user needs one.

They are the CPU kernels (`plugins/native/kernels`) and the stand-in for NCCL (`plugins/nccl`). Both are loaded by
ctypes and know nothing of Python, so a file's name says no version of it, and one wheel is for all versions of Python.

The compiler builds for other systems as well: `MOTLEY_TARGET=win-amd64` makes a wheel for Windows on Linux.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE, NCCL = Path("plugins/native"), Path("plugins/nccl")
TARGET = os.environ.get("MOTLEY_TARGET") or sysconfig.get_platform()
WINDOWS = TARGET.startswith("win")
FILES = {
    "_kernels": "_kernels.dll" if WINDOWS else "_kernels.so",
    "nccl": "nccl.dll" if WINDOWS else "libnccl.so.2",  # as NCCL's own, which programs look for
}
"""By the last part of a library's name, the file it is built to."""
TARGETS = {
    "linux-x86_64": ("x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64"),
    "linux-aarch64": ("aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64"),
    "win-amd64": ("x86_64-windows-gnu", "win_amd64"),
    "win-arm64": ("aarch64-windows-gnu", "win_arm64"),
}
"""What the compiler, and what wheels call a system. The libraries ask for nothing newer than glibc 2.17."""
FLAGS = [
    *("-shared", "-fPIC", "-fvisibility=hidden", "-s"),
    *("-O3", "-g0", "-std=c11", "-Wall", "-Wextra", "-Werror"),
    "-fno-sanitize=undefined",  # which this compiler adds otherwise
]


class BuildLibrary(build_ext):
    """Builds the libraries, each by one call of the compiler."""

    def get_ext_filename(self, fullname: str) -> str:
        """Where a library lies in the tree of packages, by its name with or without its package."""
        *package, name = fullname.split(".")
        return str(Path(*package, FILES[name]))

    def build_extension(self, extension: Extension) -> None:
        if TARGET not in TARGETS:
            raise SystemExit(f"Motley's C libraries are built for {', '.join(TARGETS)}, not for {TARGET}")
        destination = Path(self.get_ext_fullpath(extension.name))
        built = Path(self.build_temp) / destination.name  # what else the linker writes stays there
        built.parent.mkdir(parents=True, exist_ok=True)
        destination.parent.mkdir(parents=True, exist_ok=True)
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[TARGET][0], *FLAGS]
        if not WINDOWS:  # whoever opens the file's name later gets what is loaded already, wherever it lies
            compiler.append(f"-Wl,-soname,{destination.name}")
        subprocess.run([*compiler, *extension.sources, "-o", str(built)], check=True)
        self.copy_file(str(built), str(destination))


class Wheel(bdist_wheel):
    """A wheel for any Python 3 on the system that the libraries were built for."""

    def get_tag(self) -> tuple[str, str, str]:
        """The wheel's tags: of Python, of its ABI and of the system."""
        return "py3", "none", TARGETS[TARGET][1]


def library(name: str, folder: Path, sources: Path) -> Extension:
    """The library `name`, which lies in a folder of the tree, of all C files in one."""
    return Extension(
        ".".join(("motley", *folder.parts, name)),
        sources=sorted(map(str, sources.glob("*.c"))),
        depends=sorted(map(str, sources.glob("*.h"))),
    )


def packages() -> list[str]:
    """Every folder of the tree that is imported, or has files beside those that are, by the name it is imported by."""
    tops = [path.parent for path in Path().glob("*/__init__.py")]
    folders = {file.parent for top in tops for file in top.rglob("*") if file.is_file()}
    named = [folder for folder in folders if all(part.isidentifier() for part in folder.parts)]
    return sorted(".".join(("motley", *folder.parts)) for folder in named if folder.name != "__pycache__")


setup(
    packages=packages(),
    ext_modules=[library("_kernels", NATIVE, NATIVE / "kernels"), library("nccl", NCCL, NCCL)],
    cmdclass={"bdist_wheel": Wheel, "build_ext": BuildLibrary},
)
