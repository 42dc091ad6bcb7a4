"""How processes of ours end."""

from __future__ import annotations

import subprocess
import sys

WHO = """
import threading
from motley.daemon.machine.ending import end_process
threading.Thread(target=threading.Event().wait).start()
print("all that was said")
end_process(3)
"""


def test_what_was_said_is_heard_and_nothing_is_waited_for() -> None:
    """A thread still runs, for which Python would wait."""
    ended = subprocess.run([sys.executable, "-P", "-c", WHO], stdout=subprocess.PIPE, timeout=60)
    assert (ended.returncode, ended.stdout.split()) == (3, b"all that was said".split())
