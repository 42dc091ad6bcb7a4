"""The NCCL ABI over host memory: real processes that call the C library, compared with NumPy.

The file is long: a process loads the library once, under NCCL's name, and all tests of one process share it.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from ctypes import byref, c_int, c_size_t, c_void_p
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.plugins import nccl
from motley.plugins.nccl import library as library_module
from motley.plugins.nccl import rendezvous
from motley.plugins.nccl.binding import Process, Settings, _Comm
from motley.plugins.nccl.codes import DATA_TYPES, Reduction, result_of
from motley.plugins.nccl.operations import Call, Kind
from motley.transport import Communicator, Listener, Membership, PeerLost, Plain, connect_mesh
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import ASYNCHRONOUS, HostStep
from tests.transport.cuda.host_driver import HostDriver

SCRIPT = Path(__file__).with_name("nccl_rank.py")
Array = np.ndarray[Any, np.dtype[Any]]
SUCCESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR = 0, 4, 5, 6
TENSORRT = """
    GetUniqueId CommInitRank CommInitAll CommSplit CommUserRank CommCount CommDestroy AllReduce AllGather Broadcast
    Reduce ReduceScatter AlltoAll Gather Scatter Send Recv GroupStart GroupEnd GetVersion GetErrorString GetLastError"""
CUPY = "Bcast CommAbort CommCuDevice CommGetAsyncError CommInitRankConfig"
NAMES = f"{TENSORRT} {CUPY}".split()
"""What these load or are linked against."""


def run_ranks(size: int, part: str, folder: Path, *extra: str) -> list[dict[str, Array]]:
    """Run a part of nccl_rank.py in `size` processes."""
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), str(size), folder / f"{rank}.npz", part, *extra],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        assert ranks[0].stdout is not None
        line = ranks[0].stdout.readline()
        for rank in ranks[1:]:
            assert rank.stdin is not None
            rank.stdin.write(line)
            rank.stdin.flush()
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert not rank.returncode, errors
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [dict(np.load(path)) if (path := folder / f"{rank}.npz").exists() else {} for rank in range(size)]


def values(rank: int, dtype: np.dtype[Any], count: int) -> Array:
    """As nccl_rank.py: what a rank contributes."""
    return np.random.default_rng(rank).integers(0 if dtype.kind == "u" else -4, 5, count).astype(dtype)


COUNT = 1001


def reduced(terms: list[Array], op: Reduction) -> Array:
    """In FP32 and rank order, or in the integers' own type, and an average of integers cut off towards zero."""
    dtype = terms[0].dtype
    wide = dtype if dtype.itemsize >= 4 or dtype.kind in "iu" else np.dtype(np.float32)
    fold = [np.add, np.multiply, np.maximum, np.minimum, np.add][op]
    total = terms[0].astype(wide)
    with np.errstate(all="ignore"):
        for term in terms[1:]:
            total = fold(total, term.astype(wide))
        if op is Reduction.AVG:
            exact = total / wide.type(len(terms))
            total = exact if wide.kind == "f" else np.trunc(exact)
        return total.astype(dtype)


def as_text(array: Array) -> str:
    return str(array)


def check_operations(answers: list[dict[str, Array]]) -> int:
    """Compare what `nccl_rank.operations` did, bit for bit; tells how many answers there were."""
    size = len(answers)
    root = size - 1
    expected: dict[str, list[Array | None]] = {}
    for code, dtype in enumerate(DATA_TYPES):
        data = [values(rank, dtype, COUNT) for rank in range(size)]
        rows = [values(rank, dtype, COUNT * size) for rank in range(size)]
        parts = [np.split(row, size) for row in rows]
        nothing = np.zeros(COUNT, dtype)
        for op in Reduction:
            whole = reduced(data, op)
            expected[f"all_reduce {code} {op}"] = [whole] * size
            expected[f"reduce {code} {op}"] = [nothing] * root + [whole]
            expected[f"reduce_scatter {code} {op}"] = list(np.split(reduced(rows, op), size))
        everything = np.concatenate(data)
        expected[f"all_gather {code}"] = [everything] * size
        expected[f"gather {code}"] = [np.zeros_like(everything)] * root + [everything]
        expected[f"all_to_all {code}"] = [np.concatenate([part[rank] for part in parts]) for rank in range(size)]
        expected[f"broadcast {code}"] = expected[f"bcast {code}"] = [data[root]] * size
        expected[f"scatter {code}"] = list(parts[root])
    for rank, answer in enumerate(answers):
        assert answer.keys() == expected.keys()
        for name, ranks in expected.items():
            right = ranks[rank]
            assert right is not None
            np.testing.assert_array_equal(answer[name].view(right.dtype), right, err_msg=f"{name} on rank {rank}")
    return len(expected)


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_with_every_type_equals_numpy(size: int, tmp_path: Path) -> None:
    assert check_operations(run_ranks(size, "operations", tmp_path)) == 12 * (5 * 3 + 6)


@pytest.mark.parametrize("size", [2, 3])
def test_groups_run_in_the_end_and_messages_in_them_do_not_wait_for_each_other(size: int, tmp_path: Path) -> None:
    for rank, answer in enumerate(run_ranks(size, "groups", tmp_path)):
        assert (answer["got"] == (rank - 1) % size + 1).all()
        assert (answer["reduced"] == size * (size + 1) / 2).all()
        assert answer["heard"].tolist() == {0: [10, 11], 1: [0, 1]}.get(rank, [0, 0])
        assert answer["to_self"].tolist() == [10 * rank, 10 * rank + 1]


@pytest.mark.parametrize("security", ["tls", "plain"])
def test_a_split_makes_meshes_of_their_own(security: str, tmp_path: Path) -> None:
    answers = run_ranks(3, "splits", tmp_path, security)
    assert [answer["place"].tolist() for answer in answers] == [[1, 2], [-1, -1], [0, 2]]
    assert [answer["total"].tolist() for answer in answers] == [[4]] * 3  # 1 + 3, the largest of (4, 2, 4)


def test_a_lost_rank_is_named_on_every_survivor(tmp_path: Path) -> None:
    *survivors, _ = run_ranks(3, "losses", tmp_path)
    for answer in survivors:
        assert answer["results"].tolist() == [REMOTE_ERROR] * 3
        assert "rank 2 is lost" in as_text(answer["told"])


def test_ends_that_disagree_on_a_size_get_errors(tmp_path: Path) -> None:
    sender, receiver = run_ranks(2, "mismatches", tmp_path)
    assert receiver["results"].tolist() == [INVALID_USAGE]
    assert "rank 0 sent 32 bytes where rank 1 receives 24" in as_text(receiver["told"])
    assert sender["results"].tolist() == [REMOTE_ERROR]


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.skipif(sys.platform == "win32", reason="CuPy for Windows has no NCCL binding")
def test_cupys_own_binding_runs_over_motley(tmp_path: Path) -> None:
    data = [values(rank, np.dtype(np.float32), COUNT) for rank in range(2)]
    for rank, answer in enumerate(run_ranks(2, "cupy", tmp_path)):
        np.testing.assert_array_equal(answer["total"], data[0] + data[1])
        np.testing.assert_array_equal(answer["row"], np.concatenate(data))
        assert answer["place"].tolist() == [rank, 2, 22807]


# -- one process ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path() -> Path:
    return nccl.install(host="127.0.0.1")


@pytest.fixture
def lib(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.ncclGetLastError.restype = library.ncclGetErrorString.restype = ctypes.c_char_p
    return library


@pytest.fixture
def comms(lib: ctypes.CDLL) -> Iterator[list[c_void_p]]:
    """Two ranks in this process."""
    handles = (c_void_p * 2)()
    assert lib.ncclCommInitAll(handles, 2, (c_int * 2)(5, 3)) == SUCCESS, lib.ncclGetLastError(None)
    yield [c_void_p(handle) for handle in handles]
    for handle in handles:
        lib.ncclCommDestroy(c_void_p(handle))


def at(array: Array) -> c_void_p:
    return c_void_p(array.ctypes.data)


def test_the_library_exports_every_name_and_is_found_under_nccls(lib: ctypes.CDLL) -> None:
    assert [name for name in NAMES if not hasattr(lib, f"nccl{name}")] == []
    by_name = ctypes.CDLL(library_module.NAME)
    assert ctypes.addressof(c_int.in_dll(by_name, "ncclGetVersion")) == ctypes.addressof(
        c_int.in_dll(lib, "ncclGetVersion")
    )
    version = c_int()
    assert lib.ncclGetVersion(byref(version)) == SUCCESS
    assert 22800 <= version.value < 22900


@pytest.mark.skipif(not shutil.which("nm"), reason="no nm")
def test_the_library_exports_nothing_else(path: Path) -> None:
    lines = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    found = set(re.findall(r" T (\w+)", lines))
    assert found == {f"nccl{name}" for name in NAMES} | {f"motleyNccl{name}" for name in ("New", "Register", "Sizes")}


def test_numbers_are_those_of_the_c_file() -> None:
    text = Path(nccl.__file__).with_name("library.c").read_text("utf-8")
    (kinds,) = re.findall(r"enum \{ (ALL_REDUCE.*?) \}", text)
    assert kinds.split(", ") == [kind.name for kind in Kind]
    (sizes,) = re.findall(r"ITEM_SIZES\[\] = \{(.*?)\}", text)
    assert [int(each) for each in sizes.split(",")] == [dtype.itemsize for dtype in DATA_TYPES]
    (reductions,) = re.findall(r"enum \{ (sum.*?), REDUCTIONS \}", text)
    assert reductions.upper().split(", ") == [op.name for op in Reduction]


def test_all_ranks_of_one_process_run_their_group_together(lib: ctypes.CDLL, comms: list[c_void_p]) -> None:
    buffers = [np.array([1.5, 2], np.float32), np.array([10, 20], np.float32)]
    lib.ncclGroupStart()
    for comm, buffer in zip(comms, buffers, strict=True):
        assert lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(2), 7, 0, comm, None) == SUCCESS
    assert lib.ncclGroupEnd() == SUCCESS
    assert [buffer.tolist() for buffer in buffers] == [[11.5, 22]] * 2
    device = c_int()
    assert [(lib.ncclCommCuDevice(comm, byref(device)), device.value) for comm in comms] == [(0, 5), (0, 3)]


def test_wrong_calls_are_refused_with_a_reason(lib: ctypes.CDLL, comms: list[c_void_p]) -> None:
    buffer = np.zeros(4, np.float32)
    comm, place = comms[0], at(buffer)

    def refused(result: int) -> str:
        assert result == INVALID_ARGUMENT
        text = lib.ncclGetLastError(None).decode()
        assert isinstance(text, str)
        return text

    four = c_size_t(4)
    assert "ncclAllReduce: 12 is no data type" in refused(lib.ncclAllReduce(place, place, four, 12, 0, comm, None))
    assert "5 is no reduction" in refused(lib.ncclAllReduce(place, place, four, 7, 5, comm, None))
    assert "2 is no rank of a communicator of 2" in refused(lib.ncclBroadcast(place, place, four, 7, 2, comm, None))
    assert "ncclSend: -1 is no rank" in refused(lib.ncclSend(place, four, 7, -1, comm, None))
    assert "a buffer is NULL" in refused(lib.ncclAllGather(place, None, four, 7, comm, None))
    assert "count is larger" in refused(lib.ncclAllGather(place, place, c_size_t(1 << 62), 7, comm, None))
    assert "no live communicator" in refused(lib.ncclAllReduce(place, place, four, 7, 0, None, None))
    assert lib.ncclAllReduce(None, None, c_size_t(0), 7, 0, comm, None) == SUCCESS  # nothing is to be done
    assert lib.ncclGroupEnd() == INVALID_USAGE


def test_a_group_with_a_wrong_call_runs_none(lib: ctypes.CDLL, comms: list[c_void_p]) -> None:
    buffer = np.ones(1, np.float32)
    lib.ncclGroupStart()
    for comm in comms:
        assert lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(1), 7, 0, comm, None) == SUCCESS
    assert lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(1), 99, 0, comms[0], None) == INVALID_ARGUMENT
    assert lib.ncclGroupEnd() == INVALID_ARGUMENT
    assert buffer.tolist() == [1]
    assert "99 is no data type" in lib.ncclGetLastError(None).decode()
    test_all_ranks_of_one_process_run_their_group_together(lib, comms)  # the communicator is as good as before


def test_a_destroyed_communicator_is_known_as_such(lib: ctypes.CDLL) -> None:
    handles = (c_void_p * 1)()
    assert lib.ncclCommInitAll(handles, 1, None) == SUCCESS
    comm = c_void_p(handles[0])
    buffer = np.array([3], np.int32)
    assert lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(1), 2, 4, comm, None) == SUCCESS
    assert buffer.tolist() == [3]
    assert [lib.ncclCommDestroy(comm) for _ in range(2)] == [SUCCESS, INVALID_ARGUMENT]
    assert lib.ncclCommCount(comm, byref(c_int())) == INVALID_ARGUMENT
    assert lib.ncclCommDestroy(None) == SUCCESS


def test_a_stream_without_a_device_is_refused(lib: ctypes.CDLL, comms: list[c_void_p]) -> None:
    buffer = np.ones(1, np.float32)
    result = lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(1), 7, 0, comms[0], c_void_p(0x1234))
    assert result == INVALID_USAGE
    assert "give install() a device" in lib.ncclGetLastError(None).decode()


def test_a_foreign_id_and_one_whose_maker_is_gone_are_refused(lib: ctypes.CDLL) -> None:
    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 128),)

    comm = c_void_p()
    assert lib.ncclCommInitRank(byref(comm), 2, UniqueId(), 0) == INVALID_ARGUMENT
    assert not comm
    assert "not Motley's" in lib.ncclGetLastError(None).decode()
    with closing(Listener("127.0.0.1")) as listener:
        port = listener.port
    nobody = UniqueId.from_buffer_copy(rendezvous.UniqueId(b"s" * 32, False, "127.0.0.1", port).pack())
    assert lib.ncclCommInitRank(byref(comm), 2, nobody, 0) == REMOTE_ERROR
    assert "the process that made the id must still run" in lib.ncclGetLastError(None).decode()


def test_ranks_that_do_not_fit_together_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def join_all(*places: tuple[int, int]) -> list[str]:
        unique = rendezvous.UniqueId.unpack(rendezvous.make_id("127.0.0.1", plain=True).pack())
        told: list[str] = []

        def join(rank: int, size: int) -> None:
            with pytest.raises(nccl.NcclError) as caught:
                rendezvous.join(unique, rank, size)
            told.append(str(caught.value))

        threads = [threading.Thread(target=join, args=place) for place in places]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told

    told = join_all((0, 3), (0, 3))
    assert len(told) == 2
    assert all("two processes say that they are rank 0" in each for each in told)
    told = join_all((0, 2), (1, 3))
    assert all("ranks, another one" in each for each in told)
    monkeypatch.setattr(rendezvous, "RENDEZVOUS_S", 1.0)
    assert join_all((1, 3)) == ["rank 1 of 3 cannot join: rank 0, 2 did not come within 1 s"]


def test_strangers_do_not_disturb_a_rendezvous() -> None:
    unique = rendezvous.make_id("127.0.0.1", plain=False)
    silent = socket.create_connection((unique.host, unique.port))
    for nonsense in (b"\n", b"{}\n", b"x" * 40000, rendezvous._seal({"rank": 0, "size": 1, "address": "evil:1"}, b"?")):
        with socket.create_connection((unique.host, unique.port)) as stranger:
            stranger.sendall(nonsense)
    ranks, host = rendezvous.join(unique, 0, 1)
    with ranks:
        assert (ranks.size, host) == (1, "127.0.0.1")
    silent.close()


def test_the_secret_makes_the_authority_and_no_other_secret_does(tmp_path: Path) -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [f"127.0.0.1:{listener.port}" for listener in listeners]
    errors: list[BaseException] = []

    def connect(rank: int, certified_by: bytes) -> None:
        member = Membership(rendezvous.SESSION, 0, rank, 2, b"s" * 32, bytes(32))
        security = rendezvous.certified(certified_by, rank)
        try:
            connect_mesh(listeners[rank], member, addresses, 3.0, security=security).close()
        except Exception as error:
            errors.append(error)

    for secrets, failures in (((b"a" * 32, b"a" * 32), 0), ((b"a" * 32, b"b" * 32), 2)):
        threads = [threading.Thread(target=connect, args=each) for each in enumerate(secrets)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == failures
    for listener in listeners:
        listener.close()


# -- meshes that are there already, and devices -----------------------------------------------------------------------


@pytest.fixture
def meshes() -> Iterator[list[Communicator]]:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    addresses = [f"127.0.0.1:{listener.port}" for listener in listeners]
    made: dict[int, Communicator] = {}

    def connect(rank: int) -> None:
        member = Membership("bound", 0, rank, 2, b"s" * 32, bytes(32))
        made[rank] = connect_mesh(listeners[rank], member, addresses, security=Plain())

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [made[0], made[1]]
    for rank in range(2):
        made[rank].close()
        listeners[rank].close()


def test_a_mesh_that_is_there_gets_a_handle_and_outlives_it(lib: ctypes.CDLL, meshes: list[Communicator]) -> None:
    handles = [nccl.bind(ranks) for ranks in meshes]
    rank = c_int()
    assert (lib.ncclCommUserRank(c_void_p(handles[1]), byref(rank)), rank.value) == (SUCCESS, 1)
    buffers = [np.array([rank + 1], np.float16) for rank in range(2)]
    lib.ncclGroupStart()
    for handle, buffer in zip(handles, buffers, strict=True):
        lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(1), 6, 4, c_void_p(handle), None)
    assert lib.ncclGroupEnd() == SUCCESS
    assert [buffer.tolist() for buffer in buffers] == [[1.5]] * 2
    child = c_void_p()
    assert lib.ncclCommSplit(c_void_p(handles[0]), 0, 0, byref(child), None) == INVALID_USAGE
    assert "host=" in lib.ncclGetLastError(None).decode()
    for handle in handles:
        nccl.release(handle)
    with pytest.raises(nccl.NcclError, match="no live communicator"):
        nccl.release(handles[0])
    assert all("open" in repr(ranks) for ranks in meshes)


def test_a_release_that_fails_says_why(
    lib: ctypes.CDLL, meshes: list[Communicator], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(process: object, handle: int, *, aborts: bool) -> None:
        raise TimeoutError("the stream did not come to an event within 600 s")

    handle = nccl.bind(meshes[0])
    monkeypatch.setattr(Process, "end", end)
    with pytest.raises(nccl.NcclError, match="did not come to an event within 600 s"):
        nccl.release(handle)


def test_whoever_can_sum_gets_a_handle_for_sums_alone(lib: ctypes.CDLL) -> None:
    class Doubled:
        rank, size = 1, 2

        def all_reduce(self, buffer: Array) -> None:
            buffer *= 2

    handle = c_void_p(nccl.bind(Doubled()))
    buffer, half = np.arange(3, dtype=np.float32), np.zeros(3, np.float16)
    assert lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(3), 7, 0, handle, None) == SUCCESS
    assert buffer.tolist() == [0, 2, 4]
    for result in (
        lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(3), 7, 2, handle, None),  # the largest
        lib.ncclAllReduce(at(half), at(half), c_size_t(3), 6, 0, handle, None),
        lib.ncclBroadcast(at(buffer), at(buffer), c_size_t(3), 7, 0, handle, None),
        lib.ncclSend(at(buffer), c_size_t(3), 7, 0, handle, None),
    ):
        assert result == INVALID_USAGE
        assert (
            "all that this communicator has is ncclAllReduce, ncclSum of float32" in lib.ncclGetLastError(None).decode()
        )
    # Its only split is that of all ranks in their order, which nobody else has to take part in.
    child, rank, size = c_void_p(), c_int(), c_int()
    for color, key in ((1, 1), (0, 0), (-1, 1)):
        assert lib.ncclCommSplit(handle, color, key, byref(child), None) == INVALID_USAGE
        assert "color 0, and key 1 for this rank" in lib.ncclGetLastError(None).decode()
    assert lib.ncclCommSplit(handle, 0, 1, byref(child), None) == SUCCESS
    assert lib.ncclCommUserRank(child, byref(rank)) == lib.ncclCommCount(child, byref(size)) == SUCCESS
    assert (rank.value, size.value) == (1, 2)
    nccl.release(handle.value or 0)
    assert lib.ncclAllReduce(at(buffer), at(buffer), c_size_t(3), 7, 0, child, None) == SUCCESS
    assert buffer.tolist() == [0, 4, 8]
    assert lib.ncclCommDestroy(child) == SUCCESS


@pytest.mark.parametrize("form", ASYNCHRONOUS)
def test_calls_on_a_devices_streams_take_their_order(meshes: list[Communicator], form: HostStep) -> None:
    """What a kernel before the call writes is what is summed, and the caller does not wait for it."""
    driver = HostDriver()
    device = nccl.CudaDevice(form=form, driver=driver)
    memory = [_Comm(1, rank, 2) for rank in range(2)]
    process = Process(Settings(None, False, device), lambda rank, _size, _device: ctypes.addressof(memory[rank]))
    handles = [process.bind(ranks, None) for ranks in meshes]
    streams = [driver.create_stream() for _ in range(2)]
    buffers = [driver.allocate(400) for _ in range(2)]
    pinned = [driver.allocate_pinned(400) for _ in range(2)]
    gate = threading.Event()

    def call(rank: int, count: int) -> Call:
        return Call(
            kind=Kind.ALL_REDUCE,
            dtype=np.dtype(np.float32),
            op=Reduction.SUM,
            peer=0,
            count=count,
            send=buffers[rank],
            recv=buffers[rank],
            stream=streams[rank],  # type: ignore[arg-type]  # this driver's handles are no numbers
            comm=handles[rank],
            child=0,
            key=0,
        )

    for rank, stream in enumerate(streams):
        values = pinned[rank].host.view(np.float32)
        stream.submit(lambda rank=rank, values=values: gate.wait(60) and values.fill(rank + 1), "a kernel")
        driver.copy(buffers[rank], values.ctypes.data, 400, stream)
        for count in (3, 100):  # staging grows under way
            process.run([call(rank, count)])
        driver.copy(values.ctypes.data, buffers[rank], 400, stream)
    assert not any(each.host.any() for each in pinned)  # all calls have returned, nothing has run
    gate.set()
    for stream in streams:
        device.synchronise(stream)
    assert [np.unique(each.host.view(np.float32)[:3]).tolist() for each in pinned] == [[6]] * 2
    assert [np.unique(each.host.view(np.float32)[3:]).tolist() for each in pinned] == [[3]] * 2
    # Calls that do not fit together fail in their streams: told later, and nothing is raised into the stream.
    for rank in range(2):
        process.run([call(rank, 3 - rank)])
    for handle in handles:
        process.end(handle, aborts=False)
    assert [shared.async_error for shared in memory] == [REMOTE_ERROR] * 2
    assert all(b"rank" in shared.async_message for shared in memory)
    device.close()
    for rank in range(2):
        driver.destroy_stream(streams[rank])
        driver.free(buffers[rank])
        driver.free_pinned(pinned[rank])
    assert driver.live == 0


def test_an_abort_breaks_the_call_that_waits(meshes: list[Communicator]) -> None:
    """Rank 1 never comes: the call would hold the communicator for its whole deadline."""
    memory = _Comm(1, 0, 2)
    process = Process(Settings(None, False, None), lambda *_: ctypes.addressof(memory))
    handle, buffer = process.bind(meshes[0], None), np.ones(3, np.float32)
    address = buffer.ctypes.data
    call = Call(Kind.ALL_REDUCE, buffer.dtype, Reduction.SUM, 0, 3, address, address, 0, handle, 0, 0)
    locked, failed = process._comms[handle].lock, list[BaseException]()

    def run() -> None:
        try:
            process.run([call])
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=run)
    waiting.start()
    while not locked.locked():
        waiting.join(0.01)
    began = time.monotonic()
    process.end(handle, aborts=True)
    waiting.join(60)
    assert time.monotonic() - began < 10 < meshes[0].deadline_s
    assert [type(error) for error in failed] == [PeerLost]


def test_a_stream_that_is_captured_is_refused() -> None:
    driver = HostDriver()
    device = nccl.CudaDevice(driver=driver)
    assert device.current() == 0
    stream = driver.create_stream()
    driver.begin_capture(stream)
    with pytest.raises(CudaError, match="cannot be captured in a CUDA graph") as refused:
        device.submit(stream, [], [], lambda given, taken: None)
    assert result_of(refused.value)[0] == nccl.Result.UNHANDLED_CUDA_ERROR
    driver.destroy_graph(driver.end_capture(stream))
    device.close()
    driver.destroy_stream(stream)
    assert driver.live == 0


# -- the library that installation builds -----------------------------------------------------------------------------


def test_a_library_that_was_not_built_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_module, "PATH", tmp_path / "libnccl.so.2")
    with pytest.raises(nccl.NcclError, match=r"libnccl\.so\.2 is missing; it is built by installation: run `pip"):
        library_module.library()


def test_its_path_is_printed_for_other_programs(path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "motley.plugins.nccl"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}\n"


def test_without_motley_the_library_says_so(path: Path) -> None:
    """A program that only loads the library: no interpreter, so nobody to serve its calls."""
    code = f"""
import ctypes
lib = ctypes.CDLL({str(path)!r})
lib.ncclGetLastError.restype = ctypes.c_char_p
print(lib.ncclGetUniqueId(ctypes.create_string_buffer(128)), lib.ncclGetLastError(None).decode())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{INVALID_USAGE} ncclGetUniqueId: nothing of Motley runs in this process")
