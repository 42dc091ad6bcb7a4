"""The worker's end of what it and its daemon say to each other: lines of JSON on standard input and output."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

from motley.training.errors import TrainingError
from motley.training.files import Point

BEAT_S = 5.0
"""A worker shows life so often, whatever it computes."""


class Pipe:
    """Make one before anything else is imported that might print: standard output becomes standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._began = time.monotonic()
        """When the latest step was done."""

    def order(self) -> dict[str, Any]:
        """The first line. From then on this process shows life, and ends with its owner.

        Raises:
            TrainingError: it is no JSON object.
        """
        try:
            order = json.loads(sys.stdin.readline())
        except ValueError as error:
            raise TrainingError(f"the daemon's order is no JSON: {error}") from error
        for work in (self._hear, self._beat):
            threading.Thread(target=work, daemon=True).start()
        if not isinstance(order, dict):
            raise TrainingError("the daemon's order is no JSON object")
        return order

    def told(self) -> list[dict[str, Any]]:
        """What the daemon has said since this was asked last."""
        found = []
        while not self._told.empty():
            found.append(self._told.get())
        return found

    def say(self, **body: Any) -> None:
        """Tell the daemon: a field of `motley.protocol.mesh_pb2.JobEvent`, by name."""
        with self._lock:
            self._out.write(json.dumps(body) + "\n")
            self._out.flush()

    def progress(self, point: Point, steps: int) -> None:
        """Tell of a step."""
        now = time.monotonic()
        seconds, self._began = now - self._began, now
        told = {
            "step": point.step,
            "steps": steps,
            "rate": point.rate,
            "tokens_per_s": point.tokens / max(seconds, 1e-6),
        }
        losses = {"loss": point.loss, "held_out": point.held_out}
        self.say(progress=told | {name: loss for name, loss in losses.items() if loss is not None})

    def _hear(self) -> None:
        for line in sys.stdin:
            self._told.put(json.loads(line))
        os._exit(1)

    def _beat(self) -> None:
        while True:
            self.say(beat=1)
            time.sleep(BEAT_S)
