"""What a machine keeps of a mesh that it belongs to: by what it comes back, and how its commands reach the API.

A file for each mesh and node name, in a folder that only its owner can read. The machine of the orchestrator has one
without a name, by which its owner's commands may do everything, as long as the orchestrator runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from motley.protocol.files import write_private

FOLDER = "meshes"
"""In the folder of whoever runs Motley."""


@dataclass(frozen=True)
class Membership:
    """
    Attributes:
        name: of the node; "": none, but the orchestrator.
        fingerprint: of the mesh's certificate, SHA-256 in hex digits.
        key: what this machine shows instead of a join token, and to the API.
        orchestrator: ``host:port`` where nodes join.
        api_url: where this machine reaches the API; "": nowhere.
        api_trust: the certificate by which it knows the API, PEM.
        api_name: the name in the API's certificate; "": none that counts.
    """

    name: str
    fingerprint: str
    key: str
    orchestrator: str
    api_url: str
    api_trust: str
    api_name: str

    @property
    def token(self) -> str:
        """What takes the place of a join token."""
        return f"{self.key}.{self.fingerprint}"

    def keep(self, folder: Path) -> None:
        """Write it to its file.

        Raises:
            OSError: it cannot be written.
        """
        write_private(_file(folder, self.fingerprint, self.name), json.dumps(asdict(self)).encode())


def find(folder: Path, fingerprint: str, name: str) -> Membership | None:
    """What is kept of a mesh, for a node name."""
    return _read(_file(folder, fingerprint, name))


def all_kept(folder: Path) -> list[Membership]:
    """All that is kept: as the orchestrator's machine first, then the latest first."""
    with contextlib.suppress(OSError):
        files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
        kept = [found for file in files if (found := _read(file)) is not None]
        return sorted(kept, key=lambda each: bool(each.name))
    return []


def forget(folder: Path, membership: Membership) -> None:
    """Remove the file, if it is still of this."""
    if find(folder, membership.fingerprint, membership.name) == membership:
        with contextlib.suppress(OSError):
            _file(folder, membership.fingerprint, membership.name).unlink()


def _file(folder: Path, fingerprint: str, name: str) -> Path:
    node = f"-{hashlib.sha256(name.encode()).hexdigest()[:16]}" if name else ""
    return folder / f"{fingerprint[:16]}{node}.json"


def _read(file: Path) -> Membership | None:
    """What is in a file; None if that is nothing of ours."""
    try:
        told = json.loads(file.read_bytes())
        made = Membership(**told)
    except (OSError, ValueError, TypeError):
        return None
    return made if all(isinstance(own, str) for own in asdict(made).values()) else None
