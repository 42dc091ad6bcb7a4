"""A worker that trains alone on what the owner deals it. While it trains it neither sends nor receives anything."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import Any

from motley.protocol import LEADER
from motley.training.adapters import CONFIG, WEIGHTS
from motley.training.base import load_base
from motley.training.errors import TrainingError
from motley.training.examples import Example
from motley.training.files import CURVE
from motley.training.mesh.order import WorkerOrder
from motley.training.mesh.pipe import Pipe
from motley.training.mesh.talk import (
    STRETCH,
    Counted,
    heard,
    pack_files,
    say,
    unpack_examples,
    unpack_files,
)
from motley.training.mesh.ticket import read_settings
from motley.training.settings import Settings
from motley.training.training import config_digest, mean_loss, train_on
from motley.transport import Connected, Message, Messenger

LOOK_S = 0.5


def train_alone(order: WorkerOrder, pipe: Pipe) -> None:
    """Train what the owner deals, hand the adapter back, and end when the owner says so.

    Raises:
        TrainingError: the model, the data or the disk is not as it must be, or the owner does without this worker.
        motley.transport.TransportError: it cannot listen.
    """
    digest = config_digest(order.model_folder)
    total = [0]
    with (
        closing(order.listener()) as listener,
        closing(
            Messenger(
                order.membership,
                order.security,
                listener=listener,
                accepts={LEADER},
                wrap=lambda peer, stream: Counted(stream, total),
            )
        ) as messenger,
    ):
        pipe.say(listening=listener.port)
        trainer = _Trainer(order, pipe, messenger, digest, total)
        while not trainer.dismissed:
            for event in messenger.receive(LOOK_S):
                match event:
                    case Connected():
                        trainer.greet()
                    case Message(data=data):
                        trainer.hear(*heard(data))
            trainer.look()
    pipe.say(done="{}")


class _Trainer:
    def __init__(self, order: WorkerOrder, pipe: Pipe, messenger: Messenger, digest: str, total: list[int]) -> None:
        self._order, self._pipe, self._messenger, self._digest, self._total = order, pipe, messenger, digest, total
        self._plan: dict[str, Any] = {}
        self._came = bytearray()
        """Of what the owner sends."""
        self._work: threading.Thread | None = None
        self._failure: Exception | None = None
        self._made: dict[str, Any] | None = None
        """What the work that has ended is to tell."""
        self._evaluated: list[Example] = []
        self._settings = Settings()
        self._parcel = b""
        """What the owner may ask for."""
        self.dismissed = False

    def greet(self) -> None:
        """Tell an owner that has just connected how things stand."""
        self._say({"do": "hello", "model": self._digest, "busy": self._work is not None, "planned": bool(self._plan)})
        if self._parcel and self._made:
            self._say(self._made)
        elif self._plan and self._work is None:
            self._ask()

    def hear(self, told: dict[str, Any], body: bytes) -> None:
        """Do what the owner wants."""
        match told["do"]:
            case "plan" | "weigh":
                self._plan, self._came = told, bytearray()
                self._ask()
            case "data" if told["at"] == len(self._came):
                self._came += body
                if len(self._came) < self._plan["size"]:
                    self._ask()
                else:
                    self._begin()
            case "want":
                at = told["at"]
                say(self._messenger, LEADER, {"do": "data", "at": at}, memoryview(self._parcel)[at : at + STRETCH])
            case "leave":
                raise TrainingError(told["why"])
            case "end":
                self.dismissed = True

    def look(self) -> None:
        """Tell the owner what has been made, once it has.

        Raises:
            TrainingError, Exception: the work has failed.
        """
        if self._work is None or self._work.is_alive():
            return
        self._work = None
        if self._failure is not None:
            raise self._failure
        if self._made is not None:
            self._say(self._made)

    def _ask(self) -> None:
        self._say({"do": "want", "at": len(self._came)})

    def _say(self, told: dict[str, Any]) -> None:
        say(self._messenger, LEADER, told)

    def _begin(self) -> None:
        data, self._came = bytes(self._came), bytearray()
        work = self._train if self._plan["do"] == "plan" else self._weigh

        def run() -> None:
            try:
                work(data)
            except Exception as error:  # told by the thread that talks
                self._failure = error

        self._work = threading.Thread(target=run, daemon=True)
        self._work.start()

    def _train(self, data: bytes) -> None:
        before = self._total[0]
        examples = unpack_examples(data)
        learnt, self._evaluated = examples[: self._plan["learnt"]], examples[self._plan["learnt"] :]
        settings = self._settings = read_settings(self._plan["settings"])
        out = self._order.folder / "training"
        points, began_at, missed = train_on(
            self._order.model_folder,
            learnt,
            self._evaluated,
            out,
            settings,
            keep_every=self._plan["keep_every"],
            told=lambda point: self._pipe.progress(point, settings.steps),
        )
        files = [out / "adapter" / CONFIG, out / "adapter" / WEIGHTS, out / CURVE]
        try:
            self._parcel = pack_files(files)
        except OSError as error:
            raise TrainingError(f"{out}: the adapter cannot be read: {error}") from error
        held_out = [point.held_out for point in points if point.held_out is not None]
        report = {"steps": settings.steps, "began_at": began_at, "held_out": [*held_out[:1], *held_out[-1:]]}
        report |= {"gradient_missed": missed} if settings.top else {}
        report |= {"dealt_bytes": before, "wire_bytes": self._total[0] - before}
        self._made = {"do": "made", "size": len(self._parcel), "report": report}

    def _weigh(self, data: bytes) -> None:
        """Evaluate the merged adapter."""
        from peft import PeftModel

        folder = self._order.folder / "merged"
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in unpack_files(data, (CONFIG, WEIGHTS)).items():
            (folder / name).write_bytes(content)
        base = load_base(self._order.model_folder, half=self._settings.half)
        model = PeftModel.from_pretrained(base, str(folder))
        loss = mean_loss(model, self._evaluated, self._settings.batch)
        self._made = {"do": "weighed", "loss": loss}
