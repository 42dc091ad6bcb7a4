"""Builds the CPU kernels (`plugins/native`) with a C compiler that comes as a Python package: no user needs one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = Path("plugins/native")
TARGETS = {
    "linux-x86_64": "x86_64-linux-gnu.2.17",
    "linux-aarch64": "aarch64-linux-gnu.2.17",
    "win-amd64": "x86_64-windows-gnu",
    "win-arm64": "aarch64-windows-gnu",
}
FLAGS = [
    *("-shared", "-fPIC", "-fvisibility=hidden", "-s"),
    *("-O3", "-std=c11", "-Wall", "-Wextra", "-Werror"),
    "-fno-sanitize=undefined",  # which this compiler adds otherwise
]


class BuildLibrary(build_ext):
    """Builds a library that is loaded by ctypes: it knows nothing of Python, and its name says no version of it."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".dll" if sys.platform == "win32" else ".so"))

    def build_extension(self, extension: Extension) -> None:
        platform = sysconfig.get_platform()
        if platform not in TARGETS:
            raise SystemExit(f"Motley's CPU kernels are built for {', '.join(TARGETS)}, not for {platform}")
        destination = Path(self.get_ext_fullpath(extension.name))
        built = Path(self.build_temp) / destination.name  # what else the linker writes stays there
        built.parent.mkdir(parents=True, exist_ok=True)
        destination.parent.mkdir(parents=True, exist_ok=True)
        compiler = [sys.executable, "-m", "ziglang", "cc", "-target", TARGETS[platform], *FLAGS]
        subprocess.run([*compiler, *extension.sources, "-o", str(built)], check=True)
        self.copy_file(str(built), str(destination))


def packages() -> list[str]:
    """Every folder of the tree that is imported, by the name it is imported by."""
    tops = [path.parent for path in Path().glob("*/__init__.py")]
    folders = [file.parent for top in tops for file in top.rglob("__init__.py")]
    return sorted(".".join(("motley", *folder.parts)) for folder in folders)


setup(
    packages=packages(),
    ext_modules=[
        Extension(
            "motley.plugins.native._kernels",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
        )
    ],
    cmdclass={"build_ext": BuildLibrary},
)
