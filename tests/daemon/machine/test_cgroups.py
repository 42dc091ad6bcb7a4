"""Limits of containers, on files made up for a test."""

from __future__ import annotations

from pathlib import Path

from motley.daemon.machine.cgroups import cgroup_cores, cgroup_memory

MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_control_group_binds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/old\n0::/slice/box\n",
            "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/slice/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/slice/memory.stat": f"anon 5\ninactive_file {10 * MIB}\n",
            "sys/fs/cgroup/slice/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/box/memory.max": "max\n",
        },
    )
    assert cgroup_cores(root) == 1.5
    assert cgroup_memory(root) == 50 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "1500", "memory.stat": "anon 1500"}
    root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    write(root, {"proc/self/cgroup": "0::/\n"})
    assert cgroup_memory(root) == 0


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_cores(tmp_path) is None
    assert cgroup_memory(tmp_path) is None
