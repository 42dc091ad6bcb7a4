"""Rendering chats in a process of its own: a chat template is a stranger's program, and may never end.

The process reads lines of JSON, the template and then chats, and answers each chat with a line. It keeps the deadline
itself, by a watchdog that does not wait for Python: so it ends even if its owner does first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from motley.daemon.machine.ending import end_process
from motley.daemon.machine.memory import limit_memory
from motley.daemon.node.child import start_blocking_child
from motley.daemon.text.messages import Chat, ChatError
from motley.daemon.text.templates import NO_OPTIONS, ChatTemplate, ChatWriter

RENDER_S = 10.0
"""A template has so many seconds to write a chat; usual ones take milliseconds."""
MEMORY_BYTES = 1 << 30
"""And so much memory (on Linux); elsewhere the time alone bounds it."""
TEXT = 16 << 20
"""And so many characters for the chat; no model's context has as many."""
_OVERDUE = 1
"""The exit status of a process that its watchdog has ended."""


class TemplateApart:
    """A chat template that another process renders by, which is started anew after a failure.

    `render` is for one thread at a time, and blocks it; any thread may `close`.
    """

    def __init__(self, template: ChatWriter) -> None:
        self.source = template.source
        self._process: subprocess.Popen[bytes] | None = self._start()
        self._starting = threading.Lock()
        self._closed = False

    def render(self, chat: Chat, special: Mapping[str, str], options: Mapping[str, Any] = NO_OPTIONS) -> str:
        """Render messages as `ChatTemplate.render` does.

        Raises:
            ChatError: also if the template takes longer than `RENDER_S`, or its process does not survive it.
        """
        with self._starting:
            if self._closed:
                raise ChatError("the session was closed")
            process = self._process = self._process or self._start()
        answer = b""
        with contextlib.suppress(OSError, ValueError):  # it is gone, or was closed
            _write(process, [chat, dict(special), dict(options)])
            assert process.stdout is not None
            answer = process.stdout.readline()
        if not answer.endswith(b"\n"):
            self._process = None
            status = _end(process)
            why = f"has not ended within {RENDER_S:.0f} s" if status == _OVERDUE else f"broke its process ({status})"
            raise ChatError(f"the model's chat template {why}")
        said: dict[str, str] = json.loads(answer)
        if "refused" in said:
            raise ChatError(said["refused"])
        return said["text"]

    def close(self) -> None:
        """End the process, even while it renders. No chat is rendered any more."""
        with self._starting:
            self._closed = True
        if (process := self._process) is not None:
            _end(process)

    def _start(self) -> subprocess.Popen[bytes]:
        process = start_blocking_child("motley.daemon.node.answering.rendering")
        with contextlib.suppress(OSError):  # it is gone, as a chat will find
            _write(process, {"source": self.source, "seconds": RENDER_S, "bytes": MEMORY_BYTES})
        return process


def _write(process: subprocess.Popen[bytes], order: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.flush()


def _end(process: subprocess.Popen[bytes]) -> int:
    """Make sure that a process is gone; its exit status."""
    process.kill()
    with contextlib.suppress(OSError), process:  # closes its pipes, and waits for it
        pass
    return process.wait()


def main() -> None:
    """The process; it ends with its standard input."""
    order = json.loads(sys.stdin.buffer.readline() or "null")
    if order is None:
        return
    template = ChatTemplate(order["source"])
    limit_memory(order["bytes"])
    with open(os.devnull, "wb") as nowhere:
        for line in sys.stdin.buffer:
            chat, special, options = json.loads(line)
            faulthandler.dump_traceback_later(order["seconds"], exit=True, file=nowhere)
            try:
                said = {"text": template.render(chat, special, options)}
                if len(said["text"]) > TEXT:
                    said = {"refused": f"the model's chat template writes more than {TEXT} characters"}
            except ChatError as error:
                said = {"refused": str(error)}
            sys.stdout.buffer.write(json.dumps(said).encode() + b"\n")
            sys.stdout.buffer.flush()
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
    end_process()
