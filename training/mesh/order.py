"""What a daemon tells a training worker to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from motley.daemon.weights.hub import ModelNotFound, resolve
from motley.training.errors import TrainingError
from motley.training.mesh.ticket import Ticket
from motley.transport import Listener, Membership, Tls


@dataclass(frozen=True)
class WorkerOrder:
    """
    Attributes:
        session: what the members' certificates are for.
        epoch: of the job.
        member: which one this worker is; `LEADER` has the data.
        members: how many there are.
        mode: "merge" or "chain".
        model: a folder or a hub id.
        secret: shared by the members.
        tls: certificate, key and authority, in PEM.
        listen: where to listen: host, first and last port.
        folder: of this worker, for what a death must not cost.
        models: a folder in which model names are looked up.
        ticket: to the leader: what was asked for.
    """

    session: str
    epoch: int
    member: int
    members: int
    mode: str
    model: str
    secret: bytes
    tls: tuple[str, str, str]
    listen: tuple[str, int, int]
    folder: Path
    models: Path | None
    ticket: Ticket | None

    @classmethod
    def read(cls, told: dict[str, Any]) -> WorkerOrder:
        """
        Raises:
            TrainingError: it is none.
        """
        try:
            return cls(
                **told
                | {
                    "secret": bytes.fromhex(told["secret"]),
                    "tls": tuple(told["tls"]),
                    "listen": tuple(told["listen"]),
                    "folder": Path(told["folder"]),
                    "models": Path(told["models"]) if told["models"] else None,
                    "ticket": Ticket.read(told["ticket"]) if told["ticket"] is not None else None,
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TrainingError(f"the daemon's order is none: {type(error).__name__}: {error}") from error

    @property
    def job_folder(self) -> Path:
        """Of the job, on this machine; it is there until the job is over."""
        return self.folder.parent

    @property
    def membership(self) -> Membership:
        return Membership(self.session, self.epoch, self.member, self.members, self.secret, bytes(32))

    @property
    def security(self) -> Tls:
        certificate, key, authority = (each.encode() for each in self.tls)
        return Tls(certificate, key, authority)

    def listener(self) -> Listener:
        """Listen where others reach this worker."""
        return Listener(*self.listen)

    @cached_property
    def model_folder(self) -> Path:
        """Where the model is on this machine; it is fetched if it is the hub's.

        Raises:
            TrainingError: it is not here, or is no folder.
        """
        try:
            place = resolve(self.model, self.models)
        except ModelNotFound as error:
            raise TrainingError(str(error)) from error
        if not place.is_dir():
            raise TrainingError(f"{place}: a GGUF file cannot be trained; give the model's folder with safetensors")
        return place
