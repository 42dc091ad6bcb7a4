"""The process that workers are forked from: ``python -m motley.daemon.worker.fork_server``.

It has imported what every worker needs, 0.7 s of a processor, and does nothing else, least of all by threads, so that
workers begin at once and share that memory. `motley.daemon.node.workers.forked` starts it and has it fork; as in
CPython's `multiprocessing.forkserver`, which gives no child files of its own.

Standard input is a socket with orders (`motley.daemon.pipe.forking`). When it ends, so does this process; its workers
end with their own standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from motley.daemon.machine.ending import end_process
from motley.daemon.machine.importing import imports_that_stay
from motley.daemon.pipe.forking import FILES, MOST_BYTES, NUMBER

assert sys.platform == "linux", "elsewhere nothing is forked"


def main(become: Callable[[], int]) -> None:
    """Fork workers until nobody can ask for any more.

    Args:
        become: what a worker does; gives its exit status.
    """
    # Its only other threads are OpenBLAS's, which ends them before a fork and starts them again after it.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    orders = socket.socket(fileno=os.dup(0))
    ended, noticed = os.pipe()
    os.set_blocking(noticed, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # so that the system tells `noticed`
    signal.set_wakeup_fd(noticed, warn_on_full_buffer=False)
    told: dict[int, int] = {}
    """By process: where its status is told."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(orders, selectors.EVENT_READ)
        waiting.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj == ended:
                    os.read(ended, 4096)
                    _tell_who_ended(told)
                    continue
                order, files, *_ = socket.recv_fds(orders, MOST_BYTES, len(FILES))
                if not order:
                    return
                *own, to_tell = files
                try:
                    process = os.fork()
                except OSError as error:  # too many processes, say; the end of `to_tell` says so
                    print(f"no worker can be forked: {error}", file=sys.stderr, flush=True)
                    os.close(to_tell)
                else:
                    if not process:
                        waiting.close()
                        orders.close()
                        _be_worker(json.loads(order), own, [ended, noticed, to_tell, *told.values()], become)
                    told[process] = to_tell
                    _tell(to_tell, process)
                for each in own:
                    os.close(each)


def _be_worker(
    environment: dict[str, str], files: list[int], of_parent: list[int], become: Callable[[], int]
) -> NoReturn:
    """What a forked process does.

    Args:
        files: its standard input, output and error.
        of_parent: files that it has no use for.
    """
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for each in of_parent:
            os.close(each)
        for number, each in enumerate(files):
            os.dup2(each, number)
            os.close(each)
        _open_streams()
        os.environ.clear()
        os.environ.update(environment)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text("motley-worker")  # for `top`, as its command line is this module's
        status = become()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    end_process(status)


def _open_streams() -> None:
    """Open standard input, output and error anew: Python's were made for the files of the process that forks, and still
    take a pipe for a file, say."""
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _tell_who_ended(told: dict[int, int]) -> None:
    """Tell the status of every worker that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            process, status = ended
            file = told.pop(process)
            _tell(file, os.waitstatus_to_exitcode(status))
            os.close(file)


def _tell(file: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever wanted to know has gone
        os.write(file, NUMBER.pack(number))


if __name__ == "__main__":
    with imports_that_stay():
        import numpy.ma  # which `numpy.unique` imports, 30 ms
        import numpy.random  # noqa: F401

        import motley.plugins.onnxruntime.engine
        import motley.plugins.reference.engine  # noqa: F401  # every rank is examined by it
        from motley.daemon.worker import process
    main(process.main)
    end_process()
