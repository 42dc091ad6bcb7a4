"""The service on Linux: a unit of this user's systemd, which starts with the machine if the user lingers."""

from __future__ import annotations

import os
from pathlib import Path

from motley.cli.reaching.home import home
from motley.cli.service.manager import Manager

NAME = "motley.service"


def unit(python: str, motley_home: str) -> str:
    """The text of the unit.

    Args:
        python: the interpreter that Motley is installed in.
        motley_home: the folder in which Motley keeps what it needs another time.
    """
    return f"""\
[Unit]
Description=Motley: this machine's part of one language model

[Service]
ExecStart={_quoted(python)} -m motley.cli.service.run {_quoted(motley_home)}
Environment=PYTHONUNBUFFERED=1
Restart=on-failure
RestartSec=10
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec=60
SuccessExitStatus=130

[Install]
WantedBy=default.target
"""


def manager(python: str, lines: int) -> Manager:
    """How systemd runs the service of this user.

    Args:
        lines: of its log that are shown.
    """
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Manager(
        configuration / "systemd" / "user" / NAME,
        unit(python, str(home().absolute())).encode(),
        known=None,
        end=(),
        start=(
            ("systemctl", "--user", "daemon-reload"),
            ("systemctl", "--user", "enable", NAME),
            ("systemctl", "--user", "restart", NAME),
        ),
        stop=(("systemctl", "--user", "disable", "--now", NAME),),
        stopped=(("systemctl", "--user", "daemon-reload"),),
        state=("systemctl", "--user", "status", "--no-pager", NAME),
        logs=("journalctl", "--user", "--unit", NAME, "--no-pager", "--lines", str(lines)),
        hint="It ends when you log out, unless you run: loginctl enable-linger",
    )


def _quoted(text: str) -> str:
    """A word of a command as systemd reads it."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'
