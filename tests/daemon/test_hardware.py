"""What a machine says of itself: sizes, limits of containers, bandwidth, and the whole message."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon import hardware

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5g", 1_500_000_000),
        (" 2 GiB ", 2 * 2**30),
        ("0.5tib", 2**39),
        (".25k", 250),
        ("1000000", 1000000),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert hardware.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "6XB", "-1GB", "1e9", "6 G B", "1.2.3g", "nan", "0", "0.4b", "٣k", "6", "999999"]
)
def test_what_is_no_size_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is"):
        hardware.parse_size(text)


@given(st.integers(10**6, 2**60))
def test_plain_bytes_come_back(size: int) -> None:
    assert hardware.parse_size(str(size)) == size


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
    assert hardware.cgroup_cores(root) == 1.5
    assert hardware.cgroup_memory(root) == 50 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "1500", "memory.stat": "anon 1500"}
    root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    write(root, {"proc/self/cgroup": "0::/\n"})
    assert hardware.cgroup_memory(root) == 0


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert hardware.cgroup_cores(tmp_path) is None
    assert hardware.cgroup_memory(tmp_path) is None


def test_bandwidth_is_physically_plausible() -> None:
    measured = hardware.memory_bandwidth(1, seconds=0.02, size=32 * MIB)
    assert 0.2e9 < measured < 2e12


def test_bandwidth_is_measured_in_the_time_given_and_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: 4 * MIB)
    assert hardware.memory_bandwidth(2, seconds=0) > 0


def test_the_whole_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda threads: 1e9 * threads)
    machine = hardware.measure()
    assert machine.platform == sys.platform
    assert machine.cpu
    assert 1 <= machine.cores <= (psutil.cpu_count() or 1)
    assert 0 < machine.memory_bytes <= psutil.virtual_memory().total
    assert machine.memory_bandwidth == 1e9 * machine.cores
    assert set(machine.engines) >= {"onnxruntime", "reference"}
    limited = hardware.measure(memory_limit=5 * MIB, cores=1)
    assert (limited.memory_bytes, limited.cores) == (5 * MIB, 1)
    assert hardware.measure(memory_limit=2**60).memory_bytes <= psutil.virtual_memory().total


def test_gpus_agree_with_the_driver() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert hardware.gpus() == []
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    found = hardware.gpus()
    assert len(found) == count
    assert all(gpu.name and gpu.driver and gpu.free_bytes <= gpu.memory_bytes for gpu in found)


def test_pinning_wraps_around_the_cores_allowed() -> None:
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        assert hardware.pin_to_core(0) is False
        return
    before = process.cpu_affinity()
    assert before
    try:
        assert hardware.pin_to_core(len(before)) is True
        assert process.cpu_affinity() == [before[0]]
    finally:
        process.cpu_affinity(before)
