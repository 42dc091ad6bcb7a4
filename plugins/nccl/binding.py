"""Loads library.c into this process and executes what comes through it."""

from __future__ import annotations

import atexit
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from motley.transport import Communicator, UsageError
from motley.transport.collectives import Sums

from . import memory, rendezvous
from .codes import DATA_TYPES, NcclError, Reduction, Result, result_of
from .library import NAME, library
from .memory import Array, Device, Region, Step, host_view
from .operations import Call, Kind, Messages, Ranks, collective

log = logging.getLogger(__name__)

_MESSAGE = 512
_UNKNOWN_DEVICE = -1


class _Comm(ctypes.Structure):
    """``struct ncclComm`` of library.c."""

    _fields_ = (
        ("alive", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("async_error", ctypes.c_int32),
        ("async_message", ctypes.c_char * _MESSAGE),
        ("id", ctypes.c_ubyte * 128),
    )


class _Call(ctypes.Structure):
    """``Call`` of library.c."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("data_type", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("count", ctypes.c_uint64),
        ("send", ctypes.c_void_p),
        ("recv", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("comm", ctypes.c_void_p),
        ("child", ctypes.c_void_p),
        ("key", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


_UNIQUE_ID = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Call), ctypes.c_size_t, ctypes.c_void_p)
_END = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class _Callbacks(ctypes.Structure):
    """``Callbacks`` of library.c."""

    _fields_ = (("unique_id", _UNIQUE_ID), ("run", _RUN), ("end", _END))


@dataclass(frozen=True)
class Settings:
    """How this process takes part: the arguments of `install`."""

    host: str | None
    plain: bool
    device: Device | None


@dataclass(eq=False)
class _Bound:
    """A live communicator: what stands behind an ``ncclComm_t``."""

    shared: _Comm
    """The C library's memory."""
    ranks: Communicator | Sums
    host: str | None
    """The address that the other ranks reach this one at, as far as known."""
    device: Device | None
    """What runs its calls on CUDA streams."""
    is_owned: bool
    """It was made here, so it is closed here."""
    is_plain: bool = False
    """Its links are not encrypted, nor are those of what is split from it."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """A stream's host steps run beside the caller's thread."""
    streams: set[int] = field(default_factory=set)
    """Those that steps were submitted to."""

    @property
    def mesh(self) -> Communicator:
        """The ranks, where more is wanted of them than a sum."""
        if not isinstance(self.ranks, Communicator):
            raise NcclError(Result.INVALID_USAGE, "all that this communicator has is ncclAllReduce, ncclSum of float32")
        return self.ranks

    @cached_property
    def messages(self) -> Messages:
        """The sends and receives between the ranks."""
        return Messages(self.mesh)

    def note(self, error: BaseException) -> None:
        """Keep an error for ``ncclCommGetAsyncError``; the first one is the cause of the others."""
        result, why = result_of(error)
        if not self.shared.async_error:
            self.shared.async_message = _text(why)
            self.shared.async_error = result


class Process:
    """What this process does when its NCCL is called. The methods raise; `install` registers them so that none does."""

    def __init__(self, settings: Settings, new: Callable[[int, int, int], int | None]) -> None:
        """`new`: ``motleyNcclNew``."""
        self.settings = settings
        self._new = new
        self._comms: dict[int, _Bound] = {}

    def bind(self, ranks: Communicator | Sums, host: str | None, device: Device | None = None) -> int:
        """See `bind`."""
        device = device or self.settings.device
        handle = self._new(ranks.rank, ranks.size, _number(device))
        if not handle:
            raise MemoryError("no memory for a communicator")
        self._comms[handle] = _Bound(_Comm.from_address(handle), ranks, host, device, is_owned=False)
        return handle

    def unique_id(self) -> bytes:
        """``ncclGetUniqueId``."""
        settings = self.settings
        return rendezvous.make_id(settings.host or rendezvous.default_host(), plain=settings.plain).pack()

    def run(self, calls: Sequence[Call]) -> None:
        """Run the calls of a group, or a single one.

        Those of a communicator run in their order, its messages last and all at once. Those of several communicators
        run at the same time, as their ranks, all in this process, wait for each other.
        """
        grouped: dict[int, list[Call]] = {}
        for call in calls:
            grouped.setdefault(call.comm, []).append(call)
        jobs = [partial(self._run_in_order, each) for each in grouped.values()]
        if len(jobs) == 1:
            jobs[0]()
            return
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(job) for job in jobs]
        for job in running:
            job.result()

    def end(self, handle: int, *, aborts: bool) -> None:
        """``ncclCommDestroy``: after what its streams still hold; ``ncclCommAbort``: before, and what runs fails."""
        comm = self._comms.pop(handle)
        if comm.device is not None and not aborts:
            for stream in comm.streams:
                comm.device.synchronise(stream)
        if aborts and comm.lock.locked() and isinstance(comm.ranks, Communicator):
            comm.ranks.interrupt()  # whoever is in a call lets go of the lock
        if aborts and not comm.is_owned:
            return
        with comm.lock:
            if comm.is_owned:
                comm.mesh.close()

    def close(self) -> None:
        """Leave all communicators that were made here."""
        for handle in list(self._comms):
            with suppress(Exception):
                self.end(handle, aborts=True)

    def _run_in_order(self, calls: Sequence[Call]) -> None:
        for call in calls:
            match call.kind:
                case Kind.INIT:
                    self._init(call.comm)
                case Kind.SPLIT:
                    self._split(call)
                case Kind.SEND | Kind.RECV:
                    pass
                case _:
                    comm = self._comm(call.comm)
                    sums = call.kind is Kind.ALL_REDUCE and call.op is Reduction.SUM and call.dtype.name == "float32"
                    # Whoever can do no more than sum is asked for no more.
                    reads, writes, step = collective(call, cast(Ranks, comm.ranks) if sums else comm.mesh)
                    self._execute(comm, call.stream, reads, writes, step)
        messages = [call for call in calls if call.kind in (Kind.SEND, Kind.RECV)]
        if messages:
            self._exchange(self._comm(calls[0].comm), messages)

    def _init(self, handle: int) -> None:
        shared = _Comm.from_address(handle)
        unique = rendezvous.UniqueId.unpack(bytes(shared.id))
        ranks, host = rendezvous.join(unique, shared.rank, shared.size)
        if shared.device == _UNKNOWN_DEVICE:
            shared.device = _number(self.settings.device)
        self._comms[handle] = _Bound(shared, ranks, host, self.settings.device, is_owned=True, is_plain=unique.plain)

    def _split(self, call: Call) -> None:
        parent = self._comm(call.comm)
        ranks = (
            self._mesh_of_color(parent, call) if isinstance(parent.ranks, Communicator) else _same(parent.ranks, call)
        )
        if ranks is not None:
            shared, is_owned = _Comm.from_address(call.child), ranks is not parent.ranks
            shared.rank, shared.size = ranks.rank, ranks.size
            self._comms[call.child] = _Bound(shared, ranks, parent.host, parent.device, is_owned, parent.is_plain)

    def _mesh_of_color(self, parent: _Bound, call: Call) -> Communicator | None:
        if parent.host is None:
            why = "this communicator was bound without the address at which the others reach this rank"
            raise NcclError(Result.INVALID_USAGE, f"{why}; use bind(ranks, host=...)")
        color = call.peer if call.child else None
        with parent.lock:
            return rendezvous.split(parent.mesh, parent.host, color, call.key, plain=parent.is_plain)

    def _exchange(self, comm: _Bound, calls: Sequence[Call]) -> None:
        if len({call.stream for call in calls}) > 1:
            raise NcclError(Result.INVALID_USAGE, "the sends and receives of a group must be on one stream")
        sends = [call for call in calls if call.kind is Kind.SEND]
        receives = [call for call in calls if call.kind is Kind.RECV]
        messages = comm.messages

        def step(given: Sequence[Array], taken: Sequence[Array]) -> None:
            messages.exchange(
                [(call.peer, data) for call, data in zip(sends, given, strict=True)],
                [(call.peer, out) for call, out in zip(receives, taken, strict=True)],
            )

        reads = [Region(call.send, call.nbytes) for call in sends]
        writes = [Region(call.recv, call.nbytes) for call in receives]
        self._execute(comm, calls[0].stream, reads, writes, step)

    def _execute(
        self, comm: _Bound, stream: int, reads: Sequence[Region], writes: Sequence[Region], step: Step
    ) -> None:
        """Run a step where its buffers are: at once on host memory, in the stream's order on a GPU's."""
        device = comm.device

        def guarded(given: Sequence[Array], taken: Sequence[Array]) -> None:
            try:
                with comm.lock:
                    step(given, taken)
            except NcclError:  # the ranks do not agree: none can go on
                comm.mesh.close()
                raise

        def in_stream(given: Sequence[Array], taken: Sequence[Array]) -> None:
            try:
                guarded(given, taken)
            except BaseException as error:
                log.error("a call of NCCL failed in its stream: %s", error)
                comm.note(error)

        if stream or any(memory.is_device_memory(each.pointer) for each in (*reads, *writes)):
            if device is None:
                why = "a CUDA stream or a GPU's memory was given, and this process uses host memory only"
                raise NcclError(Result.INVALID_USAGE, f"{why}: give install() a device")
            comm.streams.add(stream)
            device.submit(stream, reads, writes, in_stream)
            return
        try:
            guarded([host_view(each) for each in reads], [host_view(each) for each in writes])
        except BaseException as error:
            if not isinstance(error, UsageError):  # after those the communicator is as good as before
                comm.note(error)
            raise

    def _comm(self, handle: int) -> _Bound:
        comm = self._comms.get(handle)
        if comm is None:
            raise NcclError(Result.INVALID_USAGE, "this communicator is gone, or its group has not ended yet")
        return comm


def _same(sums: Sums, call: Call) -> Sums:
    """The part of all ranks in their order, which takes no talking; the others may be nobody that calls NCCL.

    TensorRT asks each communicator that it is given for it.
    """
    if not call.child or (call.peer, call.key) != (0, sums.rank):
        why = f"it sums over all ranks, so its part has color 0, and key {sums.rank} for this rank"
        raise NcclError(Result.INVALID_USAGE, f"this communicator cannot be split with color {call.peer}: {why}")
    return sums


def _number(device: Device | None) -> int:
    """The number of the GPU, as CUDA counts them."""
    return 0 if device is None else device.current()


@dataclass(frozen=True)
class _Installed:
    """The library in this process. What it calls must stay alive as long as it may call."""

    path: Path
    library: ctypes.CDLL
    process: Process
    callbacks: _Callbacks


_installed: _Installed | None = None
_installing = threading.Lock()


def install(*, host: str | None = None, plain: bool = False, device: Device | None = None) -> Path:
    """Make Motley the NCCL of this process, before anything in it loads another one; again is no harm.

    Args:
        host: this machine's address for the unique ids that are made here, where all ranks must reach it; by default
            that of the interface that leads outside. ``"127.0.0.1"`` is for ranks of one machine.
        plain: links of communicators with ids made here are not encrypted, on a network that is protected otherwise.
        device: what runs calls in order on CUDA streams; without one, only host memory can be used.

    Returns:
        The library, for programs that want its path.

    Raises:
        NcclError: the library is missing, another NCCL is in this process already, or this one with other settings.
    """
    global _installed
    settings = Settings(host, plain, device)
    with _installing:
        if _installed is None:
            _installed = _install(settings)
        elif _installed.process.settings != settings:
            why = f"NCCL is installed in this process with {_installed.process.settings}"
            raise NcclError(Result.INVALID_USAGE, f"{why}; install it once")
        return _installed.path


def bind(ranks: Communicator | Sums, *, host: str | None = None, device: Device | None = None) -> int:
    """The ``ncclComm_t`` of a mesh that is there already, for a program in this process; calls `install` if need be.

    Its calls and those of the mesh's owner share one order; no two may be made at the same time. ``ncclCommDestroy``
    (or `release`) gives the handle back and leaves the mesh to its owner.

    Args:
        ranks: the mesh; or somebody who can sum over its ranks, and then all other calls are errors.
        host: the address that the other ranks reach this one at, without which it cannot be split.
        device: what runs its calls on CUDA streams; by default that of `install`.

    Raises:
        NcclError: as `install`.
    """
    if _installed is None:
        install()
    return _current().process.bind(ranks, host, device)


def release(handle: int) -> None:
    """Give back a handle that `bind` gave.

    Raises:
        NcclError: it has been given back, or what its streams still held has failed.
    """
    library = _current().library
    result = library.ncclCommDestroy(ctypes.c_void_p(handle))
    if result:
        raise NcclError(Result(result), library.ncclGetLastError(None).decode())


def _current() -> _Installed:
    if _installed is None:
        raise NcclError(Result.INVALID_USAGE, "call motley.plugins.nccl.install() first")
    return _installed


def _install(settings: Settings) -> _Installed:
    path = library()
    ours = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(NAME)  # what others in this process get under that name: the one that was loaded first
    if _address(ours) != _address(found):
        why = "another NCCL has been loaded in this process"
        raise NcclError(Result.INVALID_USAGE, f"{why}; call install() before importing what uses it")
    sizes = (ctypes.c_size_t * 2)()
    ours.motleyNcclSizes(ctypes.byref(sizes), ctypes.byref(sizes, ctypes.sizeof(ctypes.c_size_t)))
    assert tuple(sizes) == (ctypes.sizeof(_Comm), ctypes.sizeof(_Call)), "library.c and binding.py differ"
    ours.motleyNcclNew.restype = ctypes.c_void_p
    ours.ncclGetLastError.restype = ctypes.c_char_p
    process = Process(settings, ours.motleyNcclNew)
    callbacks = _callbacks(process)
    ours.motleyNcclRegister(ctypes.byref(callbacks))

    def leave() -> None:
        ours.motleyNcclRegister(None)  # what still calls gets an error: there is no interpreter any more
        process.close()

    atexit.register(leave)
    return _Installed(path, ours, process, callbacks)


def _address(library: ctypes.CDLL) -> int | None:
    return ctypes.cast(library.ncclGetVersion, ctypes.c_void_p).value


def _callbacks(process: Process) -> _Callbacks:
    """What the C library calls. No exception may pass through C: each becomes a result and a message."""

    def guarded(message: int, work: Callable[[], object]) -> int:
        try:
            work()
        except BaseException as error:
            result, why = result_of(error)
            log.debug("a call of NCCL failed", exc_info=True)
            text = _text(why) + b"\0"
            ctypes.memmove(message, text, len(text))
            return result
        return Result.SUCCESS

    def unique_id(out: int, message: int) -> int:
        return guarded(message, lambda: ctypes.memmove(out, process.unique_id(), 128))

    def run(calls: Any, count: int, message: int) -> int:
        return guarded(message, lambda: process.run([_read(calls[index]) for index in range(count)]))

    def end(handle: int, aborts: int, message: int) -> int:
        return guarded(message, lambda: process.end(handle, aborts=bool(aborts)))

    return _Callbacks(_UNIQUE_ID(unique_id), _RUN(run), _END(end))


def _read(call: _Call) -> Call:
    return Call(
        kind=Kind(call.kind),
        dtype=DATA_TYPES[call.data_type],
        op=Reduction(call.op),
        peer=call.peer,
        count=call.count,
        send=call.send or 0,
        recv=call.recv or 0,
        stream=call.stream or 0,
        comm=call.comm or 0,
        child=call.child or 0,
        key=call.key,
    )


def _text(why: str) -> bytes:
    """A message as C takes it: it may be cut, but not within a character."""
    return why.encode()[: _MESSAGE - 1].decode(errors="ignore").encode()
