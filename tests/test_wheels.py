"""What `make wheels` makes before it runs this: each wheel holds its system's C libraries, and one installs."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
LINUX, WINDOWS = ("_kernels.so", "libnccl.so.2"), ("_kernels.dll", "nccl.dll")
LIBRARIES = {
    "manylinux_2_17_x86_64": (0x3E, LINUX),
    "manylinux_2_17_aarch64": (0xB7, LINUX),
    "win_amd64": (0x8664, WINDOWS),
    "win_arm64": (0xAA64, WINDOWS),
}
"""By the system in a wheel's name: the machine that its libraries are for, as ELF and PE files number it, and their
names."""
BESIDE = ("motley/orchestrator/web/index.html", "motley/protocol/mesh.proto", "motley/cli/models/README.md")
"""Files that are no Python."""

pytestmark = pytest.mark.skipif(not DIST.is_dir(), reason="`make wheels` makes them")


def wheel(system: str) -> Path:
    (found,) = DIST.glob(f"motley_mesh-*-py3-none-{system}.whl")
    return found


def machine_of(library: bytes) -> int:
    """What a library runs on, as its header says."""
    if library.startswith(b"\x7fELF"):
        return int.from_bytes(library[18:20], "little")
    assert library.startswith(b"MZ")
    header = int.from_bytes(library[0x3C:0x40], "little")
    assert library[header : header + 4] == b"PE\0\0"
    return int.from_bytes(library[header + 4 : header + 6], "little")


@pytest.mark.parametrize("system", LIBRARIES)
def test_a_wheel_holds_the_libraries_of_its_system_and_no_others(system: str) -> None:
    machine, names = LIBRARIES[system]
    with zipfile.ZipFile(wheel(system)) as files:
        held = {Path(name).name: name for name in files.namelist() if re.search(r"\.(so|dll)(\.2)?$", name)}
        assert set(held) == set(names)
        for name in held.values():
            data = files.read(name)
            assert machine_of(data) == machine, name
            # What the name of the wheel promises.
            wanted = [tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", data)]
            assert bool(wanted) == (names == LINUX)
            assert all(version <= (2, 17) for version in wanted), (name, max(wanted))
        assert set(BESIDE) <= set(files.namelist())
        assert not [name for name in files.namelist() if "tests/" in name or "__pycache__" in name]


def test_the_sdist_has_what_the_libraries_are_built_from() -> None:
    (sdist,) = DIST.glob("motley_mesh-*.tar.gz")
    with tarfile.open(sdist) as files:
        held = {name.partition("/")[2] for name in files.getnames()}
    sources = {str(file.relative_to(ROOT)) for kind in ("*.c", "*.h") for file in (ROOT / "plugins").rglob(kind)}
    assert sources <= held
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "orchestrator/web/index.html"} <= held
    assert not [name for name in held if name.startswith("tests")]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it installs the wheel for Linux")
def test_a_wheel_installs_in_a_fresh_environment(tmp_path: Path) -> None:
    """But for what it depends on, which is lent by this environment."""
    system = f"manylinux_2_17_{sysconfig.get_platform().partition('-')[2]}"
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel(system)]
    subprocess.run(install, check=True)
    (packages,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))  # whose own .pth files nobody reads
    command = [tmp_path / "env" / "bin" / "motley", "--version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", subprocess.check_output(command, cwd=tmp_path, text=True))
    code = "from motley.plugins.native import library as l; print(l.PATH, l.supported_levels(l.library()))"
    told = subprocess.check_output([python, "-c", code], cwd=tmp_path, text=True)
    assert str(packages) in told
    assert "portable" in told, "the kernels themselves have answered"
