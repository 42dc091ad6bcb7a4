"""A worker that says where it listens, and then computes for ever and looks at nothing:
``python -m tests.daemon.worker.stuck_worker``."""

from __future__ import annotations

import sys
import threading

from motley.daemon.worker import process
from motley.daemon.worker.worker import Worker


def stick(worker: Worker) -> None:
    worker.daemon.tell(listening=1)
    threading.Event().wait()


process.run = stick
sys.exit(process.main())
