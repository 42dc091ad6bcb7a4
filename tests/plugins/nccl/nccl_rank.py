"""One process that uses NCCL through its C ABI, as any NCCL user, and knows nothing of Motley but `install`.

``nccl_rank.py RANK SIZE OUT PART``: rank 0 prints the unique id, the others read it from standard input. PART names the
function below that is run; what it returns is saved to OUT (npz) for the test to compare with NumPy.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_char, c_int, c_size_t, c_void_p
from typing import Any

import ml_dtypes
import numpy as np

from motley.plugins import nccl

Array = np.ndarray[Any, np.dtype[Any]]
TYPES = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float16, np.float32, np.float64]
DTYPES = [np.dtype(each) for each in (*TYPES, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
SUM, PROD, MAX, MIN, AVG = range(5)
COUNT = 1001


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", c_char * 128),)


def values(rank: int, dtype: np.dtype[Any], count: int = COUNT) -> Array:
    """What a rank contributes."""
    return np.random.default_rng(rank).integers(0 if dtype.kind == "u" else -4, 5, count).astype(dtype)


class Nccl:
    """The functions of the ABI; a result other than success raises."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        self.comm = c_void_p()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, f"nccl{name}")

        def call(*arguments: Any) -> None:
            result = function(*arguments)
            if result:
                raise RuntimeError(f"{name}: {result}: {self.library.ncclGetLastError(None).decode()}")

        return call

    def tail(self) -> tuple[c_void_p, c_void_p]:
        return self.comm, c_void_p()


def at(array: Array) -> c_void_p:
    return c_void_p(array.ctypes.data)


def operations(lib: Nccl, rank: int, size: int) -> dict[str, Array]:
    """Every operation with every type, out of place and in place."""
    out: dict[str, Array] = {}
    root = size - 1
    for code, dtype in enumerate(DTYPES):
        data, row = values(rank, dtype), values(rank, dtype, COUNT * size)
        for op in range(5):
            key = f"{code} {op}"
            out[f"all_reduce {key}"] = data.copy()
            buffer = out[f"all_reduce {key}"]
            lib.AllReduce(at(buffer), at(buffer), c_size_t(COUNT), code, op, *lib.tail())
            out[f"reduce {key}"] = np.zeros_like(data)
            lib.Reduce(at(data), at(out[f"reduce {key}"]), c_size_t(COUNT), code, op, root, *lib.tail())
            out[f"reduce_scatter {key}"] = np.zeros_like(data)
            lib.ReduceScatter(at(row), at(out[f"reduce_scatter {key}"]), c_size_t(COUNT), code, op, *lib.tail())
        moved = {name: np.zeros_like(row) for name in ("all_gather", "all_to_all", "gather")}
        moved |= {name: np.zeros_like(data) for name in ("broadcast", "scatter")}
        count = c_size_t(COUNT)
        lib.AllGather(at(data), at(moved["all_gather"]), count, code, *lib.tail())
        lib.AlltoAll(at(row), at(moved["all_to_all"]), count, code, *lib.tail())
        lib.Gather(at(data), at(moved["gather"]) if rank == root else None, count, code, root, *lib.tail())
        lib.Broadcast(at(data) if rank == root else None, at(moved["broadcast"]), count, code, root, *lib.tail())
        lib.Scatter(at(row) if rank == root else None, at(moved["scatter"]), count, code, root, *lib.tail())
        out |= {f"{name} {code}": array for name, array in moved.items()}
        in_place = data.copy()
        lib.Bcast(at(in_place), count, code, root, *lib.tail())
        out[f"bcast {code}"] = in_place
    return {name: array.view(np.uint8) for name, array in out.items()}


def groups(lib: Nccl, rank: int, size: int) -> dict[str, Array]:
    """Messages in groups, larger than any buffer of the system, and what else a group may hold."""
    after, before = (rank + 1) % size, (rank - 1) % size
    count, float32 = 3 << 20, 7
    mine, got, reduced = (np.full(count, rank + 1, np.float32) for _ in range(3))
    lib.GroupStart()
    lib.Recv(at(got), c_size_t(count), float32, before, *lib.tail())
    lib.GroupStart()
    lib.Send(at(mine), c_size_t(count), float32, after, *lib.tail())
    lib.GroupEnd()
    lib.AllReduce(at(reduced), at(reduced), c_size_t(count), float32, SUM, *lib.tail())
    assert reduced[0] == rank + 1  # nothing has been run yet
    lib.GroupEnd()
    # One end in a group, the other one call by call: receipts and data of two messages cross.
    words = np.array([10 * rank, 10 * rank + 1], np.int64)
    heard = np.zeros(2, np.int64)
    one = c_size_t(1)
    if rank == 0:
        lib.GroupStart()
        for index in range(2):
            lib.Send(at(words[index:]), one, 4, 1, *lib.tail())
            lib.Recv(at(heard[index:]), one, 4, 1, *lib.tail())
        lib.GroupEnd()
    elif rank == 1:
        for index in range(2):
            lib.Recv(at(heard[index:]), one, 4, 0, *lib.tail())
            lib.Send(at(words[index:]), one, 4, 0, *lib.tail())
    to_self = np.zeros(2, np.int64)
    lib.GroupStart()
    lib.Send(at(words), c_size_t(2), 4, rank, *lib.tail())
    lib.Recv(at(to_self), c_size_t(2), 4, rank, *lib.tail())
    lib.GroupEnd()
    return {"got": got[[0, -1]], "reduced": reduced[[0, -1]], "heard": heard, "to_self": to_self}


def splits(lib: Nccl, rank: int, size: int) -> dict[str, Array]:
    """Odd and even ranks, in reverse order, rank 1 in none; each group sums on its own."""
    child = c_void_p()
    lib.CommSplit(lib.comm, -1 if rank == 1 else rank % 2, -rank, byref(child), None)
    assert bool(child) == (rank != 1)
    answers = [c_int(-1), c_int(-1)]
    total = np.array([rank + 1], np.float32)
    if child:
        lib.CommUserRank(child, byref(answers[0]))
        lib.CommCount(child, byref(answers[1]))
        lib.AllReduce(at(total), at(total), c_size_t(1), 7, SUM, child, None)
    lib.AllReduce(at(total), at(total), c_size_t(1), 7, MAX, *lib.tail())  # the parent goes on
    lib.CommDestroy(child)
    return {"place": np.array([answer.value for answer in answers]), "total": total}


def losses(lib: Nccl, rank: int, size: int) -> dict[str, Array]:
    """The last rank dies; the others are told who, by code and by name."""
    buffer = np.ones(8, np.float32)
    lib.AllReduce(at(buffer), at(buffer), c_size_t(8), 7, SUM, *lib.tail())
    if rank == size - 1:
        os._exit(0)
    call = (at(buffer), at(buffer), c_size_t(8), 7, SUM, *lib.tail())
    results = [lib.library.ncclAllReduce(*call) for _ in range(2)]
    told = lib.library.ncclGetLastError(lib.comm).decode()
    state = c_int()
    lib.CommGetAsyncError(lib.comm, byref(state))
    return {"results": np.array([*results, state.value]), "told": np.array(told)}


def mismatches(lib: Nccl, rank: int, size: int) -> dict[str, Array]:
    """The two ends of a message do not agree on its size."""
    buffer = np.zeros(8, np.float32)
    function = lib.library.ncclSend if rank == 0 else lib.library.ncclRecv
    result = function(at(buffer), c_size_t(8 if rank == 0 else 6), 7, 1 - rank, *lib.tail())
    return {"results": np.array([result]), "told": np.array(lib.library.ncclGetLastError(None).decode())}


def cupy(lib: Nccl, rank: int, size: int) -> dict[str, Array]:
    """CuPy's own binding, which is linked against libnccl.so.2 and has never heard of Motley."""
    from cupy_backends.cuda.libs import nccl as theirs

    (line,) = unique_ids(theirs.get_unique_id() if rank == 0 else None)
    comm = theirs.NcclCommunicator(size, line, rank)
    data, row = values(rank, np.dtype(np.float32)), np.zeros(COUNT * size, np.float32)
    total = np.zeros_like(data)
    comm.allReduce(data.ctypes.data, total.ctypes.data, COUNT, theirs.NCCL_FLOAT32, theirs.NCCL_SUM, 0)
    theirs.groupStart()
    comm.allGather(data.ctypes.data, row.ctypes.data, COUNT, theirs.NCCL_FLOAT32, 0)
    theirs.groupEnd()
    place = np.array([comm.rank_id(), comm.size(), theirs.get_version()])
    comm.check_async_error()
    comm.destroy()
    return {"total": total, "row": row, "place": place}


def unique_ids(*given: bytes | tuple[int, ...] | None) -> list[Any]:
    """Hand ids to the test, which hands them to the other ranks."""
    ids = []
    for each in given:
        if each is not None:
            print(bytes(byte % 256 for byte in each).hex(), flush=True)
            ids.append(each)
        else:
            data = bytes.fromhex(sys.stdin.readline())
            ids.append(data)
    return ids


def main() -> None:
    rank, size, out, part = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    lib = Nccl(str(nccl.install(host="127.0.0.1", plain="plain" in sys.argv)))
    if part == "cupy":
        np.savez(out, **cupy(lib, rank, size))
        return
    unique = UniqueId()
    if rank == 0:
        lib.GetUniqueId(byref(unique))
    (data,) = unique_ids(bytes(unique) if rank == 0 else None)
    ctypes.memmove(byref(unique), data, 128)
    lib.CommInitRank(byref(lib.comm), size, unique, rank)
    np.savez(out, **globals()[part](lib, rank, size))
    if part not in ("losses", "mismatches"):
        lib.CommDestroy(lib.comm)


if __name__ == "__main__":
    main()
